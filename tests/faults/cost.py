"""The cost of ``fail_together`` in a step that nothing disturbs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

import torch.distributed as dist

from onecopy import fail_together
from tests.faults.rows import Row
from tests.support.harness import Pool
from tests.support.serving import Served

STEPS = 100
"""Steps of a measurement."""

ALLOWED = 0.1e-3
"""The seconds that a step may take longer."""

LIMIT = 600.0


def measure(rounds: int) -> tuple[list[float], list[float]]:
    """In a rank: the seconds of a step inside and outside of ``fail_together``, in turn, because the load changes."""
    served = Served("parameter")
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * rounds + 2):
        is_outside = turn % 2
        with contextlib.nullcontext() if is_outside else fail_together():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                served.step()
            if turn > 1:  # the first steps make buffers
                times[is_outside].append((time.perf_counter() - begun) / STEPS)
    return times


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield one row, the median of many differences, because other work of the machine disturbs some of them."""
    pool, rounds = Pool(2, hosts_store=True), max(10, count)
    try:
        inside, outside = pool.run(__name__, "measure", {"rounds": rounds}, LIMIT)[0]
    finally:
        pool.close()
    difference = statistics.median(one - other for one, other in zip(inside, outside, strict=True))
    note = f"{difference * 1e3:+.3f} ms in a step of {statistics.median(outside) * 1e3:.2f} ms"
    problems = [] if difference <= ALLOWED else [f"{note}: more than {ALLOWED * 1e3} ms"]
    survived = 0 if problems else rounds
    yield Row("cost of fail_together", rounds, survived, statistics.median(inside), note, problems)
