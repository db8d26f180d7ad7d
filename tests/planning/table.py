"""The tables of collectives per step in docs/accelerators.md: ``python -m tests.planning.table FILE`` writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from onecopy.planning.collectives import Way, collectives_of
from onecopy.planning.models import Model, Shapes, specs_of

RANKS = (2, 3, 8, 64, 512)

BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
"""The generated tables lie between these lines."""


def gpt_shapes(blocks: int, width: int, vocabulary: int, positions: int) -> Shapes:
    """Return the parameter shapes of a GPT with biases whose head is tied to its embedding."""
    block: Shapes = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "out.weight": (width, width),
        "out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    return {
        "embedding": (vocabulary, width),
        "positions": (positions, width),
        **{f"blocks.{number}.{name}": shape for number in range(blocks) for name, shape in block.items()},
        "norm.weight": (width,),
        "norm.bias": (width,),
    }


def gpt2_small() -> Model:
    """Return GPT-2 small in float32: 12 blocks, 148 parameters, 124M elements."""
    return Model(specs_of(gpt_shapes(12, 768, 50257, 1024)))


def gpt_xl() -> Model:
    """Return a GPT of 1.3B elements in bf16: 24 blocks, 292 parameters."""
    return Model(specs_of(gpt_shapes(24, 2048, 50257, 2048), torch.bfloat16))


def rows_of(model: Model) -> Iterator[tuple[str, Way, Model]]:
    """Every way of training that is compared, with its name."""
    whole = replace(model, splittable=False)
    yield "DDP, nothing sharded", Way.DDP, model
    yield "level 1", Way.LEVEL_1, model
    yield "level 1, whole parameters (Muon)", Way.LEVEL_1, whole
    yield "overlap hooks", Way.OVERLAP, model
    yield "overlap hooks, whole parameters (Muon)", Way.OVERLAP, whole
    yield "level 2", Way.LEVEL_2, model
    yield "level 2, whole parameters (Muon)", Way.LEVEL_2, whole
    yield "level 3", Way.LEVEL_3, model
    yield "level 3, whole parameters (Muon)", Way.LEVEL_3, whole


def tables() -> str:
    """The generated part of the page as Markdown."""
    models = {
        "GPT-2 small: 12 blocks, 148 parameters, fp32, 0.5 GB": gpt2_small(),
    }
    parts = []
    for title, model in models.items():
        lines = [["calls / operations, by ranks", *map(str, RANKS)], ["---", *["---:"] * len(RANKS)]]
        lines += [[name, *(_counts(way, chosen, ranks) for ranks in RANKS)] for name, way, chosen in rows_of(model)]
        parts += [f"**{title}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts)


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
