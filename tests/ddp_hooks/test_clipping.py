"""Norms, clipping and gradient scaling with the reduce-scatter hook."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.collectives import Collectives
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.ddp_training import (
    BRANCHING,
    ELEMENT,
    ROUNDING,
    SGD,
    VIEW,
    Counting,
    DDPRun,
    assert_same_values,
    branching_loss,
    half_loss,
    half_model,
    make_ddp,
    tolerance_of,
)
from tests.support.harness import distributed
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    small_loss,
)
from tests.support.reduce_scatter import (
    BUCKETS,
    TWO_ADAMWS,
    Case,
    Part,
    Split,
    double_loss,
    double_model,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    vectors,
)

# Norms and clipping


NORM_TYPES = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])


def our_clip(run: DDPRun, max_norm: float, norm_type: float) -> Tensor:
    return onecopy.clip_grad_norm_(run.zeros, max_norm, norm_type)


def torch_clip(run: DDPRun, max_norm: float, norm_type: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(run.params, max_norm, norm_type)


def torch_clip_by_foreach(run: DDPRun, max_norm: float, norm_type: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(run.params, max_norm, norm_type, foreach=True)


@NORM_TYPES
@pytest.mark.parametrize("clip", [our_clip, torch_clip, torch_clip_by_foreach])
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", (Part(torch.optim.SGD, SGD),)),
        Case("whole", (Part(torch.optim.SGD, SGD, {"shard_by": "parameter"}),), ddp=VIEW),
        Case("a list", (Part(torch.optim.SGD, SGD, params=matrices), Part(torch.optim.SGD, SGD, params=vectors))),
        Case("unused", (Part(torch.optim.SGD, SGD),), **BRANCHING),
        Case("accumulated", (Part(torch.optim.SGD, SGD),), passes=2),
    ],
    ids=lambda case: case.name,
)
@distributed(3)
def test_the_norm_is_that_of_all_gradients_and_takes_one_reduction(
    world_size: int, case: Case, clip: Callable[[DDPRun, float, float], Tensor], norm_type: float
) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    clipped = 0
    for step in range(4):
        reference.backward(step)
        ours.backward(step)
        expected = torch.nn.utils.get_total_norm(
            [param.grad for param in reference.params if param.grad is not None], norm_type
        )
        max_norm = float(expected) * (0.5 if step % 2 else 2.0)
        torch.nn.utils.clip_grad_norm_(reference.params, max_norm, norm_type)
        torch.testing.assert_close(onecopy.grad_norm(ours.zeros, norm_type), expected, rtol=1e-6, atol=0)
        with mock.patch.object(Collectives, "all_reduce", autospec=True, side_effect=Collectives.all_reduce) as reduce:
            returned = clip(ours, max_norm, norm_type)
        assert reduce.call_count == 1
        torch.testing.assert_close(returned, expected, rtol=1e-6, atol=0)
        clipped += float(expected) > max_norm
        ours.update()
        reference.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)
    assert clipped == 2
    assert_replicas_equal(ours.params)


def write(run: DDPRun) -> None:
    for param in run.params:
        assert param.grad is not None
        param.grad.mul_(0.5)


def write_ranges(run: DDPRun) -> None:
    for param in run.params:
        assert isinstance(param.grad, ShardGrad)
        param.grad.local.mul_(0.5)


def unscale(run: DDPRun) -> None:
    scaler = make_scaler(2.0)
    scaler.scale(torch.ones(()))  # makes the factor
    scaler.unscale_(run.zero)


def another_pass(run: DDPRun) -> None:
    run.backward(9)


@pytest.mark.parametrize("change", [write, write_ranges, unscale, another_pass])
@distributed(2)
def test_norms_are_computed_again_after_a_write(world_size: int, change: Callable[[DDPRun], None]) -> None:
    ours, reference = scattered_run(Case()), plain_run(Case())
    for run in (ours, reference):
        run.backward(0)
    before = torch_clip(ours, 1e9, 2.0)
    change(ours)
    if change is another_pass:
        change(reference)
        expected = torch_clip(reference, 1e9, 2.0)
    else:
        expected = before * 0.5
    torch.testing.assert_close(torch_clip(ours, 1e9, 2.0), expected)
    torch.testing.assert_close(ours.zero.grad_norm(), expected)


@pytest.mark.parametrize("hook", [True, False], ids=["reduce-scatter", "no hook"])
@distributed(2)
def test_half_precision_gradients_are_multiplied_by_a_factor_that_is_not_rounded(world_size: int, hook: bool) -> None:
    case = Case(model=half_model, loss=half_loss)
    ours = scattered_run(case) if hook else level_one_run(case)
    reference = plain_run(case)
    for run in (ours, reference):
        run.backward(0)
    norm = ours.zero.grad_norm()
    factor = 0.7003  # in bf16 another number
    ours.zero.clip_grad_norm_(float(norm) * factor)
    owned = {id(entry.param): entry.shard for entry in ours.zero.engine.inner.owned}
    for param, other in zip(ours.params, reference.params, strict=True):
        shard = owned.get(id(param))
        if shard is not None:
            assert param.grad is not None
            assert other.grad is not None
            local = (
                param.grad.local
                if isinstance(param.grad, ShardGrad)
                else param.grad.flatten()[shard.start : shard.stop]
            )
            expected = (other.grad.float() * (float(norm) * factor / (norm + 1e-6))).bfloat16().flatten()
            assert torch.equal(local, expected[shard.start : shard.stop])


def level_one_run(case: Case) -> DDPRun:
    ddp = make_ddp(case)
    return DDPRun(
        case, ddp, [ZeroRedundancyOptimizer(ddp.parameters(), part.optimizer, **part.options) for part in case.parts]
    )


def scale_all(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.mul_(0.5)


def scale_a_part(params: list[Tensor]) -> None:
    scale_all(params[: len(params) // 2])


def clip_values(params: list[Tensor]) -> None:
    torch.nn.utils.clip_grad_value_(params, 1e-3)


def clip_nothing(params: list[Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1e6)


@distributed(2, 3)
@pytest.mark.parametrize("policy", ["parameter", "element"])
@pytest.mark.parametrize("change", [scale_all, scale_a_part, clip_values, clip_nothing])
def test_changes_of_every_element_alike_equal_plain_ddp(
    world_size: int, change: Callable[[list[Tensor]], None], policy: str
) -> None:
    case = Case(parts=(Part(ours={"shard_by": policy}),))
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(3):
        for run in (ours, reference):
            run.backward(step)
            change(run.params)
            run.update()
        assert_same_values(ours, reference, f"iteration {step}")


@distributed(2)
def test_the_norm_of_double_gradients_has_their_precision(world_size: int) -> None:
    case = Case(model=double_model, loss=double_loss)
    ours, reference = scattered_run(case), plain_run(case)
    ours.backward(0)
    reference.backward(0)
    expected = torch.nn.utils.clip_grad_norm_(reference.params, 0.01)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(ours.zero.clip_grad_norm_(0.01), expected, rtol=1e-12, atol=0)
    ours.update()
    reference.update()
    assert_equal(ours.params, reference.params, "after clipping", 1e-12)


@distributed(2)
def test_a_norm_that_is_not_finite_raises_on_request(world_size: int) -> None:
    ours = scattered_run(Case())
    ours.ddp.zero_grad()
    (small_loss(ours.ddp, 0) * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 .* not finite"):
        ours.zero.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not torch.isfinite(ours.zero.grad_norm())


@NORM_TYPES
@distributed(2)
def test_without_the_hook_clipping_equals_torchs_too(world_size: int, norm_type: float) -> None:
    case = Case(parts=(Part(torch.optim.SGD, SGD),))
    reference, ours = plain_run(case), level_one_run(case)
    for step in range(2):
        reference.backward(step)
        ours.backward(step)
        expected = torch.nn.utils.clip_grad_norm_(reference.params, 0.01, norm_type)
        torch.testing.assert_close(ours.zero.clip_grad_norm_(0.01, norm_type), expected, rtol=1e-6, atol=0)
        reference.update()
        ours.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)


# Gradient scaling


def scaled_step(run: DDPRun, scaler: torch.amp.GradScaler, step: int, factor: float, clip: bool = False) -> bool:
    """One iteration; the loss of one rank is multiplied by ``factor``. Returns whether parameters changed."""
    before = [param.detach().clone() for param in run.params]
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    loss = run.case.loss(run.ddp, step)
    scaler.scale(loss * factor if dist.get_rank() == dist.get_world_size() - 1 else loss).backward()
    if clip:
        for optimizer in run.optimizers:
            scaler.unscale_(optimizer)
        if run.zeros:
            onecopy.clip_grad_norm_(run.zeros, 0.05)
        else:
            torch.nn.utils.clip_grad_norm_(run.params, 0.05)
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
        Case("whole", (Part(ours={}),), ddp=VIEW),
        Case("a list", TWO_ADAMWS),
        Case("unused", **BRANCHING),
        Case("in buckets", (Part(ours={**ELEMENT, **BUCKETS}),), ddp={}),
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
        assert scaled_step(reference, scalers[0], step, factor, clip) == (step not in skipped)
        assert scaled_step(ours, scalers[1], step, factor, clip) == (step not in skipped)
        assert scalers[1].get_scale() == scalers[0].get_scale(), f"step {step}"
        assert_equal(ours.params, reference.params, f"step {step}", ROUNDING if clip else tolerance_of(case))
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
        run.ddp.zero_grad()
        scaler.scale(run.ddp(1.5e38, 1.0)).backward()
        scaler.step(run.optimizers[0])
        scaler.update()
        assert scaler.get_scale() == 1.0
        assert float(run.ddp.module.get_parameter("matrix").detach().max()) < 0.9
    assert_same_values(ours, reference, "large gradients")


class Rows(nn.Module):
    """Each element has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2048))
        self.other = nn.Parameter(torch.ones(10))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum() + self.other.sum()


