"""Ranks that are killed or stopped at random moments of a step or of a save: the others must raise soon."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.loops import draw, row_of
from tests.faults.rows import Row
from tests.support.failing_loops import SIGNALS, TIMEOUT, kinds_of

TIMES = {"SIGKILL": 3, "SIGSTOP": 2}
"""How often each rank of each group is meant with a count of 100."""

NAMES = {
    "parameter": "level 1",
    "reduce-scatter": "level 2",
    "overlap": "overlapped step",
    "sharded data parallel": "level 3",
    "save": "save",
}


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for each signal and each kind of training."""
    for case in SIGNALS:
        for kind in kinds_of(case):
            row = row_of(f"{case}, {NAMES[kind]}", draw(case, [kind], TIMES[case] * count, seed))
            note = f"timeout of {TIMEOUT:.0f} s" if case == "SIGSTOP" else ""
            yield Row(**{**vars(row), "note": note})
