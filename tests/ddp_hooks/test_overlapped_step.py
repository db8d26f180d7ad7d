"""Stepping inside the backward pass: both hooks equal plain DDP with the plain optimizer from the first iteration."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.ddp_training import (
    ELEMENT,
    SGD,
    STATIC,
    UNUSED,
    VIEW,
    Branching,
    assert_same_state,
    half_loss,
    half_model,
    halving,
    make_ddp,
    train_both,
)
from tests.support.harness import distributed
from tests.support.models import small_inputs
from tests.support.overlapped_step import (
    COUNTING,
    HOOKS,
    UNEVEN,
    Case,
    MakeHook,
    Run,
    assert_parity,
    overlapped_run,
    plain_run,
    reduced_mean,
    three_groups,
)

pytestmark = pytest.mark.usefixtures("fresh_processes")

SMALL = 0.002
"""A limit for DDP's buckets, in MiB, that gives a weight and a bias a bucket."""


class TwoTypes(nn.Module):
    """Half of it in single, half in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(8, 160)
        self.double_ = nn.Linear(160, 4).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.double_(torch.tanh(self.single(inputs)).double())
        return outputs


def matrices() -> nn.Sequential:
    """Nothing but matrices, for Muon."""
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))


def never_branching_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step), False).square().mean()
    return loss


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


CASES = (
    Case("momentum"),
    Case("momentum, cut", ours=ELEMENT),
    Case("one bucket", ddp={"bucket_cap_mb": 100}, buckets=1),
    Case("default buckets", ddp={}, buckets=1),
    Case("a few buckets", ddp={"bucket_cap_mb": SMALL}, ours=ELEMENT),
    Case("gradients are bucket views", ddp=VIEW, ours=ELEMENT),
    Case("gradients are bucket views, set to zero", ddp=VIEW, set_to_none=False),
    Case("static graph", ddp=STATIC),
    Case("static graph and bucket views", ddp={**STATIC, **VIEW}, ours=ELEMENT),
    Case("static graph with unused parameters", model=Branching, loss=never_branching_loss, ddp=STATIC),
    Case("unused parameters", **UNEVEN),
    Case("unused parameters, cut", **UNEVEN, ours=ELEMENT),
    Case("unused parameters, bucket views", **{**UNEVEN, "ddp": {**UNUSED, **VIEW}}),
    Case("unused parameters, set to zero", **UNEVEN, set_to_none=False),
    Case("several groups", params=three_groups, ours=ELEMENT),
    Case("several groups and a schedule of momentum", params=three_groups, scheduler=one_cycle),
    Case("a schedule", scheduler=halving, ours=ELEMENT),
    Case("fused AdamW", torch.optim.AdamW, {"lr": 1e-2, "fused": True}, ours=ELEMENT, scheduler=halving),
    Case("a tensor learning rate", torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}, scheduler=halving),
    Case("counters in groups and state", **COUNTING, params=three_groups, buckets=4),
    Case("counters, cut", **COUNTING, ours={**ELEMENT, "elementwise": True}),
    Case("Muon", torch.optim.Muon, {"lr": 1e-2}, model=matrices, tolerance=1e-3),
    Case("two types", model=TwoTypes, ours=ELEMENT),
    Case("half precision", model=half_model, loss=half_loss, ours=ELEMENT, tolerance=2e-2),
    Case("accumulation", passes=3, ours=ELEMENT),
    Case("accumulation in bucket views", passes=3, ddp=VIEW),
    Case("accumulation with unused parameters", **UNEVEN, passes=3),
)


@HOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(2)
def test_a_loop_with_step_equals_plain_ddp_from_the_first_iteration_on(
    world_size: int, case: Case, make_hook: MakeHook
) -> None:
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(3)
def test_three_ranks_equal_plain_ddp_within_rounding(world_size: int, case: Case, make_hook: MakeHook) -> None:
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@distributed(4)
def test_four_ranks_equal_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, ours=ELEMENT, params=three_groups)
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@distributed(1)
def test_one_rank_equals_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, tolerance=0.0)
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@distributed(2)
def test_sharding_by_buckets_is_accepted_and_changes_nothing(world_size: int, make_hook: MakeHook) -> None:
    case = Case(ours=ELEMENT)
    make = functools.partial(make_hook, shard_buckets=True)
    assert_parity(case, overlapped_run(case, make), plain_run(case))


@HOOKS
@pytest.mark.parametrize(
    "case",
    [Case("momentum", ours=ELEMENT), Case("unused", **UNEVEN), Case("counters", **COUNTING), Case("views", ddp=VIEW)],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_the_path_of_accelerators_gives_the_same_on_the_cpu(world_size: int, case: Case, make_hook: MakeHook) -> None:
    reference = plain_run(case)
    with as_on_accelerators():
        assert_parity(case, overlapped_run(case, make_hook), reference)


@distributed(2)
def test_without_a_hook_step_does_everything(world_size: int) -> None:
    case = Case(ours=ELEMENT)
    ddp = make_ddp(case)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **ELEMENT, **SGD)
    train_both(Run(case, ddp, zero), plain_run(case), range(4))


def doubling_hook(state: Any, bucket: Any) -> Any:
    """Yields another tensor than the bucket's."""
    return reduced_mean(bucket).then(lambda future: future.value() * 2)


