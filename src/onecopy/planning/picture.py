"""Draws the memory of every way of training as stacked bars. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from onecopy.planning.advice import GB, USABLE
from onecopy.planning.comparison import Row

COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#f2a541",
    "state": "#72b7a1",
    "master weights": "#b279a2",
    "buffers": "#bbbbbb",
    "activations": "#e8e8e8",
}


def draw(rows: Sequence[Row], activations: float | None, memory: float | None, title: str, path: Path) -> None:
    """Draw one bar for each way of training, and a line at the memory that can be used.

    Args:
        rows: the ways of training.
        activations: bytes of activations, if known.
        memory: bytes of an accelerator, if known.
        title: the title of the picture.
        path: the file to write; its suffix tells the format.
    """
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [row.name for row in rows]
    left = [0.0] * len(rows)
    for kind, colour in COLOURS.items():
        widths = [(activations or 0.0 if kind == "activations" else row.memory[kind]) / GB for row in rows]
        if any(widths):
            axes.barh(names, widths, left=left, color=colour, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.annotate(f" {total:.1f}", (total, place), va="center", fontsize=9)
    if memory is not None:
        axes.axvline(USABLE * memory / GB, color="#aa3333", linestyle="--", linewidth=1)
        axes.annotate(" usable memory", (USABLE * memory / GB, -0.48), color="#aa3333", fontsize=8, va="bottom")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max([*left, USABLE * (memory or 0.0) / GB]))
    axes.set_xlabel("GB per rank")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
