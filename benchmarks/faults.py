"""Kill one rank during a save, many times: older checkpoints must stay intact, and no checkpoint may load in part.

SIGKILL ends each rank before, during and after every change to the file system and every exchange among ranks, with
2, 3 and 4 ranks, in blocking and in background saves. After each kill the other ranks must end by themselves. Then
new ranks check every checkpoint, load the newest, compare it bit by bit with an undisturbed run, train on and save. A
count below the number of different kills takes an even sample of them; see ``tests/support/faults_worker.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.faults import WORLD_SIZES, Outcome
from tests.support.faults_sweep import sweep

COLUMNS = ("ranks", "save", "kills", "old", "new", "hangs", "partial loads", "cleared")


def rows(outcomes: list[Outcome]) -> list[list[str]]:
    """Return one row for each number of ranks and kind of save, and one for all of them."""
    kinds = [(size, blocking) for size in WORLD_SIZES for blocking in (True, False)]
    lines = []
    for size, blocking in kinds:
        part = [each for each in outcomes if (each.kill.world_size, each.kill.blocking) == (size, blocking)]
        lines.append([str(size), "blocking" if blocking else "background", *figures(part)])
    return [*lines, ["all", "", *figures(outcomes)]]


def figures(part: list[Outcome]) -> list[str]:
    committed = sum(each.committed for each in part)
    return [
        str(len(part)),
        str(len(part) - committed),
        str(committed),
        str(sum(each.hangs for each in part)),
        str(sum(each.partial_loads for each in part)),
        str(sum(each.cleared for each in part)),
    ]


def main() -> int:
    """Return 1 if a kill did damage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=200, help="the number of kills")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample and of the delays")
    arguments = parser.parse_args()
    if arguments.count < 1:
        parser.error("nothing to do")
    console = Console()
    start = time.perf_counter()
    done: list[Outcome] = []
    with console.status("") as status:

        def show(outcome: Outcome) -> None:
            done.append(outcome)
            status.update(f"{len(done)} of {arguments.count} kills")

        different, outcomes = sweep(arguments.count, arguments.seed, seen=show)
    table = Table(title=f"{arguments.count} kills of {different} different ones (seed {arguments.seed})")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 1 else "right")
    for line in rows(outcomes):
        table.add_row(*line, end_section=line[1] == "background")
    console.print(table)
    console.print("old, new: the newest checkpoint after the kill is the one before the save, or that of the save.")
    console.print("cleared: the next save succeeded and removed the files of the interrupted one.")
    points = Counter(outcome.point for outcome in outcomes)
    console.print("Where: " + ", ".join(f"{name} {count}" for name, count in points.most_common()))
    failed = [outcome for outcome in outcomes if outcome.problems]
    for outcome in failed:
        console.print(f"{outcome.kill} ({outcome.point}): " + "; ".join(outcome.problems), markup=False)
    console.print(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} kills did no damage; {time.perf_counter() - start:.0f} s"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