def scaling_hook(state: list[int], bucket: Any) -> Any:
    """Needs its state: how often it was called, by which gradients are scaled."""
    state.append(bucket.index())
    scale = 1 + 0.1 * len(state)
    return reduced_mean(bucket).then(lambda future: future.value().mul_(scale))


def power_state() -> PowerSGDState:
    return PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)


COMM_HOOKS = pytest.mark.parametrize(
    ("comm_hook", "make_state"),
    [
        (fp16_compress_hook, None),
        (bf16_compress_hook, None),
        (powerSGD_hook, power_state),
        (doubling_hook, None),
        (scaling_hook, list),
    ],
    ids=["fp16", "bf16", "PowerSGD", "another tensor", "with a state"],
)


@HOOKS
@COMM_HOOKS
@distributed(2)
def test_any_communication_hook_equals_plain_ddp_with_the_same_hook(
    world_size: int, make_hook: MakeHook, comm_hook: Any, make_state: Any
) -> None:
    # PowerSGD starts collectives in callbacks, so on this backend plain DDP itself needs all in one bucket.
    buckets = 1 if comm_hook is powerSGD_hook else 2
    ddp = {"bucket_cap_mb": SMALL if buckets == 2 else 100, "gradient_as_bucket_view": make_hook is hook_with_zero_step}
    case = Case(ours=ELEMENT, ddp=ddp, buckets=buckets)
    states: list[Any] = [make_state() if make_state is not None else None for _ in range(2)]
    ours = overlapped_run(case, make_hook, comm_hook, states[0])
    assert_parity(case, ours, plain_run(case, comm_hook, states[1]), iterations=7)
    if isinstance(states[0], PowerSGDState):
        assert states[0].iter == states[1].iter > states[0].start_powerSGD_iter
        assert states[0].error_dict.keys() == states[1].error_dict.keys()
        assert states[0].error_dict
    elif make_state is not None:
        assert states[0] == states[1] != []


# No update lost, none doubled


@dataclass(frozen=True)
class Count:
    """A training loop, and how many updates each layer gets in six iterations of it."""

    name: str
    case: Case
    expected: dict[str, int]
    freeze_at: int | None = None


COUNTS = (
    Count("every pass synchronises", Case(**COUNTING), {"0": 6, "2": 6}),
    Count("static graph", Case(**COUNTING, ddp=STATIC), {"0": 6, "2": 6}),
    Count("accumulation", Case(**COUNTING, passes=3), {"0": 6, "2": 6}),
    Count(
        "unused parameters",
        Case(**COUNTING, **UNEVEN),
        {"first": 6, "middle": 6, "last": 6, "sometimes": 3, "never": 0},
    ),
    Count(
        "unused parameters, with accumulation of even and odd passes",
        Case(**COUNTING, **UNEVEN, passes=2),
        {"first": 6, "middle": 6, "last": 6, "sometimes": 6, "never": 0},
    ),
    Count(
        "frozen half way",
        Case(**COUNTING, **UNEVEN),
        {"first": 6, "middle": 3, "last": 6, "sometimes": 3, "never": 0},
        freeze_at=3,
    ),
)


@HOOKS
@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.name)
@distributed(3)
def test_every_iteration_updates_every_parameter_with_a_gradient_once(
    world_size: int, count: Count, make_hook: MakeHook
) -> None:
    ours = overlapped_run(count.case, make_hook)
    for step in range(6):
        if step == count.freeze_at:
            ours.ddp.module.get_submodule("middle").requires_grad_(False)
        ours.iterate(step)
    zero = ours.zero
    assert zero.param_groups[0]["steps"] == 6
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        state = zero.state_dict()["state"]
        for index, (name, _) in enumerate(ours.ddp.module.named_parameters()):
            updates = state.get(index, {}).get("updates", 0)
            assert updates == count.expected[name.split(".")[0]], name


@HOOKS
@distributed(2, 3)
def test_a_layer_frozen_half_way_stays_equal_to_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, ours=ELEMENT)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(4))
    for run in (ours, reference):
        run.ddp.module.get_submodule("middle").requires_grad_(False)
    train_both(ours, reference, range(4, 7))
    for run in (ours, reference):
        run.ddp.module.get_submodule("middle").requires_grad_(True)
    train_both(ours, reference, range(7, 9))
    assert_same_state(ours, reference)
