"""Checkpoints in a directory that several processes use, on a disk that fails, damaged, or written by an attacker."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.rows import Row
from tests.support.crowded import (
    disk_faults_of_loads,
    loads_beside_a_writer,
    random_corruption,
    saves_of_two_writers,
)
from tests.support.hostile import NAME, Pair, Seen, attack_at_random

WIDTH = 1024
"""Width of the model whose checkpoint has hostile manifests: 12 MB, so that its memory can be told from the rest."""


def saved(root: Path, width: int) -> Path:
    pair = Pair(width=width)
    pair.step()
    return pair.save(root)


def hostile_manifests(root: Path, count: int, seed: int) -> Seen:
    """Attack a small checkpoint, and with a tenth of the attacks a larger one, for which memory is measured."""
    seen, measured = Seen(), Seen()
    attack_at_random(saved(root / "small", 32), count - count // 10, seed, seen)
    large = saved(root / "large", WIDTH)
    attack_at_random(large, count // 10, seed + 1, measured)
    seen.tried, seen.slowest = seen.tried + measured.tried, max(seen.slowest, measured.slowest)
    seen.problems, seen.peak = seen.problems + measured.problems, measured.peak
    size = (large / NAME).stat().st_size
    if measured.peak > 2 * size:
        seen.problems.append(f"a load took {measured.peak} bytes, and the file has {size}")
    return seen


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for each fault; a count of 100 makes 2,000 loads, 3,000 damaged and 3,000 hostile files."""
    logging.getLogger("onecopy").setLevel(logging.ERROR)  # every damaged checkpoint would be a warning
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        faults: dict[str, Callable[[], Seen]] = {
            "loads beside a writer with keep=1": lambda: loads_beside_a_writer(root / "beside", 20 * count),
            "saves of two writers": lambda: saves_of_two_writers(root / "two", 6 * count),
            "disk error at every file operation of a load": lambda: disk_faults_of_loads(root / "faults"),
            "random corruption": lambda: random_corruption(saved(root / "corrupt", 32), 30 * count, seed),
            "hostile manifests": lambda: hostile_manifests(root / "hostile", 30 * count, seed),
        }
        for fault, run in faults.items():
            seen = run()
            peak = f"at most {seen.peak / 1e6:.1f} MB" if seen.peak else ""
            survived = max(0, seen.tried - len(seen.problems))
            yield Row(fault, seen.tried, survived, seen.slowest, peak, seen.problems)
