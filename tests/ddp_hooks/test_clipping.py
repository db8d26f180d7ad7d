"""Norms, clipping and gradient scaling with the reduce-scatter hook; test_training_loops.py has more of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from onecopy.comm.collectives import Collectives
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.data_parallel import (
    BRANCHING,
    ROUNDING,
    SGD,
    Case,
    Part,
    Run,
    Split,
    assert_same_values,
    half_model,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    sharded_run,
    vectors,
)
from tests.support.harness import distributed
from tests.support.models import assert_equal


def unscale(run: Run) -> None:
    scaler = make_scaler(2.0)
    scaler.scale(torch.ones(()))  # makes the factor
    scaler.unscale_(run.zero)


CHANGES: dict[str, Callable[[Run], object]] = {
    "gradients": lambda run: [param.grad.mul_(0.5) for param in run.params],  # type: ignore[union-attr]
    "ranges": lambda run: [param.grad.local.mul_(0.5) for param in run.params],  # type: ignore[union-attr]
    "unscaled": unscale,
    "another pass": lambda run: run.backward(9),
}


@pytest.mark.parametrize("change", CHANGES)
@distributed(2)
def test_all_norms_take_one_reduction_and_are_computed_again_after_a_write(world_size: int, change: str) -> None:
    ours, reference = scattered_run(Case()), plain_run(Case())
    for run in (ours, reference):
        run.backward(0)
    all_reduce = Collectives.all_reduce
    with mock.patch.object(Collectives, "all_reduce", autospec=True, side_effect=all_reduce) as reduce:
        expected = torch.nn.utils.clip_grad_norm_(ours.params, 1e9) * 0.5
    assert reduce.call_count == 1
    CHANGES[change](ours)
    if change == "another pass":
        reference.backward(9)
        expected = reference.clip(1e9)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(ours.params, 1e9), expected)
    torch.testing.assert_close(ours.zero.grad_norm(), expected)


@pytest.mark.parametrize("make", [scattered_run, sharded_run], ids=["reduce-scatter", "no hook"])
@distributed(2)
def test_half_precision_gradients_are_multiplied_by_a_factor_that_is_not_rounded(
    world_size: int, make: Callable[[Case], Run]
) -> None:
    case = Case(model=half_model)
    ours, reference = make(case), plain_run(case)
    for run in (ours, reference):
        run.backward(0)
    norm = ours.zero.grad_norm()
    factor = 0.7003  # in bf16 another number
    ours.zero.clip_grad_norm_(float(norm) * factor)
    for owned in ours.zero.engine.inner.owned:
        place = slice(owned.shard.start, owned.shard.stop)
        gradient, other = owned.param.grad, reference.params[owned.shard.param].grad
        assert gradient is not None
        assert other is not None
        local = gradient.local if isinstance(gradient, ShardGrad) else gradient.flatten()[place]
        expected = other.float() * (float(norm) * factor / (norm + 1e-6))
        assert torch.equal(local, expected.bfloat16().flatten()[place])


@distributed(2, 3)
def test_changes_of_every_element_alike_equal_plain_ddp(world_size: int) -> None:
    """By torch's functions, and by ours for two optimizers, one of which has parameters that are unused."""
    parts = (Part(torch.optim.SGD, SGD, params=matrices), Part(torch.optim.SGD, SGD, params=vectors))
    case = Case(parts=parts, **BRANCHING)
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(6):
        for run in (ours, reference):
            run.backward(step)
            if step % 3 == 0:
                torch.nn.utils.clip_grad_value_(run.params, 1e-3)
            elif step % 3 == 1:
                torch.nn.utils.clip_grad_norm_(run.params[:2], 1e-3)
            else:
                run.clip(1e-3)
            run.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)


@distributed(2, 3)
def test_each_of_several_optimizers_skips_its_own_gradients_only(world_size: int) -> None:
    """As with plain DDP. A parameter as small as the vector is owned by one rank, which sees nothing of the others."""
    case = Case(model=Split, parts=(Part(params=matrices), Part(params=vectors)))
    ours, reference = scattered_run(case), plain_run(case)
    scalers = make_scaler(), make_scaler()
    for bad_matrix, bad_vector in ((math.inf, 1.0), (1.0, math.nan), (1.0, 1.0), (math.inf, math.inf)):
        for run, scaler in zip((ours, reference), scalers, strict=True):
            run.model.zero_grad()
            scaler.scale(run.model(bad_matrix, bad_vector)).backward()
            for optimizer in run.optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_values(ours, reference, f"gradients {bad_matrix} and {bad_vector}")


@distributed(2)
def test_large_gradients_that_are_finite_are_not_taken_for_infinite(world_size: int) -> None:
    case = Case(model=Split, parts=(Part(torch.optim.SGD, {"lr": 1e-39}),))
    ours, reference = scattered_run(case), plain_run(case)
    for run in (ours, reference):
        scaler = make_scaler(1.0)
        scaler.scale(run.model(1.5e38, 1.0)).backward()
        scaler.step(run.optimizers[0])
        scaler.update()
        assert scaler.get_scale() == 1.0
        assert float(run.model.module.get_parameter("matrix").detach().max()) < 0.9
    assert_same_values(ours, reference, "large gradients")
