"""``matrix_groups``: which parameters of which models go to the matrix optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onecopy.optim import matrix_groups

MUON: dict[str, Any] = {"optimizer_class": torch.optim.Muon, "lr": 0.02}
HIDDEN = "hidden.weight"


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
        (Language(), {}, [HIDDEN]),
        (Language("last", tied=True), {}, [HIDDEN]),
        (Language("to_words"), {}, [HIDDEN]),
        (Language("last", classes=5), {"head": "last"}, [HIDDEN]),
        (Language("last", classes=5), {"head": None}, [HIDDEN, "last.weight"]),
        (Language(), {"choose": [HIDDEN]}, []),
        (Language(), {"choose": lambda name, _: name == "head.weight" or None}, [HIDDEN, "head.weight"]),
        (convolutional(), {"head": "4"}, ["3.weight"]),
        (convolutional(), {"head": "4", "convolutions": True}, ["0.weight", "3.weight"]),
        (nn.DataParallel(Language()), {}, [f"module.{HIDDEN}"]),
        (Language("last", classes=5), {}, "'last' is the last linear module, and may be the output head"),
        (Language(), {"head": "other"}, "head='other' must name one module"),
        (Language(), {"choose": ["nothing"]}, "choose names 'nothing'"),
    ],
)
def test_hidden_matrices_are_found_and_doubts_are_named(model: nn.Module, options: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            matrix_groups(model, MUON, **options)
        return
    groups = matrix_groups(model, MUON, {"lr": 3e-4}, **options)
    found = {"optimizer_class" in group: [name for name, _ in group["params"]] for group in groups}
    assert found.get(True, []) == expected
    assert sorted(name for names in found.values() for name in names) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert [group["lr"] for group in groups if "optimizer_class" not in group] == [3e-4]


def test_frozen_parameters_are_in_no_group_and_the_table_says_why() -> None:
    model = Language()
    model.norm.requires_grad_(False)
    groups = matrix_groups(model, MUON)
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [[HIDDEN], ["embed.weight", "hidden.bias", "head.weight"]]
    first, *lines = (line.split() for line in str(groups).splitlines())
    assert first[0] == "parameter"
    assert [line[0] for line in lines] == ["embed.weight", HIDDEN, "hidden.bias", "head.weight"]
    assert (lines[1][-3:], lines[3][-2:]) == (["Muon", "hidden", "matrix"], ["output", "head"])
