"""The recorded results, and the table that docs/failures.md has of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.faults.rows import Results, Row
from tests.support.paths import ROOT

RECORDED = ROOT / "benchmarks/faults.json"
PAGE = ROOT / "docs/failures.md"
MARKS = "<!-- faults: made by make faults -->", "<!-- end of faults -->"


class Line(NamedTuple):
    """A line of the page."""

    fault: str  # what goes wrong
    rows: str  # a pattern for the names of the rows of which the line is made
    seen: str  # what a person sees
    todo: str = "-"
    time: str = "{}"  # what is measured, with a place for the worst time


LINES = [
    Line(
        "a rank is killed, with `torchrun --max-restarts`",
        "SIGKILL, restarted by torchrun",
        "torchrun starts all ranks again. The run ends as an undisturbed one, bit by bit",
        time="{} until it trains again",
    ),
    Line(
        "a rank is killed during a save",
        "SIGKILL at any point of a save",
        "The launcher ends the job. The older checkpoints have not changed, or the new one is complete",
        "start again: `load` takes the newest complete checkpoint",
        "{} with the restart",
    ),
    Line(
        "a save fails on one rank: a full disk, an error of the disk",
        "disk error at every file operation of a save",
        "`CheckpointError` there. The others raise `PeerFailedError`. The older checkpoints have not changed",
        "make room, save again",
    ),
    Line(
        "a file cannot be read in a load",
        "disk error at every file operation of a load",
        "`load` takes an older checkpoint and warns, or raises `CheckpointError`",
        "load again",
    ),
    Line(
        "several processes save to and load from one directory",
        "loads beside a writer.*|saves of two writers",
        "nothing: each load finds a complete checkpoint",
        time="no error",
    ),
    Line(
        "a damaged checkpoint",
        "random corruption",
        "`load` warns, and takes the newest one that is not damaged",
    ),
    Line(
        "a manifest that an attacker has written",
        "hostile manifests",
        "`CheckpointError`. No file outside the checkpoint is opened",
    ),
    Line(
        "a process exits, normally or not",
        "a process ends.*",
        "its usual exit status. No process hangs or aborts",
        time="{} to its end",
    ),
    Line(
        "the network between two machines fails",
        "two machines, .*",
        "the ranks go on, or raise at the timeout of the process group",
        "start again from a checkpoint; see [clusters](clusters.md#when-a-link-is-cut)",
        "the timeout",
    ),
]


def rows_of(line: Line, results: Results) -> list[Row]:
    """The rows of which a line is made."""
    return [row for row in results.rows if re.fullmatch(line.rows, row.fault)]


def cells_of(line: Line, rows: Sequence[Row]) -> list[str]:
    """The cells of a line."""
    tried, survived = sum(row.tried for row in rows), sum(row.survived for row in rows)
    worst = max((row.seconds for row in rows), default=0.0)
    shown = f"{math.ceil(10 * worst) / 10:.1f} s" if worst < 10 else f"{math.ceil(worst)} s"
    time = line.time.format(shown) if tried else "was not run"
    return [line.fault, line.seen, time, line.todo, f"{survived:,} of {tried:,}" if tried else "-"]


def text_of(results: Results) -> str:
    """The block of the page."""
    said = f"Run with torch {results.torch} and `make faults COUNT={results.count}`."
    cells = [cells_of(line, rows_of(line, results)) for line in LINES]
    header = ["| fault | what you see | after at most | what to do | handled so |", "|---|---|---|---|---|"]
    return "\n".join([said, "", *header, *(f"| {' | '.join(each)} |" for each in cells)])


def block_of(page: str) -> str:
    """The block that a page has."""
    return page.split(MARKS[0])[1].split(MARKS[1])[0].strip("\n")


def record(results: Results) -> None:
    """Write the recorded file and the block of the page; other parts of a run with the same count are kept."""
    old = Results.read(RECORDED) if RECORDED.exists() else results
    if (old.count, old.seed, old.torch) == (results.count, results.seed, results.torch):
        results.parts = {**old.parts, **results.parts}
        results.seconds = {**old.seconds, **results.seconds}
    results.write(RECORDED)
    before, rest = PAGE.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{text_of(results)}\n\n{MARKS[1]}{after}")
