"""Run a whole benchmark: start the processes of every measurement, and yield its results as rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from onecopy.bench import launching, planning_time
from onecopy.bench.models import MODELS, Sizes, elements_of
from onecopy.bench.summaries import Row
from onecopy.bench.variants import ALONE, ALWAYS, MEMORY_ONLY

GROWN = ("onecopy", "onecopy, bucket views", "onecopy, ShardedDataParallel")
"""Variants whose memory is measured for models of several sizes."""

ROUNDS_PER_LAUNCH = 5
"""The number of rounds after which the ranks are started anew, so that chance effects of one launch average out."""

WARM_UP_STEPS = 3
"""Steps before the first timed step; the first launch makes more, because it compares parameters."""

BYTES_PER_ELEMENT = 16
"""The average memory of a variant on a rank, per element: parameters, gradients, state, buffers."""


PARTS = ("time", "memory", "sizes", "growth", "save")
"""The measurements of a benchmark."""

HOST_TIME_ROUNDS = 5
"""Rounds of the host time of ``step()`` for each round that was asked for: they are short, and the least counts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The variants, numbers of ranks, models and links of a benchmark, and the parts that are measured."""

    names: Sequence[str]
    ranks: Sequence[int] = (2, 4)
    models: Sequence[str] = ("reference",)
    links: Sequence[str] = ("",)
    rounds: int = 20
    parts: Sequence[str] = PARTS
    sizes: dict[str, int] = field(default_factory=dict)

    def sizes_of(self, model: str) -> Sizes:
        """Return the sizes of a model, with the user's changes."""
        return Sizes(**{**asdict(MODELS[model]), **self.sizes})

    def name_of(self, model: str) -> str:
        """Return the name of a model in rows, which includes the user's changes of its sizes."""
        return f"{model} ({', '.join(f'{key} {size}' for key, size in self.sizes.items())})" if self.sizes else model


def heats(names: Sequence[str], ranks: int, sizes: Sizes) -> list[list[str]]:
    """Divide the variants into heats that fit into memory; each heat includes the variants of ``ALWAYS``."""
    each = BYTES_PER_ELEMENT * sum(elements_of(asdict(sizes))) * ranks
    room = max(len(ALWAYS) + 1, int(0.85 * launching.free_bytes() / each))
    others = [name for name in names if name not in ALWAYS]
    size = max(1, room - len(ALWAYS))
    groups = [others[start : start + size] for start in range(0, len(others), size)] or [[]]
    return [[*ALWAYS, *group] for group in groups]


def run(plan: Plan, tell: Callable[[str], object]) -> Iterator[Row]:
    """Run all measurements and yield their rows; ``tell`` is called with a description of each before it starts."""
    if "time" in plan.parts:
        yield from _times(plan, tell)
    if "memory" in plan.parts:
        yield from _memories(plan, tell)
    if "save" in plan.parts:
        tell("gathering the state and saving")
        model = plan.models[0]
        arguments = ["save", *_about(plan, model, plan.names), "--rounds", "3"]
        rows, error = launching.run(plan.ranks[0], arguments)
        yield from (
            {**row, "model": plan.name_of(model)} for row in rows or [_failed("save", "all", plan.ranks[0], error)]
        )
    if "sizes" in plan.parts:
        yield from _grown(plan, tell)
    if "growth" in plan.parts:
        tell("planning")
        yield from planning_time.planning()
        tell("the host time of a step")
        rows, error = launching.run(2, ["overhead", "--rounds", str(HOST_TIME_ROUNDS * plan.rounds)])
        yield from rows or [_failed("overhead", "all", 2, error)]


def _about(plan: Plan, model: str, names: Sequence[str]) -> list[str]:
    """Return the worker's arguments for some variants and the sizes of a model."""
    return ["--names", json.dumps(list(names)), "--sizes", json.dumps(asdict(plan.sizes_of(model)))]


def _failed(kind: str, variant: str, ranks: int, error: str) -> Row:
    """Return the row of a measurement that failed."""
    return {"kind": kind, "variant": variant, "ranks": ranks, "error": error or "no output", "failed": True}


def _times(plan: Plan, tell: Callable[[str], object]) -> Iterator[Row]:
    """Measure step times for every model, link and number of ranks."""
    for model in plan.models:
        for link in plan.links:
            for ranks in plan.ranks:
                groups = heats(plan.names, ranks, plan.sizes_of(model))
                for number, names in enumerate(groups):
                    heat = f"{model}, {ranks} ranks, {link or 'loopback'}, heat {number + 1}/{len(groups)}"
                    about = {"model": plan.name_of(model), "link": link, "heat": number}
                    launches = []
                    for start in range(0, plan.rounds, ROUNDS_PER_LAUNCH):
                        tell(f"step times: {heat}, round {start + 1}/{plan.rounds}")
                        rounds = ["--rounds", str(min(ROUNDS_PER_LAUNCH, plan.rounds - start))]
                        warm_up = ["--warm-up", str(WARM_UP_STEPS)] if start else []
                        arguments = ["time", *_about(plan, model, names), *rounds, *warm_up]
                        rows, error = launching.run(ranks, arguments, link or None)
                        launches.append(rows or [_failed("failed heat", ", ".join(names), ranks, error)])
                    for row in merged(launches):
                        yield {**about, **row}


def merged(launches: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of several launches into one row per variant or primitive.

    Lists are concatenated. Other values are taken from the first launch, and the error from the first that failed.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in (row for rows in launches for row in rows):
        known = found.setdefault((row["kind"], row.get("variant") or row["name"]), {})
        lists = {key: [*known.get(key, []), *value] for key, value in row.items() if isinstance(value, list)}
        error = {"error": known.get("error") or row["error"]} if "error" in row else {}
        known.update({**row, **known, **lists, **error})
    return list(found.values())


def _memories(plan: Plan, tell: Callable[[str], object]) -> Iterator[Row]:
    """Measure the memory of every variant, each in its own processes."""
    model = plan.models[0]
    names = [name for name in plan.names if name != ALONE] + list(MEMORY_ONLY)
    for ranks in plan.ranks:
        for name in names:
            tell(f"memory: {name}, {ranks} ranks")
            rows, error = launching.run(ranks, ["memory", *_about(plan, model, [name])])
            for row in rows or [_failed("memory", name, ranks, error)]:
                yield {**row, "model": plan.name_of(model)}


def _grown(plan: Plan, tell: Callable[[str], object]) -> Iterator[Row]:
    """Measure the memory of models of growing depth."""
    sizes = plan.sizes_of(plan.models[0])
    for depth in (sizes.depth, 4 * sizes.depth, 16 * sizes.depth):
        grown = replace(plan, sizes={**plan.sizes, "depth": depth})
        for name in GROWN:
            tell(f"memory: {name}, {depth} blocks")
            rows, error = launching.run(2, ["memory", *_about(grown, plan.models[0], [name])])
            for row in rows or [_failed("size", name, 2, error)]:
                yield {**row, "kind": "size"}


def read(path: Path) -> list[Row]:
    """Read the rows of an earlier run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(row: dict[str, Any], path: Path) -> None:
    """Append a row to a file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
