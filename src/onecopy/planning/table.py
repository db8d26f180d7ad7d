"""The tables of collectives per step in docs/accelerators.md. ``python -m onecopy.planning.table FILE`` writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from onecopy.planning.collectives import Collective, Way, collectives_of
from onecopy.planning.estimate import accelerators, communication_seconds
from onecopy.planning.model_shapes import Model, gpt2_small, gpt_xl, wrapped_units
from onecopy.planning.peers import fsdp2_collectives, megatron_collectives

RANKS = (2, 3, 8, 64, 512, 4096)

BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
"""The generated tables lie between these lines."""

Plan = Callable[[int], Sequence[Collective]]


def rows_of(model: Model) -> Iterator[tuple[str, Plan]]:
    """Yield every way of training that is compared: its name, and its collectives for a number of ranks."""

    def of(way: Way, variant: Model = model) -> Plan:
        return lambda ranks: collectives_of(way, variant, ranks)

    whole = replace(model, splittable=False)
    yield "DDP, nothing sharded", of(Way.DDP)
    yield "torch's `ZeroRedundancyOptimizer`", of(Way.TORCH)
    yield "level 1", of(Way.LEVEL_ONE)
    yield "level 1, whole parameters (Muon)", of(Way.LEVEL_ONE, whole)
    yield "overlap hooks", of(Way.OVERLAP)
    yield "overlap hooks, whole parameters (Muon)", of(Way.OVERLAP, whole)
    yield "level 2", of(Way.REDUCE_SCATTER)
    yield "level 2, whole parameters (Muon)", of(Way.REDUCE_SCATTER, whole)
    yield "level 3", of(Way.SHARDED)
    yield "level 3, whole parameters (Muon)", of(Way.SHARDED, whole)
    yield "FSDP2", lambda ranks: fsdp2_collectives(wrapped_units(model.specs), ranks)
    yield "Megatron's distributed optimizer", lambda ranks: megatron_collectives(model.specs, ranks)


def tables() -> str:
    """Return the generated part of the page as Markdown."""
    models = {
        "GPT-2 small: 12 blocks, 148 parameters, fp32, 0.5 GB": gpt2_small(),
        "A GPT of 1.3B elements: 24 blocks, 292 parameters, bf16, 2.6 GB": gpt_xl(),
    }
    parts = []
    for title, model in models.items():
        parts += [f"**{title}**", _table("calls / operations", rows_of(model), _counts)]
    parts += [
        "**Estimated ms of all collectives of a step, the GPT of 1.3B elements**",
        _table("ms, not overlapped", rows_of(gpt_xl()), _milliseconds),
    ]
    return "\n\n".join(parts)


def write(page: Path, name: str, text: str) -> None:
    """Replace the generated part of a page that has this name."""
    before, begin, rest = page.read_text().partition(BEGIN.format(name))
    _, end, after = rest.partition(END.format(name))
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.format(name)} and {END.format(name)}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def _table(corner: str, rows: Iterator[tuple[str, Plan]], cell: Callable[[Sequence[Collective], int], str]) -> str:
    lines = [[f"{corner}, by ranks", *map(str, RANKS)], ["---", *["---:"] * len(RANKS)]]
    lines += [[name, *(cell(plan(ranks), ranks) for ranks in RANKS)] for name, plan in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counts(collectives: Sequence[Collective], _ranks: int) -> str:
    """Return the number of calls, and the number of operations if it is another one."""
    calls, operations = len(collectives), sum(each.operations for each in collectives)
    return f"{calls:,}" if calls == operations else f"{calls:,} / {operations:,}"


def _milliseconds(collectives: Sequence[Collective], ranks: int) -> str:
    return f"{1e3 * communication_seconds(collectives, accelerators(ranks)):,.0f}"


if __name__ == "__main__":
    write(Path(sys.argv[1]), "collectives", tables())
