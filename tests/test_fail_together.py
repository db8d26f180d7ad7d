"""A failure on one rank between two exchanges: all ranks raise soon, name the cause, and nothing is half changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import distributed
from onecopy import ZeroRedundancyOptimizer
from onecopy.common import tagged_json
from test_errors import check_pool, expect_failure_of, parameter

NO_MEMORY = "no memory is left"


@contextmanager
def failing(place: Any, name: str, group_rank: int, calls: int = 0) -> Iterator[None]:
    """Let a function fail on one rank, after it has been called some times."""
    original = getattr(place, name)
    left = calls

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError(NO_MEMORY)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == group_rank:
            patch.setattr(place, name, fail)
        yield


def trained(cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> ZeroRedundancyOptimizer:
    """An optimizer after one step."""
    zero = ZeroRedundancyOptimizer([parameter(64, 40), parameter(40), parameter(3, 5)], cls, lr=0.1, **options)
    step(zero)
    return zero


def step(zero: ZeroRedundancyOptimizer) -> None:
    """A step with gradients that all ranks have alike."""
    for param in zero.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    zero.step()


def whole_state(zero: ZeroRedundancyOptimizer, group_rank: int = 0) -> dict[str, Any] | None:
    """The consolidated state on one rank."""
    zero.consolidate_state_dict(to=group_rank)
    return zero.state_dict() if dist.get_rank() == group_rank else None


def expect_no_memory(culprit: int, call: Callable[[], object]) -> None:
    """All ranks raise that memory has run out on one of them."""
    expect_failure_of([culprit], call, MemoryError, NO_MEMORY)


# consolidate_state_dict()


@distributed(2, 3)
@pytest.mark.parametrize("policy", ["parameter", "element"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_receiver_of_state_without_memory(world_size: int, policy: str, calls: int) -> None:
    zero = trained(shard_by=policy)
    receiver = world_size - 1
    with failing(tagged_json, "empty_from", receiver, calls):
        expect_no_memory(receiver, lambda: zero.consolidate_state_dict(to=receiver))
    step(zero)
    state = whole_state(zero, receiver)
    if state is not None:
        assert len(state["state"]) == 3
        assert int(state["state"][0]["step"]) == 2


@distributed(2, 3)
def test_owners_of_a_cut_parameter_with_state_of_different_types(world_size: int) -> None:
    zero = trained(shard_by="element")
    if dist.get_rank() == world_size - 1:
        (key,) = [param for param in zero.state if param.shape == (64, 40)]
        zero.state[key]["exp_avg"] = zero.state[key]["exp_avg"].double()
    expect_failure_of([0], lambda: zero.consolidate_state_dict(to=0), ValueError, "cut among ranks, but ranks 0 and")
    check_pool()
