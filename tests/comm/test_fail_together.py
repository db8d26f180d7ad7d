"""A failure on one rank between two exchanges: all ranks raise soon, name the cause, and nothing is half changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm import sharing
from onecopy.common import tagged_json
from onecopy.state_dict import load
from onecopy.step import storage
from tests.support.failures import check_pool, expect_failure_of, expect_no_memory, failing, parameter
from tests.support.harness import distributed
from tests.support.models import assert_equal


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


# Constructing, add_param_group(), and parameters that have moved


@distributed(2, 3)
@pytest.mark.parametrize("calls", [0, 1])
def test_a_rank_without_memory_for_buckets_when_constructing(world_size: int, calls: int) -> None:
    params = [parameter(64, 40), parameter(40), parameter(3, 5)]
    before = [param.detach().clone() for param in params]

    def construct() -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1)

    culprit = world_size - 1
    with failing(storage, "_fill_bucket", culprit, calls):
        expect_no_memory(culprit, construct)
    assert_equal(params, before, "values")
    step(construct())
    assert_equal(params, [value - 0.1 for value in before], "after a step")


@distributed(2, 3)
@pytest.mark.parametrize("place", ["buckets", "slots"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_without_memory_when_a_group_is_added(world_size: int, place: str, culprit: int) -> None:
    zero = trained(parameters_as_bucket_view=True)
    reference = trained()
    new = parameter(7, 9)
    with failing(storage, "_fill_bucket", culprit) if place == "buckets" else failing(sharing, "_plan_rounds", culprit):
        expect_no_memory(culprit, lambda: zero.add_param_group({"params": [new]}))
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    assert len(zero.layout.params) == 3
    step(zero)
    step(reference)
    assert_equal(zero.param_groups[0]["params"], reference.param_groups[0]["params"], "after the refusal")
    for each in (zero, reference):
        each.add_param_group({"params": [nn.Parameter(new.detach().clone())]})
        each.param_groups[1]["params"][0].grad = torch.ones(7, 9)
        step(each)
    for ours, plain in zip(zero.param_groups, reference.param_groups, strict=True):
        assert_equal(ours["params"], plain["params"], "after adding it")


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_rank_without_memory_to_follow_moved_parameters(world_size: int, bucket_view: bool) -> None:
    zero, reference = trained(parameters_as_bucket_view=bucket_view), trained()
    for param in zero.param_groups[0]["params"]:
        param.data = param.data.clone()
    with failing(sharing, "_plan_rounds", world_size - 1):
        expect_no_memory(world_size - 1, lambda: step(zero))
    # The others have stepped what they own, so all begin anew.
    state = reference_state(reference)
    with torch.no_grad():
        for param, plain in zip(zero.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
            param.copy_(plain)
    zero.load_state_dict(state)
    for each in (zero, reference):
        step(each)
    assert_equal(zero.param_groups[0]["params"], reference.param_groups[0]["params"], "after the failure")


def reference_state(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The whole state, on every rank."""
    states = [whole_state(zero, group_rank) for group_rank in range(dist.get_world_size())]
    (state,) = [state for state in states if state is not None]
    return state


# load_state_dict()


@distributed(2, 3)
@pytest.mark.parametrize("culprit", [0, 1])
def test_options_that_one_rank_cannot_copy_while_loading(world_size: int, culprit: int) -> None:
    zero = trained()
    state = reference_state(zero)
    state["param_groups"][0]["lr"] = 0.5
    before = reference_state(zero)
    with failing(load, "deepcopy", culprit):
        expect_no_memory(culprit, lambda: zero.load_state_dict(state))
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.1
    after = reference_state(zero)
    assert_equal([after["state"][0]["exp_avg"]], [before["state"][0]["exp_avg"]], "state")
    zero.load_state_dict(state)
    step(zero)


@distributed(2, 3)
def test_a_master_weight_of_another_shape_is_refused_before_anything_changes(world_size: int) -> None:
    params = [nn.Parameter(parameter(64, 40).detach().bfloat16()), nn.Parameter(parameter(40).detach().bfloat16())]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1, elementwise=False, master_weights=True)
    step(zero)
    state = reference_state(zero)
    good = reference_state(zero)
    state["param_groups"][0]["lr"] = 0.5
    state["master_weights"][0] = torch.zeros(7)
    owner = zero.layout.shards[0].owner
    expect_failure_of([owner], lambda: zero.load_state_dict(state), ValueError, "master weight of parameter .* in the")
    assert zero.param_groups[0]["lr"] == 0.1
    assert_equal([reference_state(zero)["master_weights"][0]], [good["master_weights"][0]], "master weights")
