"""A parameter group that is refused, or differs between ranks, is an error on every rank and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onecopy import RanksDisagreeError
from tests.support.failures import expect_disagreement, expect_failure_of, parameter
from tests.support.harness import distributed
from tests.support.state_dicts import expect_same
from tests.support.unchanged import Training

BAD_GROUPS: dict[str, tuple[Callable[[Training], Any], type[Exception], str]] = {
    "not a dict": (lambda _: [parameter(2)], TypeError, "parameter group 1 must be a dict, got list"),
    "no params": (lambda _: {"lr": 1.0}, ValueError, "parameter group 1 has no 'params'"),
    "not a tensor": (
        lambda _: {"params": [("four", 3)]},
        TypeError,
        "'four' is not a tensor but int",
    ),
    "known already": (
        lambda training: {"params": [("four", training.params[1])]},
        ValueError,
        "'four' is in two groups.*'two'",
    ),
    "shares memory": (
        lambda training: {"params": [("four", nn.Parameter(training.params[1].detach()[:3]))]},
        ValueError,
        "'(two|four)' and '(two|four)' share memory",
    ),
    "expanded": (
        lambda _: {"params": [("four", nn.Parameter(torch.ones(1).expand(3)))]},
        ValueError,
        "'four'.*expanded",
    ),
    "differentiable": (
        lambda _: {"params": [("four", parameter(2))], "differentiable": True},
        ValueError,
        r"differentiable=True \(parameter group 1\)",
    ),
    "without a name": (lambda _: {"params": [parameter(2)]}, ValueError, "name"),
}


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("who", ["all", "last"])
@pytest.mark.parametrize("case", BAD_GROUPS)
def test_a_refused_group_changes_nothing(world_size: int, case: str, who: str, bucket_view: bool) -> None:
    make, kind, text = BAD_GROUPS[case]
    training = Training(bucket_view)
    before = training.snapshot()
    culprits = range(world_size) if who == "all" else [world_size - 1]
    group = make(training) if dist.get_rank() in culprits else {"params": [("four", parameter(2))]}
    expect_failure_of(culprits, lambda: training.ours.add_param_group(group), kind, text)
    expect_same(training.snapshot(), before)
    training.train()


GROUP_MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "count": ({"count": 1}, {"count": 2}, "", r"parameter 4 \('five'\)"),
    "shape": ({"shape": (2,)}, {"shape": (3,)}, r"parameter 3 \('four'\): shape \(2,\)", r"parameter 3 .*shape \(3,\)"),
    "dtype": (
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        r"parameter 3 \('four'\): .*float32",
        r"parameter 3 \('four'\): .*bfloat16",
    ),
    "name": ({"name": "four"}, {"name": "vier"}, r"parameter 3 \('four'\)", r"parameter 3 \('vier'\)"),
    "option": ({"lr": 0.5}, {"lr": 0.25}, "parameter group 1: lr=0.5", "parameter group 1: lr=0.25"),
}


def new_group(
    count: int = 1,
    shape: tuple[int, ...] = (2,),
    dtype: torch.dtype = torch.float32,
    name: str = "four",
    **values: Any,
) -> dict[str, Any]:
    members = [(label, parameter(*shape, dtype=dtype)) for label in (name, "five")[:count]]
    return {"params": members, **values}


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("case", GROUP_MISMATCHES)
def test_groups_that_differ_are_refused_and_change_nothing(world_size: int, case: str, bucket_view: bool) -> None:
    values, odd_values, text, odd_text = GROUP_MISMATCHES[case]
    training = Training(bucket_view)
    before = training.snapshot()
    odd = world_size - 1
    group = new_group(**(odd_values if dist.get_rank() == odd else values))
    expect_disagreement(odd, lambda: training.ours.add_param_group(group), text, odd_text)
    expect_same(training.snapshot(), before)
    training.train()
    assert all(isinstance(member, tuple) for member in group["params"])  # the caller's dict is as it was


@distributed(2)
def test_a_refused_group_leaves_a_consolidation_valid(world_size: int) -> None:
    training = Training()
    training.ours.consolidate_state_dict(to=0)
    with pytest.raises(TypeError):
        training.ours.add_param_group(3)  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        expect_same(training.ours.state_dict(), training.plain.state_dict())


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_group_is_accepted_after_a_refused_one(world_size: int, bucket_view: bool) -> None:
    training = Training(bucket_view)
    with pytest.raises(RanksDisagreeError):
        training.ours.add_param_group(new_group(lr=0.1 * dist.get_rank()))
    added, plain_added = parameter(80, 20), parameter(80, 20)
    training.ours.add_param_group({"params": [("four", added)], "lr": 0.3})
    training.plain.add_param_group({"params": [("four", plain_added)], "lr": 0.3})
    training.params.append(added)
    training.plain_params.append(plain_added)
    training.train()
