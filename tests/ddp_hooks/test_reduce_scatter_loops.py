"""The reduce-scatter hook in training loops: unused parameters, several passes, uneven inputs, and types."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from onecopy import reduce_scatter_hook
from onecopy.comm import limits
from tests.support.ddp_training import (
    BRANCHING,
    ROUNDING,
    SGD,
    VIEW,
    Branching,
    assert_same_state,
    assert_same_values,
    half_loss,
    half_model,
    make_ddp,
    train_both,
)
from tests.support.harness import distributed
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    more_for_earlier_ranks,
    more_for_later_ranks,
    small_loss,
)
from tests.support.reduce_scatter import (
    BUCKETS,
    TWO_ADAMWS,
    Case,
    Part,
    Split,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    vectors,
)

# Unused and frozen parameters


@distributed(2, 3)
def test_a_parameter_without_a_gradient_anywhere_is_left_alone(world_size: int) -> None:
    case = Case(**BRANCHING)
    ours, reference = scattered_run(case), plain_run(case)
    train_both(ours, reference, range(4))
    module = ours.ddp.module
    assert isinstance(module, Branching)
    untouched = make_ddp(case).module.get_parameter("never.weight")
    assert torch.equal(module.never.weight, untouched), "weight decay alone must not move it"
    assert module.never.weight not in ours.zero.state
    assert_same_state(ours, reference)


@distributed(2, 3)
def test_a_layer_frozen_half_way_stays_equal_to_plain_ddp(world_size: int) -> None:
    case = Case(**BRANCHING)
    ours, reference = scattered_run(case), plain_run(case)
    train_both(ours, reference, range(3))
    for trainable, steps in ((False, range(3, 6)), (True, range(6, 8))):
        for run in (ours, reference):
            run.ddp.module.get_submodule("middle").requires_grad_(trainable)
        train_both(ours, reference, steps)
    assert_same_state(ours, reference)


# A pass that fails


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@distributed(2, 3)
def test_a_pass_that_failed_on_all_ranks_with_messages_in_flight_leaves_nothing_behind(world_size: int) -> None:
    """Their messages are not taken for a later pass's gradients."""
    case = Case(ddp={"bucket_cap_mb": 1e-4})
    ours, reference = scattered_run(case), plain_run(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 16)
        patch.setattr("onecopy.comm.limits.REDUCE_MESSAGE_BYTES", 256)
        train_both(ours, reference, range(2))  # DDP makes its buckets anew after the first
        ours.ddp.zero_grad()
        handle = ours.params[0].register_hook(_fail)
        with pytest.raises(LookupError):
            small_loss(ours.ddp, 50).backward()
        handle.remove()
        ours.ddp.zero_grad()
        # DDP itself cannot go on after that; another one can.
        ours.ddp = DistributedDataParallel(ours.ddp.module, **case.ddp)
        ours.ddp.register_comm_hook(ours.zero, reduce_scatter_hook)
        train_both(ours, reference, range(2, 5))
    assert_replicas_equal(ours.params)


# Uneven inputs


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", (Part(torch.optim.SGD, SGD),), scheduled=True),
        Case("whole, in buckets", (Part(ours=BUCKETS),), ddp=VIEW, scheduled=True),
        Case("a list", TWO_ADAMWS),
        Case("some are nobody's", (Part(params=matrices),), ddp={}),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3, 4)
def test_uneven_inputs_equal_plain_ddp(world_size: int, case: Case, counts: Callable[[int], int]) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    count = counts(dist.get_rank())
    for run in (reference, ours):
        with Join([run.ddp, *run.zeros]):
            for step in range(count):
                run.iterate(step)
    assert_same_values(ours, reference, "after uneven inputs")
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference, to=max(range(world_size), key=counts))


# The type in which gradients travel

SINGLE = Case(parts=(Part(torch.optim.SGD, SGD),))


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        (SINGLE, torch.bfloat16, 2e-2),
        (SINGLE, torch.float16, 2e-3),
        (SINGLE, torch.float32, ROUNDING),
        (replace(SINGLE, model=half_model, loss=half_loss), torch.float32, 2e-2),
    ],
    ids=["bfloat16", "float16", "float32", "of half precision"],
)
@distributed(2, 3)
def test_gradients_travel_in_the_type_that_was_chosen(
    world_size: int, case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    ours, reference = scattered_run(case, dtype), plain_run(case)
    for step in range(4):
        ours.iterate(step)
        reference.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", tolerance)
    assert_replicas_equal(ours.params)
    different = any(not torch.equal(a, b) for a, b in zip(ours.params, reference.params, strict=True))
    if world_size == 2 and case is SINGLE:
        assert different == (dtype is not torch.float32)


@distributed(2)
def test_too_large_for_the_chosen_type_is_seen_by_a_scaler(world_size: int) -> None:
    case = Case(model=Split, parts=(Part(torch.optim.SGD, SGD),))
    ours = scattered_run(case, torch.float16)
    scaler = make_scaler()
    scaler.scale(ours.ddp(1000.0, 1.0)).backward()
    scaler.step(ours.zero)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(ours.params, [torch.ones(40, 40), torch.ones(3)], "a skipped step")


# Groups that come later, and lifetime


@pytest.mark.parametrize("iterations", [0, 1, 3])
@distributed(2, 3)
def test_a_group_can_be_added_later(world_size: int, iterations: int) -> None:
    case = Case(parts=(Part(params=matrices),), ddp={})
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(iterations + 4):
        for run in (ours, reference):
            if step == iterations:
                run.optimizers[0].add_param_group({"params": vectors(run.ddp.module), "lr": 0.05})
            run.ddp.zero_grad()
            small_loss(run.ddp, step).backward()
            run.update()
        assert_same_values(ours, reference, f"iteration {step}")
    assert_same_state(ours, reference)


@pytest.mark.parametrize("parts", [(Part(),), TWO_ADAMWS], ids=["one", "a list"])
@distributed(2)
def test_nothing_is_left_behind_when_model_and_optimizers_go_away(world_size: int, parts: tuple[Part, ...]) -> None:
    ours = scattered_run(Case(parts=parts))
    for step in range(3):
        ours.iterate(step)
    remains: list[Any] = [weakref.ref(ours.ddp), weakref.ref(ours.params[0])]
    remains += [weakref.ref(optimizer) for optimizer in ours.optimizers]
    del ours
    gc.collect()
    assert [reference() for reference in remains] == [None] * len(remains)
