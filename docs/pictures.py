"""Draw the pictures of the start page and of how it works, and write the table of README.md: ``make pictures``.

Ownership comes from the library's own policies, memory from its planner, and measured figures from docs/benchmarks.md.
So no figure is typed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from onecopy.layout import ParamSpec
from onecopy.layout.policies import extend
from onecopy.planning.comparison import Row, compare
from onecopy.planning.memory import OPTIMIZERS
from onecopy.planning.models import Source

HERE = Path(__file__).parent
RANKS = ("#4c78a8", "#f2a541", "#72b7a1", "#d1495b")
"""The colours of ranks 0 to 3, in every picture."""

EMPTY, LINE, TEXT = "#f1f2f4", "#8a9099", "#333333"
KINDS = ("parameters", "gradients", "optimizer state")
FEW, CARD = 8, 80e9
"""The example of the picture of memory: the number of ranks, and the bytes of one GPU."""

KINDS_OF = {
    "parameters": ["parameters"],
    "gradients": ["gradients"],
    "optimizer state": ["state", "master weights"],
    "buffers": ["buffers"],
}
COLOURS = {"parameters": "#4c78a8", "gradients": "#f2a541", "optimizer state": "#59a14f", "buffers": "#9c8ec4"}
WAYS = {
    "DDP": "plain DDP",
    "level 1": "level 1: ZeroRedundancyOptimizer (ZeRO-1)",
    "level 2": "level 2: and reduce_scatter_hook (still ZeRO-1)",
    "level 3": "level 3: ShardedDataParallel (ZeRO-2)",
    "FSDP2": "FSDP2 (ZeRO-3)",
}
IN_TABLE = {
    "DDP": ("plain DDP", ""),
    "level 1": ("level 1: `ZeroRedundancyOptimizer` (ZeRO-1)", "1"),
    "level 2": ("level 2: and `reduce_scatter_hook` (still ZeRO-1)", "2"),
    "level 3": ("level 3: `ShardedDataParallel` (ZeRO-2)", "2"),
    "FSDP2": ("[FSDP2](docs/fsdp2.md) (ZeRO-3)", "3, and the saving"),
}
MEASURED = {
    "DDP": "DDP fused, bucket views",
    "level 1": "onecopy, bucket views",
    "level 2": "onecopy, reduce-scatter hook",
    "level 3": "onecopy, ShardedDataParallel, overlap_forward",
    "FSDP2": "FSDP2, no resharding",
}
"""The rows of docs/benchmarks.md that stand for each way."""

COMPARED = {
    "DDP": MEASURED["DDP"],
    "torch's `ZeroRedundancyOptimizer`": "torch's class, bucket views, fused",
    "onecopy, level 1 (`parameters_as_bucket_view=True`)": MEASURED["level 1"],
    "onecopy, level 2": MEASURED["level 2"],
    "onecopy, level 3 (`overlap_forward=True`)": MEASURED["level 3"],
    "FSDP2, no resharding": MEASURED["FSDP2"],
    "DeepSpeed ZeRO-2": "DeepSpeed ZeRO-2",
}

MARKS = ("<!-- table: made by make pictures -->", "<!-- end of the table -->")


def save(figure: Figure, name: str) -> None:
    """Write a picture as SVG, without a date, so that equal pictures are equal files."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def llama_8b() -> Source:
    """Return the parameters of Llama 3.1 8B, which has 32 blocks and its output is not tied to its embedding."""
    width, keys, inner, words = 4096, 1024, 14336, 128256
    block = {
        "q": (width, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, width),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
        "norm1": (width,),
        "norm2": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (words, width)}
    shapes |= {f"{number}.{name}": shape for number in range(32) for name, shape in block.items()}
    shapes |= {"norm": (width,), "output": (words, width)}
    assert sum(prod(shape) for shape in shapes.values()) == 8_030_261_248
    return Source("Llama 3.1 8B", shapes)


def planned() -> list[Row]:
    """Return what ``onecopy plan`` computes for the example, and FSDP2 by the formula of the ZeRO paper."""
    rows = compare(llama_8b(), OPTIMIZERS["adamw"], "bf16-master", FEW)
    ddp = rows[0]
    divided = {kind: value / FEW for kind, value in ddp.memory.items()}
    return [*rows, Row("FSDP2", divided, ddp.sent, 0, 0)]


