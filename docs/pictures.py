"""Draw the pictures of the pages about levels and about how it works: ``python docs/pictures.py``.

Ownership comes from the library's own policies and memory from the ZeRO paper's formula, so no figure is typed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from onecopy.layout import ParamSpec
from onecopy.layout.policies import extend

HERE = Path(__file__).parent
RANKS = ("#4c78a8", "#f2a541", "#72b7a1", "#d1495b")
"""The colours of ranks 0 to 3, in every picture."""

EMPTY, LINE, TEXT = "#f1f2f4", "#8a9099", "#333333"
KINDS = {"parameters": "#4c78a8", "gradients": "#f2a541", "optimizer state": "#72b7a1"}
ELEMENTS, MANY = 7.5e9, 64
"""The example of the ZeRO paper: 7.5 billion parameters on 64 ranks, in 16 bits with 12 bytes of state each."""
PARAMETER, GRADIENT, STATE = 2, 2, 12


def save(figure: Figure, name: str) -> None:
    """Write a picture as SVG, without a date, so that equal pictures are equal files."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def memory() -> Figure:
    """Draw the memory of each level for the example of the ZeRO paper."""
    ways = {
        "plain DDP": (1, 1, 1),
        "level 1: ZeroRedundancyOptimizer": (1, 1, MANY),
        "level 2: with reduce_scatter_hook": (1, 1, MANY),
        "level 3: ShardedDataParallel": (1, MANY, MANY),
        "FSDP2": (MANY, MANY, MANY),
    }
    figure = Figure(figsize=(8, 3.0), layout="constrained")
    axes = figure.subplots()
    names = list(reversed(ways))
    left = [0.0] * len(names)
    for place, (kind, colour) in enumerate(KINDS.items()):
        each = (PARAMETER, GRADIENT, STATE)[place]
        widths = [each * ELEMENTS / ways[name][place] / 1e9 for name in names]
        axes.barh(names, widths, left=left, color=colour, label=kind, edgecolor="white", linewidth=0.4)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.1f} GB", va="center", fontsize=9, color=TEXT)
    axes.set_xlabel(f"GB per rank, without activations and buffers: {ELEMENTS / 1e9:g}B parameters, {MANY} ranks")
    axes.set_xlim(0, 1.12 * max(left))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def box(axes: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "") -> None:
    """Draw a filled box with a text."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.2))
    if text:
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color="white")


def bare(axes: Any, width: float, height: float) -> None:
    """Remove the axes and set the range of the picture."""
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_aspect("equal")
    axes.axis("off")


def kept() -> Figure:
    """Draw which quarter of parameters, gradients and state each of four ranks keeps, at each level."""
    ways = {"plain DDP": "aaa", "levels 1 and 2": "aao", "level 3": "aoo", "FSDP2": "ooo"}
    figure = Figure(figsize=(9, 4.0), layout="constrained")
    all_axes = figure.subplots(1, len(ways))
    for axes, (title, pattern) in zip(all_axes, ways.items(), strict=True):
        bare(axes, 5.2, 7.2)
        axes.set_title(title, fontsize=10, color=TEXT)
        for row, (kind, mode) in enumerate(zip(KINDS, pattern, strict=True)):
            base = 4.9 - row * 2.3
            axes.text(0, base + 1.45, kind, fontsize=8, color=TEXT)
            for group_rank in range(4):
                x = group_rank * 1.3
                for part in range(4):
                    full = mode == "a" or part == group_rank
                    box(axes, x, base + (3 - part) * 0.32, 1.1, 0.32, RANKS[part] if full else EMPTY)
        for group_rank in range(4):
            axes.text(
                group_rank * 1.3 + 0.55, -0.1, f"rank {group_rank}", ha="center", va="top", fontsize=7, color=TEXT
            )
    return figure


SHAPES = {"embedding": (1000, 64), "attention": (192, 64), "output": (64, 64), "up": (256, 64), "down": (64, 256)}
"""A model in which one embedding is larger than all other parameters together."""


def specs() -> list[ParamSpec]:
    """Return the parameters of the small model."""
    found = []
    for index, (name, shape) in enumerate(SHAPES.items()):
        empty = torch.empty(shape, device="meta")
        found.append(ParamSpec(index, name, shape, empty.stride(), torch.float32))
    return found


def owners(axes: Any, title: str, shards: Sequence[tuple[int, int, int, int]]) -> None:
    """Draw which rank owns which range.

    Args:
        axes: where to draw.
        title: the title.
        shards: the parameter, start, stop and owner of each range.
    """
    sizes = [rows * columns for rows, columns in SHAPES.values()]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    for param, start, stop, owner in shards:
        axes.barh(0, stop - start, left=offsets[param] + start, color=RANKS[owner], edgecolor="white", linewidth=0.8)
    for name, offset, size in zip(SHAPES, offsets, sizes, strict=True):
        axes.text(offset + size / 2, 0.47, name, ha="center", va="bottom", fontsize=8, color=TEXT)
        axes.plot([offset, offset], [-0.4, 0.52], color=LINE, linewidth=0.8)
    held = [sum(stop - start for _, start, stop, owner in shards if owner == each) for each in range(4)]
    percent = ", ".join(f"rank {each}: {count / sum(sizes):.0%}" for each, count in enumerate(held))
    axes.set_title(f"{title}  ({percent})", fontsize=9, loc="left", color=TEXT)
    axes.set_ylim(-0.5, 0.8)
    axes.axis("off")


def ownership() -> Figure:
    """Draw the owners of a small model on four ranks: whole parameters, and both policies of onecopy."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    rows = figure.subplots(3)
    for axes, title, policy, splittable in (
        (rows[0], "whole parameters only", "parameter", False),
        (rows[1], 'shard_by="parameter", the default', "parameter", True),
        (rows[2], 'shard_by="element"', "element", True),
    ):
        layout = extend(None, specs(), 4, policy, splittable)
        owners(axes, title, [(shard.param, shard.start, shard.stop, shard.owner) for shard in layout.shards])
    return figure


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draw an arrow."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, color=colour, linewidth=0.9))