@pytest.mark.parametrize("ours", [{}, ELEMENT], ids=["whole", "cut"])
@distributed(2, 3)
def test_without_a_scaler_an_infinite_gradient_stays_where_it_is(world_size: int, ours: dict[str, Any]) -> None:
    case = Case(model=Rows, parts=(Part(torch.optim.SGD, {"lr": 0.1}, ours),))
    scattered, reference = scattered_run(case), plain_run(case)
    for position in (0, 700, 2047):
        gradient = torch.full((2048,), 0.5)
        gradient[position] = math.inf if dist.get_rank() == 0 else 0.5
        for run in (scattered, reference):
            run.ddp.zero_grad()
            run.ddp(gradient).backward()
            run.update()
        assert_equal(scattered.params, reference.params, f"infinite at {position}")
    weight = scattered.ddp.module.get_parameter("weight").detach()
    assert torch.isinf(weight).nonzero().flatten().tolist() == [0, 700, 2047]


@distributed(2, 3)
def test_updates_are_counted_with_skipped_steps_and_accumulation(world_size: int) -> None:
    case = Case(parts=(Part(Counting, {"lr": 0.1}, {**ELEMENT, "elementwise": True}),), **BRANCHING)
    ours = scattered_run(case)
    scaler = make_scaler()
    for step in range(8):
        ours.zero.zero_grad()
        with ours.ddp.no_sync():
            scaler.scale(branching_loss(ours.ddp, 100 + 2 * step + 1)).backward()
        loss = branching_loss(ours.ddp, step)
        scaler.scale(loss * math.inf if step in (1, 4) and dist.get_rank() == 0 else loss).backward()
        scaler.step(ours.zero)
        scaler.update()
    expected = {"first": 6, "middle": 6, "last": 6, "sometimes": 3, "never": 0}
    assert ours.zero.param_groups[0]["steps"] == 6
    ours.zero.consolidate_state_dict(to=0)
    if ours.zero.rank == 0:
        state = ours.zero.state_dict()["state"]
        for index, (name, _) in enumerate(ours.ddp.module.named_parameters()):
            assert state.get(index, {}).get("updates", 0) == expected[name.split(".")[0]], name
