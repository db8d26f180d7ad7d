"""The tables of collectives per step in docs/accelerators.md: ``python -m tests.planning.table FILE`` writes them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from onecopy.planning.collectives import Way, collectives_of
from onecopy.planning.models import Model, Shapes, specs_of

RANKS = (2, 3, 8, 64, 512)
WAYS = {"level 1": Way.LEVEL_1, "overlap hooks": Way.OVERLAP, "level 2": Way.LEVEL_2, "level 3": Way.LEVEL_3}

BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
"""The generated tables lie between these lines."""


def gpt(blocks: int, width: int, vocabulary: int, positions: int, dtype: torch.dtype = torch.float32) -> Model:
    """Return a GPT with biases whose head is tied to its embedding."""
    shapes: Shapes = {"embedding": (vocabulary, width), "positions": (positions, width)}
    block: Shapes = {
        "norm1": (width,),
        "qkv": (3 * width, width),
        "out": (width, width),
        "norm2": (width,),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    layers = {f"blocks.{number}.{name}": shape for number in range(blocks) for name, shape in block.items()}
    for name, shape in {**layers, "norm": (width,)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return Model(specs_of(shapes, dtype))


def gpt_xl() -> Model:
    """Return a GPT of 1.3B elements in bf16: 24 blocks, 292 parameters."""
    return gpt(24, 2048, 50257, 2048, torch.bfloat16)


def tables() -> str:
    """The generated part of the page as Markdown."""
    model = gpt(12, 768, 50257, 1024)
    lines = [["calls / operations, by ranks", *map(str, RANKS)], ["---", *["---:"] * len(RANKS)]]
    lines.append(["DDP, nothing sharded", *(_counts(Way.DDP, model, ranks) for ranks in RANKS)])
    for name, way in WAYS.items():
        for suffix, chosen in (("", model), (", whole parameters (Muon)", replace(model, splittable=False))):
            lines.append([name + suffix, *(_counts(way, chosen, ranks) for ranks in RANKS)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**GPT-2 small: 12 blocks, 148 parameters, fp32, 0.5 GB**\n\n{table}"


def _counts(way: Way, model: Model, ranks: int) -> str:
    """The number of calls, and the number of operations if it is another one."""
    found = collectives_of(way, model, ranks)
    calls, operations = len(found), sum(each.operations for each in found)
    return f"{calls:,}" if calls == operations else f"{calls:,} / {operations:,}"


def write(page: Path, name: str, text: str) -> None:
    """Replace the generated part of a page that has this name."""
    before, begin, rest = page.read_text().partition(BEGIN.format(name))
    _, end, after = rest.partition(END.format(name))
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.format(name)} and {END.format(name)}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


if __name__ == "__main__":
    write(Path(sys.argv[1]), "collectives", tables())
