"""Checkpoints that ranks save or load with different arguments: an error on all ranks, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from onecopy.checkpoint import PerRank, load, save
from tests.support.checkpoints import Side, make
from tests.support.failures import expect_disagreement
from tests.support.harness import distributed
from tests.support.models import assert_same_tree

Change = Callable[[Side], dict[str, Any]]

# What the last rank gives beside the side's model and optimizers, and what all ranks are told of the others and of it.
EITHER: dict[str, tuple[Change, str, str]] = {
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
LOADS: dict[str, tuple[Change, str, str]] = {
    **EITHER,
    "strict": (lambda _: {"strict": False}, "strict: True", "strict: False"),
    "missing_ok": (lambda _: {"missing_ok": True}, "missing_ok: False", "missing_ok: True"),
    "check_base": (lambda _: {"check_base": False}, "check_base: True", "check_base: False"),
}
SAVES: dict[str, tuple[Change, str, str]] = {
    **EITHER,
    "root": (lambda _: {"root": "elsewhere"}, "root: /", "root: elsewhere"),
    "step": (lambda _: {"step": 3}, "step: 2", "step: 3"),
    "keep": (lambda _: {"keep": 3}, "keep: None", "keep: 3"),
    "overwrite": (lambda _: {"overwrite": True}, "overwrite: False", "overwrite: True"),
    "blocking": (lambda _: {"blocking": False}, "blocking: True", "blocking: False"),
    "trainable_only": (lambda _: {"trainable_only": True}, "trainable_only: False", "trainable_only: True"),
    "refuse_nonfinite": (lambda _: {"refuse_nonfinite": True}, "refuse_nonfinite: False", "refuse_nonfinite: True"),
    "PerRank": (
        lambda _: {"extra": {"own": PerRank(1), "shared": 2}},
        "PerRank values of extra: none",
        "PerRank values of extra: 'own'",
    ),
}


@pytest.mark.parametrize("kind", ["plain", "element"])
@pytest.mark.parametrize(("call", "case"), [*(("load", case) for case in LOADS), *(("save", case) for case in SAVES)])
@distributed(2, 3)
def test_different_arguments_change_nothing(world_size: int, call: str, case: str, kind: str, tmp_path: Path) -> None:
    side, odd, new = make(kind), world_size - 1, tmp_path / "new"
    side.push(range(2))
    path = side.save(tmp_path, 1)
    side.push([2])
    change, text, odd_text = (LOADS if call == "load" else SAVES)[case]
    arguments: dict[str, Any] = {"model": side.model, "optimizer": side.optimizers}
    arguments |= {"source": path} if call == "load" else {"root": new, "step": 2}
    arguments |= change(side) if dist.get_rank() == odd else {}
    before = side.contents()
    expect_disagreement(odd, lambda: (load if call == "load" else save)(**arguments), text, odd_text)
    assert_same_tree(side.contents(), before, "after the error")
    assert not new.exists()
    side.push([3])
    side.load(path)


@distributed(2, 3)
def test_loading_into_different_models_or_parameters_changes_nothing(world_size: int, tmp_path: Path) -> None:
    side, other, odd = make("plain"), make("plain", 9, wrap=False), world_size - 1
    side.push(range(2))
    path, params = side.save(tmp_path, 1), list(side.module.parameters())
    if dist.get_rank() == odd:
        other.module.norm = nn.BatchNorm2d(9)
        params.reverse()
    before, turned = other.contents(), AdamW(params)
    for call, *texts in (
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
    assert_same_tree(other.contents(), before, "after the errors")


@distributed(2)
def test_values_that_rank_zero_gives_need_not_be_given_elsewhere(world_size: int, tmp_path: Path) -> None:
    side = make("element")
    side.save(tmp_path, 1, extra={"shared": 4} if dist.get_rank() == 0 else None)
    assert side.load(tmp_path).extra == {"shared": 4}