def memory() -> str:
    """Draw the planned memory of each way as an SVG, which is read on light and on dark pages."""
    rows = planned()
    scale, top, step, left = 560 / (1.04 * rows[0].total), 98, 43, 20
    bottom = top + step * len(rows) - 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 {bottom + 48}" width="600" height="{bottom + 48}" '
        'role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
        f"<title>Memory per rank for Llama 3.1 8B on {FEW} ranks</title>",
        "<style>.card{fill:#fff;stroke:#d0d7de}text{fill:#24292f;font-size:15px;paint-order:stroke;stroke:#fff;stroke-width:4px}.soft{fill:#57606a;font-size:13px}"
        ".limit{stroke:#cf222e}.limited{fill:#cf222e;font-size:13px}"
        "@media(prefers-color-scheme:dark){.card{fill:#161b22;stroke:#30363d}text{fill:#e6edf3;stroke:#161b22}.soft{fill:#9da7b3}"
        ".limit{stroke:#ff7b72}.limited{fill:#ff7b72}}</style>",
        f'<rect class="card" x=".5" y=".5" width="599" height="{bottom + 47}" rx="8"/>',
        f'<text x="{left}" y="30" font-weight="600">Llama 3.1 8B on {FEW} ranks: GB per rank</text>',
        f'<text class="soft" x="{left}" y="51">AdamW, bf16 with float32 master weights, without activations</text>',
    ]
    limit = left + scale * CARD
    parts.append(
        f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top + 14}" y2="{bottom}" stroke-dasharray="4 3"/>'
    )
    x = left
    for kind, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="65" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(f'<text class="soft" x="{x + 17}" y="76">{kind}</text>')
        x += 34 + 7 * len(kind)
    for place, row in enumerate(rows):
        y = top + place * step
        parts.append(f'<text x="{left}" y="{y + 10}">{WAYS[row.name]}</text>')
        parts.append(f'<text x="580" y="{y + 10}" text-anchor="end" font-weight="600">{row.total / 1e9:.1f}</text>')
        x = float(left)
        for kind, colour in COLOURS.items():
            width = scale * sum(row.memory[each] for each in KINDS_OF[kind])
            parts.append(f'<rect x="{x:.1f}" y="{y + 15}" width="{width:.1f}" height="15" fill="{colour}"/>')
            x += width
    parts += [
        f'<text class="limited" x="{limit - 6:.1f}" y="{bottom - 9}" text-anchor="end">'
        f"a GPU of {CARD / 1e9:.0f} GB</text>",
        f'<text class="soft" x="{left}" y="{bottom + 18}">Computed by onecopy plan; FSDP2 by the formula of the ZeRO '
        "paper, without the</text>",
        f'<text class="soft" x="{left}" y="{bottom + 35}">blocks that it gathers for each forward and each backward '
        "pass.</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def measured(name: str) -> dict[str, float]:
    """Return figures of a variant on 4 ranks from docs/benchmarks.md: MB, ratio to DDP's time, and bytes sent."""
    page = (HERE / "benchmarks.md").read_text()
    times = page.split("### Reference model, 4 ranks, plain loopback")[1].split("![")[0]
    memory = page.split("### 4 ranks")[1].split("<!--")[0]
    found = {}
    for table, columns in ((memory, {"between": 3, "peak": 4}), (times, {"time": 3, "sent": 5})):
        (cells,) = [line.split("|") for line in table.splitlines() if line.startswith(f"| {name} |")]
        found |= {each: float(cells[column]) for each, column in columns.items()}
    return found


def comparison() -> str:
    """Return the table of docs/fsdp2.md."""
    lines = [
        "| | MB between steps | MB at the peak | time of a step | bytes sent |",
        "|---|---|---|---|---|",
    ]
    for title, name in COMPARED.items():
        of = measured(name)
        figures = f"{of['between']:.0f} | {of['peak']:,.0f} | {of['time']:.2f} | {of['sent']:.1f}"
        lines.append(f"| {title} | {figures} |")
    return "\n".join(lines)


def table() -> str:
    """Return the table of README.md."""
    lines = [
        "| | lines that change | GB per rank | GB sent per step | measured: MB per rank | measured: time of a step |",
        "|---|---|---|---|---|---|",
    ]
    for row in planned():
        of = measured(MEASURED[row.name])
        name, change = IN_TABLE[row.name]
        sent = f"{row.sent / 1e9:.1f}"
        if row.name == "FSDP2":  # if it keeps the gathered parameters for the backward pass; otherwise by half more
            sent += f" to {1.5 * row.sent / 1e9:.1f}"
        lines.append(f"| {name} | {change} | {row.total / 1e9:.1f} | {sent} | {of['between']:.0f} | {of['time']:.2f} |")
    return "\n".join(lines)


def write_table(page: Path, text: str) -> None:
    """Replace the generated table of a page."""
    before, rest = page.read_text().split(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


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
    ways = {
        "plain DDP": "aaa",
        "levels 1 and 2 (ZeRO-1)": "aao",
        "level 3 (ZeRO-2)": "aoo",
        "FSDP2 (ZeRO-3)": "ooo",
    }
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
    """Draw the owners of a small model on four ranks, with whole and with cut parameters."""
    figure = Figure(figsize=(8.5, 2.5), layout="constrained")
    rows = figure.subplots(2)
    for axes, title, policy, splittable in (
        (rows[0], "whole parameters, for classes such as Muon", "parameter", False),
        (rows[1], "cut parameters, for classes such as Adam", "element", True),
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
    (HERE / "picture-memory.svg").write_text(memory())
    write_table(HERE.parent / "README.md", table())
    write_table(HERE / "fsdp2.md", comparison())
    save(kept(), "picture-kept")
    save(ownership(), "picture-ownership")
    save(collectives(), "picture-collectives")
    save(steps(), "picture-steps")


if __name__ == "__main__":
    main()
