"""A failure on one rank between two exchanges: all ranks raise soon, name the cause, and nothing is half changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm import sharing
from onecopy.common import tagged_json
from onecopy.state_dict import load
from onecopy.step import storage
from tests.support.failures import expect_failure_of, expect_no_memory, failing, parameter
from tests.support.harness import distributed
from tests.support.models import assert_equal
from tests.support.state_dicts import gathered

SHAPES = ((64, 40), (40,), (3, 5))


def trained(**options: Any) -> ZeroRedundancyOptimizer:
    """An optimizer after one step."""
    zero = ZeroRedundancyOptimizer([parameter(*shape) for shape in SHAPES], torch.optim.AdamW, lr=0.1, **options)
    step(zero)
    return zero


def step(*zeros: ZeroRedundancyOptimizer) -> None:
    """A step with gradients that all ranks have alike; all optimizers have equal parameters then."""
    for zero in zeros:
        for group in zero.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        zero.step()
        for group, first in zip(zero.param_groups, zeros[0].param_groups, strict=True):
            assert_equal(group["params"], first["params"], "after a step")


@distributed(2, 3)
@pytest.mark.parametrize("policy", ["parameter", "element"])
@pytest.mark.parametrize("calls", [0, 2])
def test_a_receiver_of_state_without_memory(world_size: int, policy: str, calls: int) -> None:
    zero = trained(shard_by=policy)
    receiver = world_size - 1
    with failing(tagged_json, "empty_from", receiver, calls):
        expect_no_memory(receiver, lambda: zero.consolidate_state_dict(to=receiver))
    step(zero)
    assert [int(state["step"]) for state in gathered(zero)["state"].values()] == [2, 2, 2]


@distributed(2, 3)
@pytest.mark.parametrize("calls", [0, 1])
def test_a_rank_without_memory_for_buckets_when_constructing(world_size: int, calls: int) -> None:
    params = [parameter(*shape) for shape in SHAPES]
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
@pytest.mark.parametrize("name", ["_fill_bucket", "_plan_rounds"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_without_memory_when_a_group_is_added(world_size: int, name: str, culprit: int) -> None:
    zero, reference = trained(parameters_as_bucket_view=True), trained()
    new = parameter(7, 9)
    with failing(storage if name == "_fill_bucket" else sharing, name, culprit):
        expect_no_memory(culprit, lambda: zero.add_param_group({"params": [new]}))
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    assert len(zero.layout.params) == 3
    step(zero, reference)
    for each in (zero, reference):
        each.add_param_group({"params": [nn.Parameter(new.detach().clone())]})
    step(zero, reference)


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_rank_without_memory_to_follow_moved_parameters(world_size: int, bucket_view: bool) -> None:
    zero, reference = trained(parameters_as_bucket_view=bucket_view), trained()
    for param in zero.param_groups[0]["params"]:
        param.data = param.data.clone()
    with failing(sharing, "_plan_rounds", world_size - 1):
        expect_no_memory(world_size - 1, lambda: step(zero))
    # The others have stepped what they own, so all begin anew.
    state = gathered(reference)
    with torch.no_grad():
        for param, plain in zip(zero.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
            param.copy_(plain)
    zero.load_state_dict(state)
    step(zero, reference)


@distributed(2, 3)
@pytest.mark.parametrize("culprit", [0, 1])
def test_options_that_one_rank_cannot_copy_while_loading(world_size: int, culprit: int) -> None:
    zero = trained()
    state, before = gathered(zero), gathered(zero)
    state["param_groups"][0]["lr"] = 0.5
    with failing(load, "deepcopy", culprit):
        expect_no_memory(culprit, lambda: zero.load_state_dict(state))
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.1
    assert_equal([gathered(zero)["state"][0]["exp_avg"]], [before["state"][0]["exp_avg"]], "state")
    zero.load_state_dict(state)
    step(zero)


@distributed(2, 3)
def test_a_master_weight_of_another_shape_is_refused_before_anything_changes(world_size: int) -> None:
    params = [nn.Parameter(parameter(*shape).detach().bfloat16()) for shape in SHAPES[:2]]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1, elementwise=False, master_weights=True)
    step(zero)
    state, good = gathered(zero), gathered(zero)
    state["param_groups"][0]["lr"] = 0.5
    state["master_weights"][0] = torch.zeros(7)
    owner = zero.layout.shards[0].owner
    expect_failure_of([owner], lambda: zero.load_state_dict(state), ValueError, "master weight of parameter .* in the")
    assert zero.param_groups[0]["lr"] == 0.1
    assert_equal([gathered(zero)["master_weights"][0]], [good["master_weights"][0]], "master weights")
