"""Training with every hook equals plain DDP with the plain optimizer, from the first iteration on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from onecopy import hook_with_zero_step, reduce_scatter_hook
from tests.support.data_parallel import (
    ADAMW,
    BRANCHING,
    COUNTERS,
    HOOKS,
    MOMENTUM,
    OVERLAPS,
    SGD,
    STATIC,
    TWO_ADAMWS,
    VIEW,
    WHOLE,
    Branching,
    Case,
    Counting,
    MakeHook,
    Part,
    assert_parity,
    half_model,
    halving,
    hooked_run,
    matrices,
    overlapped_run,
    plain_run,
    reduced_mean,
    sharded_run,
    train_both,
    vectors,
)
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_same_tree

pytestmark = pytest.mark.usefixtures("fresh_processes")

SMALL = 0.002
"""A limit for DDP's buckets, in MiB, that gives a weight and a bias a bucket."""


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *middle, last = model.parameters()
    return [{"params": [first]}, {"params": middle, "lr": 0.03}, {"params": [last]}]


BUCKETS: dict[str, Any] = {"parameters_as_bucket_view": True}
MUON_AND_ADAMW = (Part(torch.optim.Muon, {"lr": 1e-2}, {}, matrices), Part(params=vectors))

CASES = (
    Case("cut"),
    Case("whole", WHOLE),
    Case("momentum", MOMENTUM),
    Case("default buckets", ddp={}),
    Case("a few buckets", ddp={"bucket_cap_mb": SMALL}),
    Case("gradients are bucket views", MOMENTUM, ddp=VIEW),
    Case("static graph", ddp=STATIC),
    Case("static graph and bucket views", MOMENTUM, ddp={**STATIC, **VIEW}),
    Case("static graph with unused parameters", COUNTERS, model=Branching, ddp=STATIC),
    Case("unused parameters", **BRANCHING),
    Case("unused parameters, counted", COUNTERS, **BRANCHING),
    Case("unused parameters, set to zero", MOMENTUM, **BRANCHING, set_to_none=False),
    Case("some parameters are nobody's", (Part(params=matrices),)),
    Case("some parameters are nobody's, in one bucket", (Part(params=matrices),), ddp={}),
    Case("groups and a schedule", (Part(torch.optim.SGD, SGD, params=three_groups),), scheduler=halving),
    Case("fused", (Part(options={**ADAMW, "fused": True}),), scheduler=halving),
    Case("counters", (Part(Counting, {"lr": 0.1}, params=three_groups),)),
    Case("counters, cut", COUNTERS),
    Case("half precision", model=half_model, tolerance=2e-2),
    Case("accumulation", passes=3),
    Case("accumulation with unused parameters", COUNTERS, **BRANCHING, passes=2),
)
OF_REDUCE_SCATTER = (
    Case("cut, in buckets", (Part(ours=BUCKETS),), ddp=VIEW),
    Case("whole, in buckets", (Part(torch.optim.SGD, SGD, {**BUCKETS, "shard_by": "parameter"}),)),
    Case("a list", MUON_AND_ADAMW, tolerance=1e-3),
    Case("a list, all in one bucket", TWO_ADAMWS, ddp={}),
)
"""Several optimizers, and parameters in buckets of their own, which the overlap hooks do not take."""


@pytest.mark.parametrize("case", CASES + OF_REDUCE_SCATTER, ids=lambda case: case.name)
@distributed(2)
def test_the_reduce_scatter_hook_equals_plain_ddp(world_size: int, case: Case) -> None:
    assert_parity(hooked_run(case, reduce_scatter_hook), plain_run(case))


@OVERLAPS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(2)
def test_a_loop_with_step_equals_plain_ddp_from_the_first_iteration_on(
    world_size: int, case: Case, hook: MakeHook
) -> None:
    assert_parity(hooked_run(case, hook), plain_run(case))


@HOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(3)
def test_three_ranks_equal_plain_ddp_within_rounding(world_size: int, case: Case, hook: MakeHook) -> None:
    assert_parity(hooked_run(case, hook), plain_run(case))


@HOOKS
@distributed(1, 4)
def test_one_and_four_ranks_equal_plain_ddp(world_size: int, hook: MakeHook) -> None:
    case = Case("", (Part(torch.optim.SGD, SGD, params=three_groups),), **BRANCHING)
    assert_parity(hooked_run(case, hook), plain_run(case))


@HOOKS
@pytest.mark.parametrize("case", [Case("cut"), Case("unused parameters", **BRANCHING)], ids=lambda case: case.name)
@distributed(4)
def test_a_subgroup_whose_ranks_are_numbered_otherwise_equals_plain_ddp(
    world_size: int, case: Case, hook: MakeHook
) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    ours, reference = hooked_run(case, hook, process_group=group), plain_run(case, process_group=group)
    for step in range(5):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}")
    ours.zero.consolidate_state_dict(to=1)
    if ours.zero.rank == 1:
        assert_same_tree(ours.zero.state_dict(), reference.optimizer.state_dict(), "state")


@OVERLAPS
@distributed(2)
def test_sharding_by_buckets_is_accepted_and_changes_nothing(world_size: int, hook: MakeHook) -> None:
    make = functools.partial(hook, shard_buckets=True)
    assert_parity(overlapped_run(Case(), make), plain_run(Case()))


@distributed(2)
def test_without_a_hook_step_does_everything(world_size: int) -> None:
    train_both(sharded_run(Case(), overlaps=True), plain_run(Case()), range(4))


def doubling_hook(state: Any, bucket: Any) -> Any:
    """Yields another tensor than the bucket's."""
    return reduced_mean(bucket).then(lambda future: future.value() * 2)


def power_state() -> PowerSGDState:
    return PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)


@OVERLAPS
@pytest.mark.parametrize(
    ("comm_hook", "make_state"),
    [
        (fp16_compress_hook, type(None)),
        (bf16_compress_hook, type(None)),
        (powerSGD_hook, power_state),
        (doubling_hook, type(None)),
    ],
    ids=["fp16", "bf16", "PowerSGD", "another tensor"],
)
@distributed(2)
def test_any_communication_hook_equals_plain_ddp_with_the_same_hook(
    world_size: int, hook: MakeHook, comm_hook: Any, make_state: Any
) -> None:
    # PowerSGD starts collectives in callbacks, so on this backend plain DDP itself needs all in one bucket.
    limit = 100 if comm_hook is powerSGD_hook else SMALL
    case = Case("", MOMENTUM, ddp={"bucket_cap_mb": limit, "gradient_as_bucket_view": hook is hook_with_zero_step})
    states: list[Any] = [make_state(), make_state()]
    ours = overlapped_run(case, hook, comm_hook, states[0])
    assert_parity(ours, plain_run(case, comm_hook, states[1]), iterations=7)
    if isinstance(states[0], PowerSGDState):
        assert states[0].iter == states[1].iter > states[0].start_powerSGD_iter
        assert states[0].error_dict.keys() == states[1].error_dict.keys()
        assert states[0].error_dict
