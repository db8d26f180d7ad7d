"""Bad or different arguments of a call are an error on every rank, soon, and nothing has changed anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from onecopy import PeerFailedError, RanksDisagreeError, ZeroRedundancyOptimizer
from tests.support.failures import expect_disagreement, expect_failure_of, parameter
from tests.support.harness import distributed
from tests.support.state_dicts import expect_same
from tests.support.unchanged import VARIANTS, Training

Make = Callable[[Training], Any]


def new_group(
    count: int = 1,
    shape: tuple[int, ...] = (2,),
    dtype: torch.dtype = torch.float32,
    name: str = "four",
    **values: Any,
) -> dict[str, Any]:
    members = [(label, parameter(*shape, dtype=dtype)) for label in (name, "five")[:count]]
    return {"params": members, **values}


def group(**values: Any) -> Make:
    return lambda _: new_group(**values)


def one_more(make: Callable[[Training], Any]) -> Make:
    """A group of one parameter with a name."""
    return lambda training: {"params": [("four", make(training))]}


def changed(change: Callable[[dict[str, Any]], Any]) -> Make:
    """The plain optimizer's state dict after a change to it, or what the change returns."""

    def make(training: Training) -> Any:
        state_dict = copy.deepcopy(training.plain.state_dict())
        result = change(state_dict)
        return state_dict if result is None else result

    return make


def with_rate(rate: float) -> Make:
    return changed(lambda state_dict: state_dict["param_groups"][0].update(lr=rate))


def with_state(index: Any, value: Any) -> Make:
    return changed(lambda state_dict: state_dict["state"].update({index: value}))


