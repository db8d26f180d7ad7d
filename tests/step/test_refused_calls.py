"""Bad or different arguments, failing steps, and ranks at different calls: an error on every rank, soon."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from onecopy import PeerFailedError, RanksDisagreeError, ZeroRedundancyOptimizer
from tests.support.both import Both, tensors_of
from tests.support.failures import (
    check_pool,
    expect,
    expect_disagreement,
    expect_failure_of,
    failure_of,
    named,
    parameter,
)
from tests.support.harness import distributed
from tests.support.state_dicts import expect_same

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"shard_by": "parameter"},
    "cut in buckets": {"shard_by": "element", "parameters_as_bucket_view": True},
}
"""Arguments of the optimizer under which a refused call must leave everything alone."""


class Training(Both):
    """Both optimizers after two steps; the first parameter may be cut."""

    def __init__(self, optimizer_class: Any = Adam, **ours: Any) -> None:
        shapes = ((64, 40), (7,), (3, 5))
        super().__init__(lambda: named(*(parameter(*shape) for shape in shapes)), optimizer_class, {"lr": 0.1}, **ours)
        self.train()

    @property
    def params(self) -> list[Tensor]:
        return tensors_of(self.ours)

    def train(self) -> None:
        self.step()
        self.step()
        self.check()

    def restore(self) -> None:
        """Make all ranks whole again after a step that some of them have made: load, and train on."""
        with torch.no_grad():
            for param, plain in zip(self.params, tensors_of(self.plain), strict=True):
                param.copy_(plain)
        self.ours.load_state_dict(self.plain.state_dict())
        self.train()

    def snapshot(self) -> list[Any]:
        """Everything of this rank that a refused call must leave alone, with where the memory is."""
        state = [
            (name, value.clone() if isinstance(value, Tensor) else value)
            for param in self.params
            for name, value in self.ours.state[param].items()
        ]
        places = [param.data_ptr() for param in self.params]
        groups = [
            [copy.deepcopy({key: value for key, value in group.items() if key != "params"}), len(group["params"])]
            for group in (*self.ours.param_groups, *self.ours.optim.param_groups)
        ]
        values = [param.detach().clone() for param in self.params]
        return [state, places, groups, values, self.ours.layout, len(self.ours.optim.state)]


# Arguments of calls

Make = Callable[[Training], Any]


def new_group(
    count: int = 1, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32, name: str = "four", **values: Any
) -> dict[str, Any]:
    members = [(label, parameter(*shape, dtype=dtype)) for label in (name, "five")[:count]]
    return {"params": members, **values}


def group(**values: Any) -> Make:
    return lambda _: new_group(**values)


def one_more(make: Callable[[Training], Any]) -> Make:
    """A group of one parameter with a name."""
    return lambda training: {"params": [("four", make(training))]}


def changed(change: Callable[[dict[str, Any]], Any]) -> Make:
    """The plain optimizer's state dict after a change to it."""

    def make(training: Training) -> Any:
        state_dict = copy.deepcopy(training.plain.state_dict())
        change(state_dict)
        return state_dict

    return make


def with_rate(rate: float) -> Make:
    return changed(lambda state_dict: state_dict["param_groups"][0].update(lr=rate))


def with_state(index: Any, value: Any) -> Make:
    return changed(lambda state_dict: state_dict["state"].update({index: value}))


def with_average(index: int, make: Callable[[Tensor], Tensor]) -> Make:
    return changed(
        lambda state_dict: state_dict["state"][index].update(exp_avg=make(state_dict["state"][index]["exp_avg"]))
    )


CALLS: dict[str, tuple[Callable[[Training, Any], object], Make]] = {
    "add_param_group": (lambda training, group: training.ours.add_param_group(group), group()),
    "load_state_dict": (lambda training, state_dict: training.ours.load_state_dict(state_dict), with_rate(7.0)),
    "consolidate_state_dict": (lambda training, to: training.ours.consolidate_state_dict(to=to), lambda _: 0),
}
"""Each call with the argument of a rank that makes no mistake."""

ADD, LOAD, GATHER = CALLS
WANTED = "takes an optimizer's state dict"

