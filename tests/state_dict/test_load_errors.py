"""A state dict that is refused, or differs between ranks, is an error on every rank and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

from tests.support.failures import expect_disagreement, expect_failure_of
from tests.support.harness import distributed
from tests.support.state_dicts import expect_same
from tests.support.unchanged import Training


def spoil(training: Training, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The plain optimizer's state dict after a change to it."""
    state_dict = copy.deepcopy(training.plain.state_dict())
    changed = change(state_dict)
    return state_dict if changed is None else changed


def without_a_group(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"].pop()


def without_a_parameter(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


def with_state_of_nobody(state_dict: dict[str, Any]) -> None:
    state_dict["state"][17] = {"step": torch.tensor(1.0)}


def with_a_wrong_shape(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["exp_avg"] = torch.zeros(9)


BAD_LOADS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "not a dict": (lambda _: [1], TypeError, "takes an optimizer's state dict"),
    "no groups": (lambda _: {"state": {}}, TypeError, "takes an optimizer's state dict.*'param_groups'"),
    "a group less": (without_a_group, ValueError, "0 parameter groups, the optimizer has 1"),
    "a parameter less": (without_a_parameter, ValueError, "group 0 has 2 parameters in the state dict and 3"),
    "state of nobody": (with_state_of_nobody, ValueError, r"state for \[17\]"),
    "a wrong shape": (with_a_wrong_shape, ValueError, r"'exp_avg' of parameter 'two' has shape \(9,\).*\(7,\)"),
}


@distributed(2, 3)
@pytest.mark.parametrize("who", ["all", "last"])
@pytest.mark.parametrize("case", BAD_LOADS)
def test_a_refused_load_changes_nothing(world_size: int, case: str, who: str) -> None:
    change, kind, text = BAD_LOADS[case]
    training = Training()
    before = training.snapshot()
    culprits = range(world_size) if who == "all" else [world_size - 1]
    good_dict = copy.deepcopy(training.plain.state_dict())
    good_dict["param_groups"][0]["lr"] = 7.0
    state_dict = spoil(training, change) if dist.get_rank() in culprits else good_dict
    expect_failure_of(culprits, lambda: training.ours.load_state_dict(state_dict), kind, text)
    expect_same(training.snapshot(), before)
    training.train()


def with_another_rate(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.25


def with_another_count(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["step"] += 40


def without_a_state(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][1]


def with_another_dtype(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["exp_avg"] = state_dict["state"][1]["exp_avg"].double()


LOAD_MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "an option": (with_another_rate, "parameter group 0: lr=0.1", "parameter group 0: lr=0.25"),
    "a counter": (
        with_another_count,
        "state of parameter 'two': step=.* 2.0",
        "state of parameter 'two': step=.* 42.0",
    ),
    "a parameter's state": (without_a_state, "state of parameter 'two'", "state of parameter 'three'"),
    "a dtype": (
        with_another_dtype,
        "state of parameter 'two': exp_avg=.*float32",
        "state of parameter 'two': .*float64",
    ),
}


@distributed(2, 3)
@pytest.mark.parametrize("case", LOAD_MISMATCHES)
def test_state_dicts_that_differ_are_refused_and_change_nothing(world_size: int, case: str) -> None:
    change, text, odd_text = LOAD_MISMATCHES[case]
    training = Training()
    before = training.snapshot()
    odd = world_size - 1
    state_dict = spoil(training, change if dist.get_rank() == odd else lambda _: None)
    expect_disagreement(odd, lambda: training.ours.load_state_dict(state_dict), text, odd_text)
    expect_same(training.snapshot(), before)
    training.train()


class Picky(SGD):
    """Refuses a learning rate of 13 when it is loaded, on the last rank only, after torch has taken it over."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if any(group["lr"] == 13 for group in self.param_groups) and dist.get_rank() == dist.get_world_size() - 1:
            raise OverflowError("lr 13 is bad luck")


@distributed(2, 3)
def test_a_class_that_refuses_a_load_on_one_rank_leaves_all_ranks_as_they_were(world_size: int) -> None:
    training = Training(optimizer_class=Picky)
    before = training.snapshot()
    state_dict = copy.deepcopy(training.plain.state_dict())
    state_dict["param_groups"][0]["lr"] = 13
    expect_failure_of(
        [world_size - 1], lambda: training.ours.load_state_dict(state_dict), OverflowError, "lr 13 is bad luck"
    )
    expect_same(training.snapshot(), before)
    training.train()


@distributed(2, 3)
def test_a_load_hook_that_fails_on_one_rank_stops_all(world_size: int) -> None:
    training = Training()

    def hook(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            raise LookupError("no such run")

    training.ours.register_load_state_dict_pre_hook(hook)
    before = training.snapshot()
    state_dict = training.plain.state_dict()
    expect_failure_of([0], lambda: training.ours.load_state_dict(state_dict), LookupError, "no such run")
    expect_same(training.snapshot(), before)
    training.train()


@distributed(2, 3)
def test_a_target_rank_that_only_one_rank_gets_wrong_stops_all(world_size: int) -> None:
    training = Training()
    to = world_size if dist.get_rank() == 0 else 0
    expect_failure_of([0], lambda: training.ours.consolidate_state_dict(to=to), ValueError, "to must be a group rank")
    training.train()


@distributed(2, 3)
def test_different_target_ranks_are_an_error(world_size: int) -> None:
    training = Training()
    to = 1 if dist.get_rank() == world_size - 1 else 0
    expect_disagreement(
        world_size - 1,
        lambda: training.ours.consolidate_state_dict(to=to),
        "target rank: 0",
        "target rank: 1",
    )
    training.train()
