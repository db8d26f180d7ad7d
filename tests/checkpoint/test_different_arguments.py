"""Checkpoints that ranks save or load with different arguments: an error on all ranks, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import SGD, AdamW

from onecopy.checkpoint import PerRank, get_optimizer_state_dict, load, save, set_optimizer_state_dict
from tests.support.checkpoints import Side, contents_of, load_side, make, push, save_side
from tests.support.dcp import full_state, train
from tests.support.dcp import make as make_zero
from tests.support.failures import expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed
from tests.support.models import assert_same_tree

Arguments = dict[str, Any]

# What all ranks but one give beside the side's model and optimizers, what the last one gives, and what both are told.
Cases = dict[str, tuple[Callable[[Side], Arguments], str, str]]

EITHER: Cases = {
    "no model": (lambda _: {"model": None}, "model: given", "model: None"),
    "no optimizer": (lambda _: {"optimizer": None}, "optimizer: 1 of them", "optimizer: None"),
    "fewer optimizers": (lambda _: {"optimizer": []}, "optimizer: 1 of them", "optimizer: None"),
    "more optimizers": (
        lambda side: {"optimizer": [*side.optimizers, AdamW(side.module.parameters())]},
        "optimizer: 1 of them",
        "optimizer: 2 of them",
    ),
    "another class": (
        lambda side: {"optimizer": SGD(side.module.parameters())},
        "optimizer: .*AdamW",
        "optimizer: .*SGD",
    ),
}

LOADS: Cases = {
    **EITHER,
    "strict": (lambda _: {"strict": False}, "strict: True", "strict: False"),
    "missing_ok": (lambda _: {"missing_ok": True}, "missing_ok: False", "missing_ok: True"),
    "check_base": (lambda _: {"check_base": False}, "check_base: True", "check_base: False"),
}

SAVES: Cases = {
    **EITHER,
    "root": (lambda _: {"root": "elsewhere"}, "root: /", "root: elsewhere"),
    "step": (lambda _: {"step": 3}, "step: 2", "step: 3"),
    "keep": (lambda _: {"keep": 3}, "keep: None", "keep: 3"),
    "blocking": (lambda _: {"blocking": False}, "blocking: True", "blocking: False"),
    "trainable_only": (lambda _: {"trainable_only": True}, "trainable_only: False", "trainable_only: True"),
    "refuse_nonfinite": (lambda _: {"refuse_nonfinite": True}, "refuse_nonfinite: False", "refuse_nonfinite: True"),
    "PerRank": (
        lambda _: {"extra": {"own": PerRank(1), "shared": 2}},
        "PerRank values of extra: none",
        "PerRank values of extra: 'own'",
    ),
}


def sides(kind: str) -> tuple[Side, int, bool]:
    """A side that has stepped, the rank that gives other arguments, and whether this is it."""
    side, odd = make(kind), dist.get_world_size() - 1
    push(side, range(2))
    return side, odd, dist.get_rank() == odd


@pytest.mark.parametrize("kind", ["plain", "element"])
@pytest.mark.parametrize("case", LOADS)
@distributed(2, 3)
def test_loading_with_different_arguments_changes_nothing(
    world_size: int, kind: str, case: str, tmp_path: Path
) -> None:
    side, odd, here = sides(kind)
    path = save_side(tmp_path, 1, side)
    push(side, [2])
    change, text, odd_text = LOADS[case]
    arguments = {"model": side.model, "optimizer": side.optimizers, **(change(side) if here else {})}
    before = contents_of(side)
    expect_disagreement(odd, lambda: load(path, **arguments), text, odd_text)
    assert_same_tree(contents_of(side), before, "after the error")
    push(side, [3])
    load_side(path, side)


@distributed(2, 3)
def test_loading_into_different_models_or_parameters_changes_nothing(world_size: int, tmp_path: Path) -> None:
    side, odd, here = sides("plain")
    path = save_side(tmp_path, 1, side)
    other = make("plain", 9, wrap=False)
    if here:
        other.module.norm = nn.BatchNorm2d(9)
    params = list(side.module.parameters())
    turned = AdamW(params[::-1] if here else params)
    before = contents_of(other), contents_of(side)
    for call, *texts in (
        (lambda: load(path, model=None if here else other.model), "model: given", "model: None"),
        (
            lambda: load(path, model=other.module, strict=False),
            r"'norm\.weight' of .*\(8,\)",
            r"'norm\.weight' of .*\(9,\)",
        ),
        (
            lambda: load(path, model=side.model, optimizer=turned),
            "parameter 0 of group 0 .*'emb",
            "parameter 0 of group 0 .*'body",
        ),
    ):
        expect_disagreement(odd, call, *texts)
    assert_same_tree((contents_of(other), contents_of(side)), before, "after the errors")


@pytest.mark.parametrize("kind", ["plain", "element"])
@pytest.mark.parametrize("case", SAVES)
@distributed(2, 3)
def test_saving_with_different_arguments_writes_nothing(world_size: int, kind: str, case: str, tmp_path: Path) -> None:
    side, odd, here = sides(kind)
    change, text, odd_text = SAVES[case]
    arguments: Arguments = {"root": tmp_path, "step": 2, "model": side.model, "optimizer": side.optimizers}
    arguments |= change(side) if here else {}
    expect_disagreement(odd, lambda: save(**arguments), text, odd_text)
    assert not list(tmp_path.iterdir())
    save_side(tmp_path, 2, side)


@distributed(2, 3)
def test_values_that_rank_zero_gives_need_not_be_given_elsewhere(world_size: int, tmp_path: Path) -> None:
    side, _, _ = sides("element")
    save_side(tmp_path, 1, side, extra={"shared": 4} if dist.get_rank() == 0 else None)
    assert load_side(tmp_path, side).extra == {"shared": 4}


# torch.distributed.checkpoint's functions

OPTIONS = ["full_state_dict", "cpu_offload"]
FULL = StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("option", OPTIONS)
@distributed(2, 3)
def test_asking_for_state_with_different_options_is_an_error(world_size: int, option: str) -> None:
    odd = world_size - 1
    model, zero = make_zero("element")
    train(model, zero, range(2))
    options = StateDictOptions(**{option: dist.get_rank() == odd})  # type: ignore[arg-type]
    call = lambda: get_optimizer_state_dict(model, zero, options=options)  # noqa: E731
    expect_disagreement(odd, call, f"{option}: False", f"{option}: True")
    full_state(model, zero)


@distributed(2, 3)
def test_giving_state_back_with_different_options_changes_nothing(world_size: int) -> None:
    odd = world_size - 1
    model, zero = make_zero("element")
    train(model, zero, range(2))
    state = full_state(model, zero)
    train(model, zero, range(2, 4))
    before = full_state(model, zero)
    options = StateDictOptions(full_state_dict=dist.get_rank() == odd)
    call = lambda: set_optimizer_state_dict(model, zero, state, options=options)  # noqa: E731
    expect_disagreement(odd, call, "full_state_dict: False", "full_state_dict: True")
    assert_same_tree(full_state(model, zero), before, "after the errors")


@pytest.mark.parametrize("culprit", ["first", "last"])
@distributed(2, 3)
def test_a_value_that_one_rank_refuses_is_an_error_on_all_ranks(world_size: int, culprit: str) -> None:
    odd = 0 if culprit == "first" else world_size - 1
    here = dist.get_rank() == odd
    model, zero = make_zero("element")
    train(model, zero, range(2))
    before = full_state(model, zero)
    other = nn.Linear(2, 2)
    plain = SGD(model[4].parameters(), lr=0.1)
    both = [zero, plain]
    unknown = "not a parameter of the model"

    def get(model: nn.Module = model, **given: Any) -> Callable[[], object]:
        return lambda: get_optimizer_state_dict(model, zero, **(given if here else {}))

    def put(state: Any, model: nn.Module = model) -> Callable[[], object]:
        return lambda: set_optimizer_state_dict(model, zero, state, options=FULL)

    expect_failure_of([odd], get(submodules={model}), ValueError, "submodules")
    expect_failure_of([odd], get(options=StateDictOptions(ignore_frozen_params=True)), ValueError, "ignore_frozen")
    expect_failure_of([odd], get(other if here else model), ValueError, unknown)
    for state, kind, text in ((3, TypeError, "got 3"), ({3: 4}, TypeError, "param_groups")):
        mine: Any = state if here else before
        expect_failure_of([odd], put(mine), kind, text)
    wrong = {**before, "state": {**before["state"], "4.bias": {"exp_avg": _Broken()}}} if here else before
    assert failure_of(put(wrong)) is not None
    expect_failure_of([odd], put(before, other if here else model), ValueError, unknown)
    # A plain optimizer among them, which torch's own function refuses on one rank.
    wrong = {**before, "param_groups": 3} if here else before
    assert failure_of(lambda: set_optimizer_state_dict(model, both[::-1], wrong, options=FULL)) is not None
    assert_same_tree(full_state(model, zero), before, "after the errors")


class _Broken:
    """Cannot be put into an optimizer."""

    def __deepcopy__(self, memo: object) -> Any:
        raise ValueError("cannot be copied")
