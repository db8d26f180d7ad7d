"""The picture at the end of a training: bytes per rank by kind, and the losses. It needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from onecopy.demo.report import WITHOUT, largest_difference, memory_rows
from onecopy.demo.settings import Result
from onecopy.planning.memory_report import COLOURS, KINDS

MB = 1e6
LINES = ("#000000", "#e69f00", "#009e73", "#0072b2")
MARKS = ("", "o", "s", "^")
"""A colour and a mark for the loss of each training."""


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw memory and losses of some trainings side by side.

    Args:
        results: the trainings.
        path: the file to write; its suffix tells the format.
    """
    figure = Figure(figsize=(11.5, 2.6 + 0.5 * len(memory_rows(results))), layout="constrained")
    memory, losses = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_memory(memory, results)
    _draw_losses(losses, results)
    first = results[0]
    settings = f"{first.settings['optimizer']}, {first.settings['precision']}"
    figure.suptitle(
        f"A small GPT with {first.elements / 1e6:.1f}M parameters on {first.ranks} ranks, {settings}", fontsize=12
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_memory(axes: Any, results: Sequence[Result]) -> None:
    rows = memory_rows(results)
    whole = sum(rows[0][1].values())
    left = [0.0] * len(rows)
    names = [name.replace(", ", "\n") for name, _ in rows]
    for kind in KINDS:
        widths = [memory[kind] / MB for _, memory in rows]
        if not any(widths):
            continue
        bars = axes.barh(names, widths, left=left, height=0.68, color=COLOURS[kind])
        if rows[0][0] == WITHOUT:
            bars[0].set_alpha(0.45)
        left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, width in enumerate(widths):
            if width > 0.06 * whole / MB:
                ink = "black" if kind == "gradients" or (place == 0 and rows[0][0] == WITHOUT) else "white"
                axes.text(
                    left[place] - width / 2, place, f"{width:.1f}", ha="center", va="center", color=ink, fontsize=9
                )
    for place, total in enumerate(left):
        text = f"{total:.1f} MB" if not place else f"{total:.1f} MB, {total * MB / whole:.0%}"
        axes.annotate(text, (total, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * max(left))
    axes.set_xlabel("MB on the rank with the most")
    axes.set_title("Memory per rank", loc="left", fontsize=11, pad=24)
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS if any(memory[kind] for _, memory in rows)]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=4, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(axes: Any, results: Sequence[Result]) -> None:
    compared = len(results) > 1
    for place, result in enumerate(results):
        steps = range(1, len(result.losses) + 1)
        # Equal curves hide each other: the first is wide, and the others have marks in different places.
        base = place == 0 and compared
        axes.plot(
            steps,
            result.losses,
            color=LINES[place % len(LINES)],
            linewidth=4 if base else 1,
            alpha=0.3 if base else 1,
            marker="" if base or not compared else MARKS[place % len(MARKS)],
            markevery=(len(steps) // 20 * place // 2, max(1, len(steps) // 10)),
            markersize=6,
            label=result.name,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, the mean of all ranks")
    axes.set_title("Loss", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if compared:
        most = max(largest_difference(result, results[0]) for result in results[1:])
        title = "equal in every step" if most == 0 else f"largest difference {most:.1g}"
        axes.legend(frameon=False, fontsize=9, loc="upper right", title=title, alignment="left")
