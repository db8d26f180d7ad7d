"""Fail in a training loop inside ``fail_together`` in every way: all ranks must raise soon, and name the cause.

Each experiment draws a fault, a level, 2 to 4 ranks and the rank that fails. The table has one row for each fault: how
often it was tried, how often all ranks raised with the right words, and the longest time that a rank took to raise.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.failing_loops import CASES, SLOW, Outcome, kinds_of, outcomes, problem_of


def main() -> int:
    """Return 1 if a rank did not raise, raised late, or did not name the cause."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=100, help="the number of experiments")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the draw")
    arguments = parser.parse_args()
    console, draw = Console(), random.Random(arguments.seed)
    cases = [*CASES, *SLOW]
    tried: dict[str, list[float]] = defaultdict(list)
    problems: dict[str, list[str]] = defaultdict(list)
    start = time.perf_counter()
    with console.status("") as status:
        for number in range(arguments.count):
            case = cases[number % len(cases)]
            kind, world_size = draw.choice(kinds_of(case)), draw.randint(2, 4)
            failing_rank = draw.randrange(world_size)
            status.update(f"{number + 1} of {arguments.count}: {case}, {kind}, rank {failing_rank} of {world_size}")
            found: list[Outcome | None] = outcomes(world_size, kind=kind, case=case, failing_rank=failing_rank)
            tried[case].append(max(each.seconds for each in found if each is not None))
            problem = problem_of(case, failing_rank, found)
            if problem:
                problems[case].append(f"{case}, {kind}, rank {failing_rank} of {world_size}: {problem}")
    table = Table("fault", "tried", "as it should be", "worst seconds", title=f"seed {arguments.seed}")
    for case, seconds in tried.items():
        table.add_row(case, str(len(seconds)), str(len(seconds) - len(problems[case])), f"{max(seconds):.1f}")
    console.print(table)
    for line in [line for lines in problems.values() for line in lines]:
        console.print(line, markup=False)
    console.print(f"{time.perf_counter() - start:.0f} s")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
