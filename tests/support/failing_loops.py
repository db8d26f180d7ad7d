"""Training loops inside ``fail_together`` that fail on one rank, each in a group of processes of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy import fail_together
from onecopy.comm import loop_watch
from tests.support.harness import Pool
from tests.support.serving import Served

LIMIT = 60.0

STEP = 2
"""The step in which the loop fails."""

SECONDS = 10.0
"""No error may take longer."""

KINDS = ["parameter", "reduce-scatter", "overlap", "sharded data parallel"]

EXCEPTIONS = [
    "exception before the forward pass",
    "exception in the backward pass",
    "exception in the closure",
    "exception after the step",
    "Ctrl-C",
]

BLOCKED = ["skipped step", "skipped iteration", "left early", "load on one rank"]

CASES = [*EXCEPTIONS, *BLOCKED, "SIGKILL"]
"""The ways in which a loop fails."""

SLOW = ["evaluation", "long computation"]
"""The ways in which a rank is only slow."""


@dataclass(frozen=True)
class Outcome:
    """How a rank's loop has ended: after how many seconds in the failing step, and with which exception."""

    seconds: float
    error: str
    text: str
    steps: int


def kinds_of(case: str) -> list[str]:
    """The kinds of training in which a loop can fail in one way: an overlapped step takes no closure."""
    return [kind for kind in KINDS if kind != "overlap" or case not in ("exception in the closure", *BLOCKED)]


def problem_of(case: str, failing_rank: int, found: list[Outcome | None]) -> str:
    """The first rank that did not end as it should, as text; empty if there is none."""
    for rank, outcome in enumerate(found):
        is_failing = rank == failing_rank
        if outcome is None:
            right = is_failing and case == "SIGKILL"
        elif case in SLOW or (is_failing and case in ("left early", "skipped iteration")):
            right = outcome.error == "NoneType"  # it makes all its calls
        elif is_failing and case in EXCEPTIONS:
            right = outcome.error == ("KeyboardInterrupt" if case == "Ctrl-C" else "ValueError")
        else:
            right = outcome.error in ("PeerFailedError", "RanksDisagreeError") and outcome.seconds < SECONDS
            right = right and all(words in outcome.text for words in _expected(case, failing_rank))
        if not right:
            return f"rank {rank}: {outcome}"
    return ""


def _expected(case: str, failing_rank: int) -> tuple[str, ...]:
    """Words of the errors of the other ranks, and of all ranks that wait for each other."""
    if case in EXCEPTIONS:
        return (f"rank {failing_rank}: {'KeyboardInterrupt' if case == 'Ctrl-C' else 'ValueError: no data'}",)
    words = {
        "skipped step": ("step()", "backward()"),
        "load on one rank": ("load_state_dict()",),
        "SIGKILL": (f"rank {failing_rank} ended without an exception",),
    }
    return words.get(case, (f"rank {failing_rank}", "has left the training loop"))


def outcomes(world_size: int, **arguments: Any) -> list[Outcome | None]:
    """Run :func:`loop` on fresh processes, because process groups are aborted; None for a process that has ended."""
    pool = Pool(world_size)
    may_end = {arguments["failing_rank"]} if arguments["case"] == "SIGKILL" else set()
    try:
        return pool.run(__name__, "loop", arguments, LIMIT, may_end)
    finally:
        pool.close()


def loop(kind: str, case: str, failing_rank: int, blocked_seconds: float = 1.5) -> Outcome:
    """Train, and do the wrong thing of a case on one rank."""
    loop_watch.SECONDS = blocked_seconds
    served = Served(kind)
    is_failing = dist.get_rank() == failing_rank
    step, begun = 0, 0.0
    error: BaseException | None = None
    try:
        with fail_together():
            for step in range(6):
                begun = time.monotonic()
                with _mistake(case, served) if step == STEP and is_failing else contextlib.nullcontext(True) as goes_on:
                    if goes_on:
                        served.step()
                    elif goes_on is None:
                        break
    except BaseException as caught:
        error = caught
    return Outcome(time.monotonic() - begun, type(error).__name__, str(error), step)


@contextlib.contextmanager
def _mistake(case: str, served: Served) -> Iterator[bool | None]:
    """A wrong step. It yields whether to make the step too, or None to leave the loop."""
    if case == "exception before the forward pass":
        raise ValueError("no data")
    if case == "Ctrl-C":
        raise KeyboardInterrupt
    if case == "exception in the backward pass":
        weight: Tensor = served.model.module.weights[1]
        handle = weight.register_hook(_fail)
        try:
            yield True
        finally:
            handle.remove()
    elif case == "exception in the closure":
        served._pass()
        served.zero.step(_fail)
    elif case == "SIGKILL":
        timer = threading.Timer(random.uniform(0, 0.01), os.kill, (os.getpid(), signal.SIGKILL))
        timer.start()
        yield True
        timer.join()
    elif case == "exception after the step":
        yield True
        raise ValueError("no data")
    elif case == "skipped step":
        served._pass()
        served.zero.zero_grad()
        yield False
    elif case == "skipped iteration":
        yield False
    elif case == "left early":
        yield None
    elif case == "load on one rank":  # the other ranks go on to their next backward pass
        state_dict = {"state": {}, "param_groups": served.plain.state_dict()["param_groups"]}
        served.zero.load_state_dict(state_dict)
        yield True
    elif case == "evaluation":
        time.sleep(4)
        yield True
    elif case == "long computation":
        until = time.monotonic() + 4
        while time.monotonic() < until:
            torch.ones(100, 100).sum()
        yield True
    else:
        raise AssertionError(case)


def _fail(*_: Any) -> Any:
    raise ValueError("no data")