def with_average(index: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    return changed(
        lambda state_dict: state_dict["state"][index].update(exp_avg=make(state_dict["state"][index]["exp_avg"]))
    )


def drop_group(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"].pop()


def drop_parameter(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


def drop_state(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][1]


def count_on(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["step"] += 40


CALLS: dict[str, tuple[Callable[[Training, Any], object], Make]] = {
    "add_param_group": (lambda training, group: training.ours.add_param_group(group), group()),
    "load_state_dict": (lambda training, state_dict: training.ours.load_state_dict(state_dict), with_rate(7.0)),
    "consolidate_state_dict": (lambda training, to: training.ours.consolidate_state_dict(to=to), lambda _: 0),
}
"""Each call with the argument of a rank that makes no mistake."""

ADD, LOAD, GATHER = CALLS

BAD: dict[str, tuple[str, Make, type[Exception], str]] = {
    "a group that is no dict": (ADD, lambda _: [parameter(2)], TypeError, "parameter group 1 must be a dict, got list"),
    "a group without params": (ADD, lambda _: {"lr": 1.0}, ValueError, "parameter group 1 has no 'params'"),
    "no tensor": (ADD, one_more(lambda _: 3), TypeError, "'four' is not a tensor but int"),
    "known already": (ADD, one_more(lambda each: each.params[1]), ValueError, "'four' is in two groups.*'two'"),
    "shares memory": (
        ADD,
        one_more(lambda each: nn.Parameter(each.params[1].detach()[:3])),
        ValueError,
        "'(two|four)' and '(two|four)' share memory",
    ),
    "expanded": (ADD, one_more(lambda _: nn.Parameter(torch.ones(1).expand(3))), ValueError, "'four'.*expanded"),
    "differentiable": (ADD, group(differentiable=True), ValueError, r"differentiable=True \(parameter group 1\)"),
    "without a name": (ADD, lambda _: {"params": [parameter(2)]}, ValueError, "name"),
    "a list to load": (LOAD, lambda _: [1], TypeError, "takes an optimizer's state dict"),
    "no groups": (LOAD, lambda _: {"state": {}}, TypeError, "takes an optimizer's state dict.*'param_groups'"),
    "a group less": (LOAD, changed(drop_group), ValueError, "0 parameter groups, the optimizer has 1"),
    "a parameter less": (
        LOAD,
        changed(drop_parameter),
        ValueError,
        "group 0 has 2 parameters in the state dict and 3",
    ),
    "state of nobody": (LOAD, with_state(17, {"step": torch.tensor(1.0)}), ValueError, r"state for \[17\]"),
    "a wrong shape": (
        LOAD,
        with_average(1, lambda _: torch.zeros(9)),
        ValueError,
        r"'exp_avg' of parameter 'two' has shape \(9,\).*\(7,\)",
    ),
    "a wrong shape of a parameter that may be cut": (
        LOAD,
        with_average(0, lambda _: torch.zeros(40, 64)),
        ValueError,
        r"'exp_avg' of parameter 'one' has shape \(40, 64\).*\(64, 40\)",
    ),
    **{
        f"the rank {to!r}": (GATHER, lambda _, to=to: to, ValueError, rf"group rank from 0 to \d, got {to!r}")  # type: ignore[misc]
        for to in (-1, 17, "0", 1.0, None)
    },
}


@distributed(2, 3)
@pytest.mark.parametrize("case", BAD)
def test_a_refused_call_changes_nothing(world_size: int, case: str) -> None:
    name, make_bad, kind, text = BAD[case]
    call, make_good = CALLS[name]
    for ours in VARIANTS:
        training = Training(**ours)
        for optimizer in (training.ours, training.plain):
            optimizer.param_groups[0].update(lr=0.25, note=["mine"])
        training.train()
        for culprits in (range(world_size), [world_size - 1]):
            before = training.snapshot()
            argument = (make_bad if dist.get_rank() in culprits else make_good)(training)
            expect_failure_of(culprits, lambda: call(training, argument), kind, text)  # noqa: B023
            expect_same(training.snapshot(), before)
            training.train()


TWO, FOUR = "state of parameter 'two'", r"parameter 3 \('four'\)"

DIFFERENT: dict[str, tuple[str, Make, Make, str, str]] = {
    "the number of parameters": (ADD, group(), group(count=2), "", r"parameter 4 \('five'\)"),
    "a shape": (ADD, group(), group(shape=(3,)), rf"{FOUR}: shape \(2,\)", r"parameter 3 .*shape \(3,\)"),
    "a dtype": (ADD, group(), group(dtype=torch.bfloat16), f"{FOUR}: .*float32", f"{FOUR}: .*bfloat16"),
    "a name": (ADD, group(), group(name="vier"), FOUR, r"parameter 3 \('vier'\)"),
    "an option": (ADD, group(lr=0.5), group(lr=0.25), "parameter group 1: lr=0.5", "parameter group 1: lr=0.25"),
    "a loaded option": (
        LOAD,
        with_rate(0.1),
        with_rate(0.25),
        "parameter group 0: lr=0.1",
        "parameter group 0: lr=0.25",
    ),
    "a counter": (LOAD, changed(lambda _: None), changed(count_on), rf"{TWO}: step=.* 2.0", rf"{TWO}: step=.* 42.0"),
    "a parameter's state": (LOAD, changed(lambda _: None), changed(drop_state), TWO, "state of parameter 'three'"),
    "the dtype of state": (
        LOAD,
        changed(lambda _: None),
        with_average(1, torch.Tensor.double),
        f"{TWO}: exp_avg=.*float32",
        f"{TWO}: .*float64",
    ),
    "state that is no parameter's": (
        LOAD,
        with_state("rounds", 0),
        with_state("rounds", 1),
        "state under 'rounds': 0",
        "state under 'rounds': 1",
    ),
    "the rank that gathers": (GATHER, lambda _: 0, lambda _: 1, "target rank: 0", "target rank: 1"),
}


@distributed(2, 3)
@pytest.mark.parametrize("case", DIFFERENT)
def test_arguments_that_differ_are_refused_and_change_nothing(world_size: int, case: str) -> None:
    name, make, make_odd, text, odd_text = DIFFERENT[case]
    odd = world_size - 1
    for ours in VARIANTS:
        training = Training(**ours)
        before = training.snapshot()
        argument = (make_odd if dist.get_rank() == odd else make)(training)
        expect_disagreement(odd, lambda: CALLS[name][0](training, argument), text, odd_text)  # noqa: B023
        expect_same(training.snapshot(), before)
        training.train()
        if name == ADD:  # the caller's dict is as it was
            assert all(isinstance(member, tuple) for member in argument["params"])


class Picky(SGD):
    """Refuses a learning rate of 13 when it is loaded, on the last rank only, after torch has taken it over."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if any(group["lr"] == 13 for group in self.param_groups) and dist.get_rank() == dist.get_world_size() - 1:
            raise OverflowError("lr 13 is bad luck")


@distributed(2, 3)
@pytest.mark.parametrize("by", ["the class", "a hook before", "a hook after"])
def test_a_load_that_fails_on_one_rank_is_an_error_on_all(world_size: int, by: str) -> None:
    training = Training(Picky)
    culprit, error, text = world_size - 1, OverflowError, "bad luck"

    def hook(*_: Any) -> None:
        if by != "the class" and dist.get_rank() == culprit:
            raise error(text)

    ours = training.ours
    register = ours.register_load_state_dict_post_hook if "after" in by else ours.register_load_state_dict_pre_hook
    handle = register(hook)
    before = training.snapshot()
    state_dict = with_rate(13 if by == "the class" else 0.25)(training)
    expect_failure_of([culprit], lambda: ours.load_state_dict(state_dict), error, text)
    handle.remove()
    if "after" in by:  # the state dict is loaded by then
        assert ours.param_groups[0]["lr"] == 0.25
        ours.load_state_dict(training.plain.state_dict())
    else:
        expect_same(training.snapshot(), before)
    training.train()


@distributed(2, 3)
@pytest.mark.parametrize("ours", VARIANTS, ids=["whole", "cut in buckets"])
def test_after_a_refused_group_a_consolidation_is_valid_and_another_group_is_accepted(
    world_size: int, ours: dict[str, Any]
) -> None:
    training = Training(**ours)
    training.ours.consolidate_state_dict(to=0)
    with pytest.raises(RanksDisagreeError):
        training.ours.add_param_group(new_group(lr=0.1 * dist.get_rank()))
    if dist.get_rank() == 0:
        expect_same(training.ours.state_dict(), training.plain.state_dict())
    dist.barrier()
    added, plain_added = parameter(80, 20), parameter(80, 20)
    training.ours.add_param_group({"params": [("four", added)], "lr": 0.3})
    training.plain.add_param_group({"params": [("four", plain_added)], "lr": 0.3})
    training.train()


@distributed(2, 3)
def test_a_refused_group_in_half_precision_leaves_no_need_to_consolidate(world_size: int) -> None:
    zero = ZeroRedundancyOptimizer([("one", parameter(9))], SGD, lr=0.5, master_weights=True)
    before = zero.state_dict()
    with pytest.raises((RanksDisagreeError, PeerFailedError), match="lr="):
        zero.add_param_group(new_group(dtype=torch.bfloat16, lr=0.1 * dist.get_rank()))
    assert zero.state_dict() == before
