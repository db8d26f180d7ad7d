"""Norms, clipping and gradient scaling with the reduce-scatter hook."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import onecopy
from onecopy.comm.collectives import Collectives
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.data_parallel import SGD
from tests.support.ddp_training import (
    BRANCHING,
    COUNTERS,
    MOMENTUM,
    ROUNDING,
    TWO_ADAMWS,
    VIEW,
    WHOLE,
    Case,
    Part,
    Run,
    Split,
    assert_same_state,
    assert_same_values,
    half_model,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    sharded_run,
    tolerance_of,
    vectors,
)
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal, small_model, values

# Norms and clipping


def double_model() -> torch.nn.Module:
    return small_model().double()


Clip = Callable[..., Tensor]


def our_clip(run: Run, max_norm: float, norm_type: float = 2.0) -> Tensor:
    return onecopy.clip_grad_norm_(run.zeros, max_norm, norm_type)


def torch_clip(run: Run, max_norm: float, norm_type: float = 2.0, foreach: bool | None = None) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(run.params, max_norm, norm_type, foreach=foreach)


TWO_SGDS = (Part(torch.optim.SGD, SGD, params=matrices), Part(torch.optim.SGD, SGD, params=vectors))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(
    "clip", [our_clip, torch_clip, partial(torch_clip, foreach=True)], ids=["ours", "torch", "foreach"]
)
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", MOMENTUM),
        Case("whole", (Part(torch.optim.SGD, SGD, {"shard_by": "parameter"}),), ddp=VIEW),
        Case("a list", TWO_SGDS),
        Case("unused", MOMENTUM, **BRANCHING),
        Case("accumulated", MOMENTUM, passes=2),
        Case("double precision", MOMENTUM, model=double_model),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_the_norm_is_that_of_all_gradients_and_takes_one_reduction(
    world_size: int, case: Case, clip: Clip, norm_type: float
) -> None:
    """With the hook, and by our function without one."""
    ours, reference = scattered_run(case), plain_run(case)
    without_hook = sharded_run(case)
    clipped = 0
    for step in range(4):
        for run in (ours, reference, without_hook):
            run.backward(step)
        gradients = [param.grad for param in reference.params if param.grad is not None]
        expected = torch.nn.utils.get_total_norm(gradients, norm_type)
        rtol = 1e-12 if expected.dtype == torch.float64 else 1e-6
        max_norm = float(expected) * (0.5 if step % 2 else 2.0)
        torch_clip(reference, max_norm, norm_type)
        torch.testing.assert_close(onecopy.grad_norm(ours.zeros, norm_type), expected, rtol=rtol, atol=0)
        for run, how in ((ours, clip), (without_hook, our_clip)):
            all_reduce = Collectives.all_reduce
            with mock.patch.object(Collectives, "all_reduce", autospec=True, side_effect=all_reduce) as reduce:
                returned = how(run, max_norm, norm_type)
            assert reduce.call_count == 1
            torch.testing.assert_close(returned, expected, rtol=rtol, atol=0)
        clipped += float(expected) > max_norm
        for run in (ours, reference, without_hook):
            run.update()
        for run in (ours, without_hook):
            assert_equal(run.params, reference.params, f"iteration {step}", ROUNDING)
    assert clipped == 2
    assert_replicas_equal(ours.params)


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
def test_norms_are_computed_again_after_a_write(world_size: int, change: str) -> None:
    ours, reference = scattered_run(Case()), plain_run(Case())
    for run in (ours, reference):
        run.backward(0)
    expected = torch_clip(ours, 1e9) * 0.5
    CHANGES[change](ours)
    if change == "another pass":
        reference.backward(9)
        expected = torch_clip(reference, 1e9)
    torch.testing.assert_close(torch_clip(ours, 1e9), expected)
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
    case = Case(parts=MOMENTUM)
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(4):
        for run in (ours, reference):
            run.backward(step)
            if step % 2:
                torch.nn.utils.clip_grad_value_(run.params, 1e-3)
            else:
                torch.nn.utils.clip_grad_norm_(run.params[:2], 1e-3)
            run.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)


# Gradient scaling


def scaled_step(run: Run, scaler: torch.amp.GradScaler, step: int, factor: float, clip: bool) -> bool:
    """One iteration; the loss of one rank is multiplied by ``factor``. Returns whether parameters changed."""
    before = values(run.params)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    if run.case.passes > 1:
        with run.ddp.no_sync():
            scaler.scale(run.loss(100 + 2 * step + 1)).backward()
    loss = run.loss(step)
    scaler.scale(loss * factor if dist.get_rank() == dist.get_world_size() - 1 else loss).backward()
    if clip:
        for optimizer in run.optimizers:
            scaler.unscale_(optimizer)
        (our_clip if run.zeros else torch_clip)(run, 0.05)
    for optimizer in run.optimizers:
        scaler.step(optimizer)
    scaler.update()
    return any(not torch.equal(new, old) for new, old in zip(run.params, before, strict=True))


@pytest.mark.parametrize(
    ("bad", "clip"), [(math.inf, False), (math.nan, True)], ids=["infinite", "not a number, and clipped"]
)
@pytest.mark.parametrize(
    "case",
    [
        Case("whole", WHOLE, ddp=VIEW),
        Case("a list", TWO_ADAMWS),
        Case("unused, counted, accumulated", COUNTERS, **BRANCHING, passes=2),
        Case("in buckets", (Part(ours={"parameters_as_bucket_view": True}),), ddp={}),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_a_gradient_scaler_skips_alike_on_all_ranks_and_equals_plain_ddp(
    world_size: int, case: Case, bad: float, clip: bool
) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    scalers = make_scaler(), make_scaler()
    skipped = {0, 4, 5, 9}
    for step in range(12):
        factor = bad if step in skipped else 1.0
        for run, scaler in zip((reference, ours), scalers, strict=True):
            assert scaled_step(run, scaler, step, factor, clip) == (step not in skipped)
        assert scalers[1].get_scale() == scalers[0].get_scale(), f"step {step}"
        assert_equal(ours.params, reference.params, f"step {step}", ROUNDING if clip else tolerance_of(case))
    if not clip:
        assert_same_state(ours, reference)
    assert_replicas_equal(ours.params)


@distributed(2, 3)
def test_each_of_several_optimizers_skips_its_own_gradients_only(world_size: int) -> None:
    """As with plain DDP. A parameter as small as the vector is owned by one rank, which sees nothing of the others."""
    case = Case(model=Split, parts=(Part(params=matrices), Part(params=vectors)))
    ours, reference = scattered_run(case), plain_run(case)
    scalers = make_scaler(), make_scaler()
    for bad_matrix, bad_vector in ((math.inf, 1.0), (1.0, math.nan), (1.0, 1.0), (math.inf, math.inf)):
        for run, scaler in zip((ours, reference), scalers, strict=True):
            run.ddp.zero_grad()
            scaler.scale(run.ddp(bad_matrix, bad_vector)).backward()
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
        scaler.scale(run.ddp(1.5e38, 1.0)).backward()
        scaler.step(run.optimizers[0])
        scaler.update()
        assert scaler.get_scale() == 1.0
        assert float(run.ddp.module.get_parameter("matrix").detach().max()) < 0.9
    assert_same_values(ours, reference, "large gradients")
