"""Draws which parameters each rank owns as a picture. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onecopy.layout.drawing import MOST_ROWS, Block, shortened

POINTS_PER_CHARACTER = 4.3
"""The width of a character of the labels, which have 7 points."""

MB = 1e6


def draw_rows(axes: Any, rows: Sequence[Sequence[Block]], params: int, width: float) -> None:
    """Draw one bar for each rank, with one block for each parameter of which it owns something.

    A block's colour is the place of its parameter in the model, from the first to the last. Parts of parameters are
    hatched.

    Args:
        axes: axes of matplotlib.
        rows: for each rank, the blocks that it owns, in the order of the parameters.
        params: the number of parameters.
        width: the width of the axes in inches.
    """
    from matplotlib import colormaps

    colours, drawn = colormaps["cividis"], rows[:MOST_ROWS]
    most = max((sum(block.nbytes for block in row) for row in drawn), default=0) / MB or 1.0
    for place, row in enumerate(drawn):
        left = 0.0
        for block in row:
            length, position = block.nbytes / MB, block.param / max(1, params - 1)
            colour = colours(0.12 + 0.88 * position)
            axes.barh(
                place, length, left=left, height=0.78, color=colour, edgecolor="white", linewidth=0.8,
                hatch="////" if block.is_part else None, hatch_linewidth=0.35,
            )  # fmt: skip
            room = int(length / most * width * 72 * 0.97 / POINTS_PER_CHARACTER)
            label = shortened(block.label, room)
            if label:
                ink = "white" if position < 0.5 else "black"
                box = {"facecolor": colour, "edgecolor": "none", "pad": 1.2} if block.is_part else None
                axes.text(left + length / 2, place, label, ha="center", va="center", fontsize=7, color=ink, bbox=box)
            left += length
    axes.set_yticks(range(len(drawn)), [f"rank {group_rank}" for group_rank in range(len(drawn))])
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.005)
    axes.set_xlabel("MB of parameters that a rank owns" + _note(rows))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def save(rows: Sequence[Sequence[Block]], params: int, title: str, path: str) -> None:
    """Write a picture of a layout; the suffix of the path tells the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 0.42 * min(len(rows), MOST_ROWS) + 1.5), layout="constrained")
    axes = figure.subplots()
    draw_rows(axes, rows, params, 8.2)
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def _note(rows: Sequence[Sequence[Block]]) -> str:
    notes = ["colour: from the first parameter (dark) to the last"]
    if any(block.is_part for row in rows[:MOST_ROWS] for block in row):
        notes.append("hatched: a part of a parameter")
    if len(rows) > MOST_ROWS:
        notes.append(f"{len(rows) - MOST_ROWS:,} more ranks are not drawn")
    return "\n" + "; ".join(notes)
