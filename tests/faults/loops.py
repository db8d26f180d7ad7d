"""Faults in a training loop inside ``fail_together``: all ranks must raise soon, and name the cause."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.faults.rows import Row
from tests.support import different_modes
from tests.support.different_modes import MODES
from tests.support.failing_loops import BLOCKED, CASES, SIGNALS, SLOW, kinds_of, outcomes, problem_of
from tests.support.harness import RanksFailedError

WORLD_SIZES = (2, 3, 4)

LATEST = {"save": 0.06}
"""The latest time of a signal after the beginning of a step, in seconds, by the kind of training."""

LATEST_IN_A_STEP = 0.015

AT_ONCE = 2
"""Experiments that run at the same time."""

AT_ONCE_IF_WAITING = 4
"""The same if their ranks only wait most of the time."""


@dataclass(frozen=True)
class Experiment:
    """A fault on one rank of a group, in one kind of training; ``delay`` is the time of a signal in its step."""

    case: str
    kind: str
    world_size: int
    failing_rank: int
    delay: float

    def run(self) -> tuple[float, str]:
        """Return the longest time to an error, and what was wrong."""
        arguments = {"kind": self.kind, "case": self.case, "failing_rank": self.failing_rank, "delay": self.delay}
        try:
            found = outcomes(self.world_size, **arguments)
        except RanksFailedError as error:
            return 0.0, f"{self}: {error}"
        problem = problem_of(self.case, self.failing_rank, found)
        # The failing rank may be slow itself, and ends alone after it has left the loop.
        seconds = [each.seconds for rank, each in enumerate(found) if each and rank != self.failing_rank]
        return max(seconds), f"{self}: {problem}" if problem else ""


def draw(case: str, kinds: Sequence[str], count: int, seed: int) -> list[Experiment]:
    """Draw experiments: with a count of 100, each kind of training with each rank of 2, 3 and 4 occurs once."""
    source = random.Random(f"{seed} {case} {kinds}")
    places = [(size, rank) for size in WORLD_SIZES for rank in range(size)]
    combinations = list(itertools.product(kinds, places))
    number = math.ceil(len(combinations) * count / 100)
    chosen: list[tuple[str, tuple[int, int]]] = []
    while len(chosen) < number:
        chosen += source.sample(combinations, min(len(combinations), number - len(chosen)))
    return [
        Experiment(case, kind, size, rank, source.uniform(0, LATEST.get(kind, LATEST_IN_A_STEP)))
        for kind, (size, rank) in chosen
    ]


def row_of(fault: str, experiments: Sequence[Experiment]) -> Row:
    """Run experiments, some of them at the same time."""
    waits = experiments[0].case in (*BLOCKED, *SLOW, *SIGNALS)
    with ThreadPoolExecutor(AT_ONCE_IF_WAITING if waits else AT_ONCE) as executor:
        found = list(executor.map(Experiment.run, experiments))
    problems = [problem for _, problem in found if problem]
    return Row(fault, len(found), len(found) - len(problems), max(seconds for seconds, _ in found), "", problems)


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for each way in which a loop fails, without signals of the system."""
    for case in [*CASES, *SLOW]:
        if case not in SIGNALS:
            yield row_of(case, draw(case, kinds_of(case), count, seed))
    for mode in MODES:
        yield mode_row(mode, count)


def mode_row(mode: str, count: int) -> Row:
    """Train in different modes: with a count of 100, on 2, 3 and 4 ranks."""
    chosen = WORLD_SIZES[: math.ceil(len(WORLD_SIZES) * count / 100)]
    found = [different_modes.problem_of(mode, world_size) for world_size in chosen]
    problems = [problem for _, problem in found if problem]
    worst = max(seconds for seconds, _ in found)
    return Row(f"modes: {mode}", len(found), len(found) - len(problems), worst, "", problems)
