"""``matrix_groups``: which parameters of which models go to the matrix optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onecopy.optim import matrix_groups

MUON: dict[str, Any] = {"optimizer_class": torch.optim.Muon, "lr": 0.02}


class Language(nn.Module):
    """An embedding, one hidden layer with its norm, and a head."""

    def __init__(self, head: str = "head", tied: bool = False, classes: int = 32) -> None:
        super().__init__()
        self.embed, self.norm, self.hidden = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        setattr(self, head, nn.Linear(8, classes, bias=False))
        if tied:
            self.get_submodule(head).weight = self.embed.weight


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (Language(), {}, ["hidden.weight"]),
        (Language("last", tied=True), {}, ["hidden.weight"]),
        (Language("to_words"), {}, ["hidden.weight"]),
        (Language("last", classes=5), {"head": "last"}, ["hidden.weight"]),
        (Language("last", classes=5), {"head": None}, ["hidden.weight", "last.weight"]),
        (Language(), {"choose": ["hidden.weight"]}, []),
        (
            Language(),
            {"choose": lambda name, _: True if name == "head.weight" else None},
            ["hidden.weight", "head.weight"],
        ),
        (convolutional(), {"head": "4"}, ["3.weight"]),
        (convolutional(), {"head": "4", "convolutions": True}, ["0.weight", "3.weight"]),
        (nn.DataParallel(Language()), {}, ["module.hidden.weight"]),
    ],
)
def test_hidden_matrices_are_found(model: nn.Module, options: dict[str, Any], expected: list[str]) -> None:
    groups = matrix_groups(model, MUON, {"lr": 3e-4}, **options)
    found = [name for group in groups if "optimizer_class" in group for name, _ in group["params"]]
    assert found == expected
    everything = [name for group in groups for name, _ in group["params"]]
    assert sorted(everything) == sorted(name for name, _ in model.named_parameters())
    assert all(group["lr"] == 3e-4 for group in groups if "optimizer_class" not in group)


def test_frozen_parameters_are_in_no_group_and_the_table_says_why() -> None:
    model = Language()
    model.norm.requires_grad_(False)
    groups = matrix_groups(model, MUON)
    (matrix, other) = groups
    assert [name for name, _ in [*matrix["params"], *other["params"]]] == [
        "hidden.weight", "embed.weight", "hidden.bias", "head.weight",
    ]  # fmt: skip
    lines = str(groups).splitlines()
    assert [line.split()[0] for line in lines] == [
        "parameter",
        "embed.weight",
        "hidden.weight",
        "hidden.bias",
        "head.weight",
    ]
    assert lines[2].split()[-3:] == ["Muon", "hidden", "matrix"]
    assert lines[4].endswith("output head")


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (Language("last", classes=5), {}, "'last' is the last linear module, and may be the output head"),
        (Language(), {"head": "other"}, "head='other' must name one module"),
        (Language(), {"choose": ["nothing"]}, "choose names 'nothing'"),
    ],
)
def test_doubts_and_mistakes_are_named(model: nn.Module, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        matrix_groups(model, MUON, **options)