BAD: dict[str, tuple[str, Make, type[Exception], str]] = {
    "a group that is no dict": (ADD, lambda _: [parameter(2)], TypeError, "parameter group 1 must be a dict, got list"),
    "a group without params": (ADD, lambda _: {"lr": 1.0}, ValueError, "parameter group 1 has no 'params'"),
    "known already": (ADD, one_more(lambda each: each.params[1]), ValueError, "'four' is in two groups.*'two'"),
    "shares memory": (
        ADD,
        one_more(lambda each: nn.Parameter(each.params[1].detach()[:3])),
        ValueError,
        "'(two|four)' and '(two|four)' share memory",
    ),
    "differentiable": (ADD, group(differentiable=True), ValueError, r"differentiable=True \(parameter group 1\)"),
    "without a name": (ADD, lambda _: {"params": [parameter(2)]}, ValueError, "name"),
    "a list to load": (LOAD, lambda _: [1], TypeError, WANTED),
    "no groups": (LOAD, lambda _: {"state": {}}, TypeError, f"{WANTED}.*'param_groups'"),
    "a group less": (
        LOAD,
        changed(lambda state_dict: state_dict["param_groups"].pop()),
        ValueError,
        "0 parameter groups, the optimizer has 1",
    ),
    "a parameter less": (
        LOAD,
        changed(lambda state_dict: state_dict["param_groups"][0]["params"].pop()),
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
    for ours in SETTINGS.values():
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


TWO, FOUR, GROUP = "state of parameter 'two'", r"parameter 3 \('four'\)", "parameter group"
SAME = changed(lambda _: None)

DIFFERENT: dict[str, tuple[str, Make, Make, str, str]] = {
    "the number of parameters": (ADD, group(), group(count=2), "", r"parameter 4 \('five'\)"),
    "an option": (ADD, group(lr=0.5), group(lr=0.25), f"{GROUP} 1: lr=0.5", f"{GROUP} 1: lr=0.25"),
    "a loaded option": (LOAD, with_rate(0.1), with_rate(0.25), f"{GROUP} 0: lr=0.1", f"{GROUP} 0: lr=0.25"),
    "a counter": (
        LOAD,
        SAME,
        changed(lambda state_dict: state_dict["state"][1]["step"].add_(40)),
        rf"{TWO}: step=.* 2.0",
        rf"{TWO}: step=.* 42.0",
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
    for ours in SETTINGS.values():
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
def test_a_refused_group_leaves_a_consolidation_valid_and_no_need_of_one(world_size: int) -> None:
    training = Training()
    training.ours.consolidate_state_dict(to=0)
    # Master weights of parameters in half precision would have to be consolidated.
    zero = ZeroRedundancyOptimizer([("one", parameter(9))], SGD, lr=0.5, master_weights=True)
    before = zero.state_dict()
    for optimizer in (training.ours, zero):
        with pytest.raises((RanksDisagreeError, PeerFailedError), match="lr="):
            optimizer.add_param_group(new_group(dtype=torch.bfloat16, lr=0.1 * dist.get_rank()))
    assert zero.state_dict() == before
    if dist.get_rank() == 0:
        expect_same(training.ours.state_dict(), training.plain.state_dict())


# Steps that fail, and ranks at different calls


class Fragile(SGD):
    """Its step fails where it is told to."""

    broken: Exception | None = None

    def step(self, closure: Any = None) -> Any:
        if self.broken is not None:
            raise self.broken
        return super().step(closure)


FAILURES = {
    "an ordinary error": ArithmeticError("the tank is empty"),
    "an error with text that is no Unicode": OSError("the tank is empty: /data/\udcff"),
    "an error without text": ArithmeticError(),
}


@distributed(2, 3)
@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_inner_step_is_raised_there_and_reported_elsewhere_and_a_load_makes_all_whole_again(
    world_size: int, case: str
) -> None:
    training, failing, error = Training(Fragile), world_size - 1, FAILURES[case]
    assert isinstance(training.ours.optim, Fragile)
    if dist.get_rank() == failing:
        training.ours.optim.broken = error
    caught = failure_of(training.ours.step)
    if dist.get_rank() == failing:
        assert caught is error
    else:
        text = "the tank is empty" if error.args else ""
        expect(caught, PeerFailedError, rf"step\(\) failed on rank {failing}: {type(error).__name__}: {text}")
    training.ours.optim.broken = None
    training.restore()


AT: dict[str, Callable[[Any], object]] = {
    "step()": lambda training: training.ours.step(),
    "consolidate_state_dict()": lambda training: training.ours.consolidate_state_dict(),
    "load_state_dict()": lambda training: training.ours.load_state_dict(training.plain.state_dict()),
    "add_param_group()": lambda training: training.ours.add_param_group({"params": [parameter(3)]}),
    "grad_norm() or clip_grad_norm_()": lambda training: training.ours.clip_grad_norm_(1.0),
}


@distributed(2, 3)
@pytest.mark.parametrize(("one", "other"), list(combinations(AT, 2)))
def test_ranks_at_different_calls_are_all_told_where_each_of_them_is(world_size: int, one: str, other: str) -> None:
    training = Training()
    here = one if dist.get_rank() == 0 else other
    error = failure_of(lambda: AT[here](training))
    pattern = rf"different calls\. rank 0: {re.escape(one)}; rank 1: {re.escape(other)}[;.]"
    expect(error, RanksDisagreeError, pattern)
    training.restore()  # a rank that was at step() has stepped what it owns


@distributed(2, 3)
def test_an_unknown_argument_on_one_rank_and_a_sparse_gradient_are_errors_on_all(world_size: int) -> None:
    training = Training()
    kwargs: dict[str, Any] = {"speed": 3} if dist.get_rank() == 0 else {}
    expect_failure_of([0], lambda: training.ours.step(**kwargs), TypeError, "speed")
    embedding = nn.Embedding(64, 32, sparse=True)
    optimizer = ZeroRedundancyOptimizer(embedding.named_parameters(), AdamW, lr=0.1)
    assert optimizer.layout.cut_params == (0,)
    embedding(torch.tensor([1, 2])).sum().backward()
    expect(failure_of(optimizer.step), RuntimeError, "parameter 'weight' has a sparse gradient, which AdamW does not")
    check_pool()
