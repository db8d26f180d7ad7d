"""Writes the counts of docs/accelerators.md: ``python -m tests.accelerator.table docs/accelerators.md``.

They are those of a model of 12 blocks at 2 and 3 ranks, counted on the simulated accelerator. Launches are those of the
optimizer and of onecopy, not those of the model.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.accelerator import counting
from tests.accelerator.counting import Counts
from tests.accelerator.harness import run, sim_pools
from tests.planning.table import write
from tests.support import bf16_probe

BLOCKS = 12
WORLD_SIZES = (2, 3)
HEADERS = (
    *("level", "buckets", "calls", "operations", "launches", "waits of the host"),
    *("peak KB, host in lockstep", "peak KB, host far ahead"),
)


def row(level: str) -> str:
    """Count one level; numbers that differ between 2 and 3 ranks are separated by a slash."""
    columns = []
    for world_size in WORLD_SIZES:
        lockstep, far = (_counts(level, world_size, ahead) for ahead in (0, "far"))
        counts = (far.buckets, far.calls, far.operations, far.launches, len(far.synchronizations))
        columns.append((*counts, lockstep.peak // 1000, far.peak // 1000))
    return _line([level, *(" / ".join(map(str, dict.fromkeys(each))) for each in zip(*columns, strict=True))])


def _counts(level: str, world_size: int, host_ahead: int | str) -> Counts:
    """The counts of group rank 0."""
    found: Counts = run(counting.count, world_size, {"name": level, "blocks": BLOCKS, "host_ahead": host_ahead})[0]
    return found


def table() -> str:
    """Count all levels."""
    return "\n".join([_line(HEADERS), _line(["---", *["---:"] * (len(HEADERS) - 1)]), *map(row, counting.LEVELS)])


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Count and write."""
    bf16_probe.protect()
    try:
        write(Path(sys.argv[1]), "counts", table())
    finally:
        sim_pools.close()


if __name__ == "__main__":
    main()
