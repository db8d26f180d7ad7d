"""Saves in which a rank dies or its disk fails: older checkpoints stay intact, and no checkpoint loads in part."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from tests.faults.rows import Row
from tests.support.faults_sweep import sweep
from tests.support.harness import Pool, RanksFailedError

LIMIT = 300.0


def kills(count: int, seed: int) -> Row:
    """Kill one rank before, during and after file operations and exchanges of a save, and go on from the rest.

    See ``tests/support/faults_worker.py``. A count below the number of different kills takes an even sample of them.
    """
    different, outcomes = sweep(count, seed)
    problems = [f"{each.kill} ({each.point}): {'; '.join(each.problems)}" for each in outcomes if each.problems]
    seconds = max(each.seconds for each in outcomes)
    note = f"of {different} different points; the time includes the restart"
    return Row("SIGKILL at any point of a save", len(outcomes), len(outcomes) - len(problems), seconds, note, problems)


def disk_errors(count: int) -> Row:
    """Let every file operation of a save fail once on every rank, with 2 ranks and for a large count with 3 and 4."""
    tried, slowest, problems = 0, 0.0, list[str]()
    for world_size in (2, 3, 4) if count >= 100 else (2,):
        for blocking in (True, False):
            pool = Pool(world_size)
            with tempfile.TemporaryDirectory() as folder:
                arguments = {"root": folder, "blocking": blocking}
                try:
                    found = pool.run("tests.support.failing_disks", "disk_faults_of_saves", arguments, LIMIT)
                    tried, slowest = tried + found[0][0], max([slowest, *(seconds for _, seconds in found)])
                except RanksFailedError as error:
                    tried, problems = tried + 1, [*problems, f"{world_size} ranks: {error}"]
                finally:
                    pool.close()
    fault = "disk error at every file operation of a save"
    return Row(fault, tried, tried - len(problems), slowest, "", problems)


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for the kills, and one for the disks."""
    yield kills(count, seed)
    yield disk_errors(count)
