"""Checkpoints under hostile and crowded conditions, many times: nothing is lost, and nothing wrong is loaded.

Loads beside a writer with ``keep=1``, two writers in one directory, a disk that fails at every operation of a load,
random corruption, and random manifests of an attacker with right checksums. A hostile manifest must be refused with one
of the errors for checkpoints, or load what the files hold. No load may open a file outside the checkpoint, hang, or
need more memory than twice the file.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
    seen.tried, seen.refused = seen.tried + measured.tried, seen.refused + measured.refused
    seen.loaded, seen.slowest = seen.loaded + measured.loaded, max(seen.slowest, measured.slowest)
    seen.problems, seen.peak = seen.problems + measured.problems, measured.peak
    size = (large / NAME).stat().st_size
    if measured.peak > 2 * size:
        seen.problems.append(f"a load took {measured.peak} bytes, and the file has {size}")
    return seen


def main() -> int:
    """Return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=3000, help="the number of hostile manifests")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count, seed = arguments.count, arguments.seed
    logging.getLogger("onecopy").setLevel(logging.ERROR)  # every damaged checkpoint would be a warning
    console, failed = Console(), False
    table = Table("fault", *("tried", "loaded or saved", "refused", "problems", "slowest", "peak", "time"))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        faults: dict[str, Callable[[], Seen]] = {
            "loads beside a writer with keep=1": lambda: loads_beside_a_writer(root / "beside", count * 2 // 3),
            "saves of two writers": lambda: saves_of_two_writers(root / "two", count // 5),
            "disk faults of loads": lambda: disk_faults_of_loads(root / "faults"),
            "random corruption": lambda: random_corruption(saved(root / "corrupt", 32), count, seed),
            "hostile manifests": lambda: hostile_manifests(root / "hostile", count, seed),
        }
        for fault, run in faults.items():
            begun = time.monotonic()
            seen = run()
            failed = failed or bool(seen.problems)
            figures = (seen.tried, seen.loaded, seen.refused, len(seen.problems))
            took = time.monotonic() - begun
            peak = f"{seen.peak / 1e6:.1f} MB" if seen.peak else ""
            table.add_row(fault, *map(str, figures), f"{seen.slowest:.2f} s", peak, f"{took:.0f} s")
            for problem in seen.problems[:10]:
                console.print(f"{fault}: {problem}", markup=False)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
