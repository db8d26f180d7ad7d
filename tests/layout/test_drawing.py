"""The drawing of a layout."""

from __future__ import annotations

import re

import pytest
import torch

from onecopy.layout import Layout, ParamSpec, extend
from onecopy.layout.drawing import MOST_ROWS

SIZES = {"embedding.weight": 6400, "blocks.0.up.weight": 2560, "blocks.0.down.weight": 2560, "norm.bias": 64}


def layout(ranks: int, sizes: dict[str, int] = SIZES) -> Layout:
    specs = [ParamSpec(i, name, (size,), (1,), torch.float32) for i, (name, size) in enumerate(sizes.items())]
    return extend(None, specs, ranks, "element", True)


@pytest.mark.parametrize("width", [60, 100, 161])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_one_row_per_rank_none_longer_than_the_terminal(ranks: int, width: int) -> None:
    drawn = layout(ranks)
    for colour in (False, True):
        lines = re.sub(r"\x1b\[[\d;]*m", "", drawn.draw(width, colour)).splitlines()
        rows = [line for line in lines if line.startswith("rank ")]
        assert len(rows) == ranks
        assert all(len(row) <= width for row in rows)
        for row, elements in zip(rows, drawn.elements_per_rank, strict=True):
            assert f"{elements:,}  {elements / sum(SIZES.values()):.1%}" in row


def test_blocks_are_as_long_as_what_they_stand_for() -> None:
    bar = layout(1).draw(130, colour=False).splitlines()[0].removeprefix("rank 0 ")
    starts = [place for place, character in enumerate(bar) if character == "│"]
    columns = len(bar.rpartition(" 11,584")[0].rstrip())
    assert bar.startswith("│embedding.weight")
    assert starts[1] / columns == pytest.approx(6400 / 11584, abs=0.02)
    assert "blocks.0.down.weight" in bar


def test_a_cut_parameter_has_one_colour_and_says_how_much_of_it_a_rank_owns() -> None:
    drawn = layout(2, {"large": 12800, "small": 640})
    assert len(drawn.cut_params) == 1
    plain = drawn.draw(90, colour=False)
    assert sum(int(found) for found in re.findall(r"large (\d+)%", plain)) == 100
    assert "is a part of a parameter" in plain
    backgrounds = re.findall(r"\x1b\[48;5;(\d+)m\x1b\[30m▏large", drawn.draw(90, colour=True))
    assert len(backgrounds) == 2
    assert len(set(backgrounds)) == 1


def test_colours_only_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in layout(2).draw(80)  # pytest's output is not a terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b" in layout(2).draw(80)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in layout(2).draw(80)


def test_many_ranks_are_not_all_drawn_and_a_layout_may_have_no_elements() -> None:
    lines = layout(40).draw(100).splitlines()
    assert sum(line.lstrip().startswith("rank ") for line in lines) == MOST_ROWS
    assert "… and 24 more ranks" in lines
    for sizes in ({}, {"empty": 0}):
        assert layout(2, sizes).draw(80).splitlines()[0].startswith("rank 0")
