"""Figures computed from the rows of a run: ratios to DDP, a lower bound, predictions of the time model.

Nothing is measured and nothing is shown here. ``Row`` is the type of a row, and ``select`` finds rows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from onecopy.bench.models import elements_of
from onecopy.bench.variants import ALONE, THEIRS, YARDSTICK
from onecopy.planning.collectives import Way
from onecopy.planning.estimate import Job, Machine, step_seconds
from onecopy.planning.model_shapes import Model, specs_of

Row = dict[str, Any]


def runs_in(rows: Iterable[Row]) -> list[tuple[str, int, str]]:
    """Return the model, the number of ranks and the link of each timed run."""
    found = dict.fromkeys((row["model"], row["ranks"], row["link"]) for row in rows if row["kind"] == "time")
    return list(found)


def select(rows: Iterable[Row], kind: str, run: tuple[str, int, str] | None = None) -> list[Row]:
    """Return the rows of one kind, of one run or of all runs."""
    return [
        row for row in rows if row["kind"] == kind and (run is None or (row["model"], row["ranks"], row["link"]) == run)
    ]


def ratios(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of the ratios of two variants, round by round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)
    return low, middle, high


def summaries(rows: Sequence[Row], run: tuple[str, int, str]) -> list[Row]:
    """Return one row per variant of a timed run: times, ratios within its heat, idle time, wire, difference."""
    found = []
    timed = select(rows, "time", run)
    by_heat: dict[int, dict[str, Row]] = {}
    for row in timed:
        by_heat.setdefault(row["heat"], {})[row["variant"]] = row
    seen: set[str] = set()
    for row in timed:
        if row["variant"] in seen:
            continue
        seen.add(row["variant"])
        if row["error"]:
            found.append({"variant": row["variant"], "error": row["error"]})
            continue
        heat = by_heat[row["heat"]]
        low, middle, high = ratios(row["seconds"], heat[YARDSTICK]["seconds"])
        unit = 4 * sum(elements_of(row["sizes"])) * max(1, run[1] - 1)
        found.append(
            {
                "variant": row["variant"],
                "error": "",
                "ms": 1e3 * statistics.median(row["seconds"]),
                "backward_ms": 1e3 * statistics.median(row["backward"]),
                "step_ms": 1e3 * statistics.median(row["step"]),
                "to_ddp": middle,
                "quartiles": [low, high],
                "to_torch": ratios(row["seconds"], heat[THEIRS]["seconds"])[1],
                "idle": statistics.median(row["idle"]),
                "wire": statistics.median(row["wire"]) / unit if row["wire"] else None,
                "difference": row["difference"],
            }
        )
    return found


def bound(rows: Sequence[Row], run: tuple[str, int, str]) -> float:
    """Return a lower bound of the seconds of a step with 1/N of the update, from measurements of the same run.

    It is the longer of two times: moving the bytes, or computing plus the processor time that moving takes.
    """
    alone = next(row for row in select(rows, "time", run) if row["variant"] == ALONE)
    moved, busy = moving(rows, run, ("reduce to owners", "share"))
    computed = statistics.median(alone["backward"]) + statistics.median(alone["step"]) / run[1]
    return float(max(computed + busy * moved, moved))


def primitive(rows: Sequence[Row], run: tuple[str, int, str], name: str, key: str = "seconds") -> float:
    """Return the median time of a primitive in a run, or with the key ``worked`` its median processor time."""
    found = [seconds for row in select(rows, "primitive", run) if row["name"] == name for seconds in row[key]]
    return float(statistics.median(found))


def moving(rows: Sequence[Row], run: tuple[str, int, str], names: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of some primitives, and the part of them in which they keep the cores from computing."""
    seconds = sum(primitive(rows, run, name) for name in names)
    cores = os.cpu_count() or 1
    if run[1] < cores:
        return seconds, 0.0  # gloo's threads run on cores that no rank computes on
    worked = sum(primitive(rows, run, name, "worked") for name in names)
    return seconds, min(1.0, worked * run[1] / cores / seconds)


WAYS = {
    YARDSTICK: Way.DDP,
    THEIRS: Way.TORCH,
    "onecopy": Way.LEVEL_ONE,
    "onecopy, reduce-scatter hook": Way.REDUCE_SCATTER,
    "onecopy, ShardedDataParallel": Way.SHARDED,
    "onecopy, ShardedDataParallel, overlap_forward": Way.SHARDED_OVERLAP,
}


def predictions(rows: Sequence[Row], run: tuple[str, int, str]) -> list[Row]:
    """Return the step times that the time model predicts, next to the measured ones."""
    alone = next(row for row in select(rows, "time", run) if row["variant"] == ALONE)
    counts = elements_of(alone["sizes"])
    model = Model(specs_of({f"parameter {number}": (count,) for number, count in enumerate(counts)}))
    job = Job(model, statistics.median(alone["backward"]), statistics.median(alone["step"]))
    sent = model.nbytes * (run[1] - 1) / run[1]
    found = []
    for summary in summaries(rows, run):
        way = WAYS.get(summary["variant"])
        if way is None or summary["error"]:
            continue
        ours = way not in (Way.DDP, Way.TORCH, Way.LEVEL_ONE)
        seconds, busy = moving(rows, run, ("reduce to owners", "share") if ours else ("all-reduce",))
        predicted = step_seconds(way, job, Machine(run[1], 2 * sent / seconds, busy=busy))
        measured = summary["ms"] / 1e3
        found.append(
            {"variant": summary["variant"], "measured": measured, "predicted": predicted, "off": predicted / measured}
        )
    return found


def title_of(run: tuple[str, int, str]) -> str:
    """Return a description of a run."""
    model, ranks, link = run
    return f"{model} model, {ranks} ranks, {link or 'plain loopback'}"


def host_time_models(rows: Sequence[Row]) -> dict[str, int]:
    """Return the models for which the host time of ``step()`` was measured, each with its number of tensors."""
    return {row["model"]: row["tensors"] for row in select(rows, "overhead") if "tensors" in row}
