"""Prints what an iteration of each level asks of an accelerator: ``python -m tests.accelerator.table``.

For a model of 12 blocks at 2 and 3 ranks, counted on the simulated accelerator. Launches are those of the optimizer and of
onecopy, not those of the model.
"""

from __future__ import annotations

import sys

from onecopy.bench import bf16_probe
from tests.accelerator import counting
from tests.accelerator.harness import HYBRID, SIMCCL, run, sim_pools

BLOCKS = 12
HEADERS = (
    "level",
    "ranks",
    "group",
    "buckets",
    "calls",
    "operations",
    "KB sent",
    "launches",
    "host waits",
    "age of flags",
)
HEADERS += ("peak KB lockstep", "peak KB far ahead")


def rows(world_sizes: tuple[int, ...], backends: dict[str, str]) -> list[tuple[str, ...]]:
    """Count every level."""
    found = []
    for name in counting.LEVELS:
        for world_size in world_sizes:
            for group, backend in backends.items():
                lockstep, far = (
                    run(counting.count, world_size, {"name": name, "blocks": BLOCKS, "host_ahead": ahead}, backend)[0]
                    for ahead in (0, "far")
                )
                ages = sorted({age for _, _, age in far.synchronizations})
                numbers = (world_size, group, far.buckets, far.calls, far.operations, far.bytes // 1000, far.launches)
                waits = (len(far.synchronizations), ages or "", lockstep.peak // 1000, far.peak // 1000)
                found.append((name, *map(str, (*numbers, *waits))))
    return found


def as_markdown(table: list[tuple[str, ...]]) -> str:
    """The rows as a table in Markdown."""
    lines = [HEADERS, ("---",) * len(HEADERS), *table]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Count and print."""
    bf16_probe.protect()
    backends = {"pure": SIMCCL, "hybrid": HYBRID} if "--hybrid" in sys.argv else {"pure": SIMCCL}
    try:
        print(as_markdown(rows((2, 3), backends)))
    finally:
        sim_pools.close()


if __name__ == "__main__":
    main()