def collective(axes: Any, title: str, before: Callable[[int, int], str], after: Callable[[int, int], str]) -> None:
    """Draw what four ranks hold before and after a collective.

    Args:
        axes: where to draw.
        title: its name.
        before: the colour of a part on a rank before it.
        after: the colour of a part on a rank after it.
    """
    bare(axes, 7.6, 5.0)
    axes.set_title(title, fontsize=10, color=TEXT)
    for group_rank in range(4):
        y = 3.6 - group_rank * 1.1
        axes.text(-0.1, y + 0.4, f"rank {group_rank}", ha="right", va="center", fontsize=7, color=TEXT)
        for part in range(4):
            box(axes, part * 0.75, y, 0.75, 0.8, before(group_rank, part))
            box(axes, 4.6 + part * 0.75, y, 0.75, 0.8, after(group_rank, part))
        arrow(axes, (3.15, y + 0.4), (4.45, y + 0.4), LINE)


def collectives() -> Figure:
    """Draw reduce-scatter and all-gather: together they are the all-reduce of plain DDP."""
    pale = ("#bccde0", "#fae0b8", "#cfe5dd", "#eebbc2")
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    own = lambda group_rank, part: RANKS[part] if part == group_rank else EMPTY  # noqa: E731 - one of four colourings
    collective(left, "all-reduce (DDP)", lambda _, part: pale[part], lambda _, part: RANKS[part])
    collective(middle, "reduce-scatter (gradients)", lambda _, part: pale[part], own)
    collective(right, "all-gather (parameters)", own, lambda _, part: RANKS[part])
    return figure


STEPS = {
    "plain DDP": [("backward", 0, 4, False), ("all-reduce gradients", 1.2, 4, True), ("update all", 5.2, 2, False)],
    "level 1": [
        ("backward", 0, 4, False),
        ("all-reduce gradients", 1.2, 4, True),
        ("update 1/N", 5.2, 1, False),
        ("all-gather", 6.2, 2, True),
    ],
    "level 2": [
        ("backward", 0, 4, False),
        ("reduce-scatter", 2.4, 2, True),
        ("update 1/N", 4.4, 1, False),
        ("all-gather", 5.4, 2, True),
    ],
    "level 3": [
        ("backward", 0, 4, False),
        ("reduce-scatter", 2.4, 2, True),
        ("update 1/N", 4.4, 1, False),
        ("all-gather", 4.7, 2, True),
    ],
}
"""The parts of a step: a text, a schematic start and length, and whether it is communication."""


def steps() -> Figure:
    """Draw the order of computation and communication in one step of each level."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    for row, (name, parts) in enumerate(STEPS.items()):
        y = 3 * (len(STEPS) - 1 - row)
        axes.text(-0.3, y + 0.95, name, ha="right", va="center", fontsize=9, color=TEXT)
        for text, start, length, sends in parts:
            low = y if sends else y + 1.0
            style = "round,pad=0,rounding_size=0.1"
            colour = "#d98f2b" if sends else "#4c78a8"
            axes.add_patch(
                FancyBboxPatch((start, low), length, 0.8, boxstyle=style, facecolor=colour, edgecolor="white")
            )
            axes.text(start + length / 2, low + 0.4, text, ha="center", va="center", fontsize=7, color="white")
    axes.set_xlim(-1.3, 9)
    axes.set_ylim(-0.3, 11.2)
    axes.axis("off")
    axes.set_title(
        "one step, time from left to right (not to scale): computation above, communication below", fontsize=9
    )
    return figure


def main() -> None:
    """Draw all pictures."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "onecopy", "svg.fonttype": "none"})
    save(memory(), "picture-memory")
    save(kept(), "picture-kept")
    save(ownership(), "picture-ownership")
    save(collectives(), "picture-collectives")
    save(steps(), "picture-steps")


if __name__ == "__main__":
    main()
