"""Many kills, spread over processes that fork the ranks of every experiment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import TracebackType
from typing import Any

from tests.support.bf16_probe import ending
from tests.support.faults import WORLD_SIZES, Kill, Outcome, moments_of
from tests.support.paths import ROOT


class Zygote:
    """The other end: a process that forks ranks on request.

    Args:
        world_size: how many ranks each experiment has.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults_worker", str(world_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **settings},
        )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def count(self, blocking: bool) -> list[list[str]]:
        """The points of a save, by rank."""
        points: list[list[str]] = self._ask("count", blocking=blocking)
        return points

    def kill(self, kill: Kill) -> Outcome:
        """One experiment."""
        answer = self._ask("kill", **asdict(kill))
        return Outcome(**{**answer, "kill": kill})

    def _ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(timeout=5.0)
            raise RuntimeError(f"the process that forks {self.world_size} ranks {ending(code)}")
        return json.loads(line)


def every_kill(zygote: Zygote) -> list[Kill]:
    """All of them for one number of ranks: mode, rank, point, moment."""
    return [
        Kill(zygote.world_size, blocking, rank, call, moment)
        for blocking in (True, False)
        for rank, points in enumerate(zygote.count(blocking))
        for call, name in enumerate(points)
        for moment in moments_of(name)
    ]


def spread(kills: Sequence[Kill], count: int, seed: int) -> list[Kill]:
    """So many of them, evenly spread; if there are not as many, again and again with other delays."""
    chosen: list[Kill] = []
    while len(chosen) < count:
        source = random.Random(seed)
        part = min(count - len(chosen), len(kills))
        for number in range(part):
            low, high = number * len(kills) // part, (number + 1) * len(kills) // part
            kill = kills[source.randrange(low, high)]
            chosen.append(Kill(kill.world_size, kill.blocking, kill.rank, kill.call, kill.moment, seed))
        seed += 1
    return chosen


def sweep(
    count: int, seed: int = 0, world_sizes: Sequence[int] = WORLD_SIZES, seen: Callable[[Outcome], object] = id
) -> tuple[int, list[Outcome]]:
    """Do so many kills; return how many different ones there are, and the outcomes. ``seen`` hears of each."""
    with contextlib.ExitStack() as stack:
        zygotes = {size: stack.enter_context(Zygote(size)) for size in world_sizes}
        executor = stack.enter_context(ThreadPoolExecutor(len(zygotes)))
        everything = [kill for kills in executor.map(every_kill, zygotes.values()) for kill in kills]
        chosen = spread(everything, count, seed)

        def work(size: int) -> list[Outcome]:
            outcomes = []
            for kill in chosen:
                if kill.world_size == size:
                    outcomes.append(zygotes[size].kill(kill))
                    seen(outcomes[-1])
            return outcomes

        return len(everything), [outcome for part in executor.map(work, world_sizes) for outcome in part]
