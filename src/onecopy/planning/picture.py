"""Draws the memory of every way of training as stacked bars. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from onecopy.layout import Layout
from onecopy.layout.drawing import MOST_ROWS
from onecopy.layout.picture import draw_rows
from onecopy.planning import memory_report
from onecopy.planning.advice import USABLE, unit_of
from onecopy.planning.comparison import Row

COLOURS = {**memory_report.COLOURS, "buffers": "#999999", "activations": "#d9d9d9"}
"""A colour for each kind of memory, from a palette that people with any kind of colour vision tell apart."""

WIDTH = 9.0
"""The width of a picture, in inches."""


def draw(
    rows: Sequence[Row],
    activations: float | None,
    memory: float | None,
    title: str,
    path: Path,
    layout: Layout | None = None,
) -> None:
    """Draw one bar for each way of training, and a line at the memory that can be used.

    Args:
        rows: the ways of training.
        activations: bytes of activations, if known.
        memory: bytes of an accelerator, if known.
        title: the title of the picture.
        path: the file to write; its suffix tells the format.
        layout: a layout to draw below, or None.
    """
    heights = [0.42 * len(rows) + 1.5]
    if layout is not None:
        heights.append(0.42 * min(layout.world_size, MOST_ROWS) + 1.3)
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _draw_memory(axes[0], rows, activations, memory)
    axes[0].set_title(title, fontsize=11, loc="left", pad=26)
    if layout is not None:
        draw_rows(axes[1], layout.blocks_per_rank, len(layout.params), WIDTH - 0.8)
        axes[1].set_title(f"\nlevel 1: {str(layout).partition(chr(10))[0]}", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Any, rows: Sequence[Row], activations: float | None, memory: float | None) -> None:
    unit, scale = unit_of(rows)
    left = [0.0] * len(rows)
    for kind, colour in COLOURS.items():
        widths = [(activations or 0.0 if kind == "activations" else row.memory[kind]) / scale for row in rows]
        if any(widths):
            axes.barh([row.name for row in rows], widths, left=left, height=0.72, color=colour, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    usable = None if memory is None else USABLE * memory / scale
    for place, total in enumerate(left):
        axes.annotate(f"{total:.3g}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    if usable is not None:
        axes.axvline(usable, color="#d55e00", linestyle="--", linewidth=1.2, label="usable memory")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max([*left, usable or 0.0]))
    axes.set_xlabel(f"{unit} on the rank with the most")
    bars = [patch for patch in axes.containers if patch.get_label() in COLOURS]
    axes.legend(handles=[*bars, *axes.get_lines()], fontsize=9, ncols=7, loc="lower left", bbox_to_anchor=(-0.01, 1),
                frameon=False, columnspacing=1.2, handlelength=1.2)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
