"""A training loop in ``fail_together``: if it fails on one rank, all ranks raise soon, and name the cause."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from onecopy import fail_together
from onecopy.comm.backend_errors import is_backend_error
from onecopy.comm.blocked_ranks import BYTES_SENT, bytes_written
from onecopy.comm.loop_watch import describe
from onecopy.errors import PeerFailedError
from tests.support.different_modes import MODES
from tests.support.different_modes import problem_of as problem_in
from tests.support.failing_loops import CASES, SLOW, Outcome, kinds_of, outcomes, problem_of
from tests.support.harness import EVERYTHING, distributed

PLACES = [(3, 1), (2, 0)]
"""The number of ranks, and the rank that fails."""

EVERY = [(kind, case, place) for place in PLACES for case in [*CASES, *SLOW] for kind in kinds_of(case)]
FEW = [
    (kinds_of(case)[number % len(kinds_of(case))], case, PLACES[number % 2])
    for number, case in enumerate([*CASES, *SLOW], start=3)  # a rank is stopped in an overlapped step
]
LOOPS = EVERY if EVERYTHING else FEW

AT_ONCE = 3
"""Loops that run at the same time: most of the time their ranks only wait."""

BLOCKED_SECONDS, SLOW_SECONDS = 1.0, 3.0
"""After how long a rank counts as blocked here, and how long a slow rank takes."""

Loop = tuple[str, str, tuple[int, int]]


def run_loop(loop: Loop) -> list[Outcome | None]:
    kind, case, (world_size, failing_rank) = loop
    seconds = {"blocked_seconds": BLOCKED_SECONDS, "slow_seconds": SLOW_SECONDS, "delay": 0.0}
    return outcomes(world_size, kind=kind, case=case, failing_rank=failing_rank, **seconds)


@pytest.fixture(scope="module")
def running() -> Iterator[dict[Loop, Future[list[Outcome | None]]]]:
    """The loops, which are started here and run in the background."""
    with ThreadPoolExecutor(AT_ONCE) as executor:
        yield {loop: executor.submit(run_loop, loop) for loop in LOOPS}
        executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_all_ranks_raise_and_name_the_cause_unless_a_rank_is_only_slow(
    loop: Loop, running: dict[Loop, Future[list[Outcome | None]]]
) -> None:
    _, case, (_, failing_rank) = loop
    assert not problem_of(case, failing_rank, running[loop].result())


@pytest.mark.parametrize("world_size", [2, 3] if EVERYTHING else [2])
@pytest.mark.parametrize("mode", MODES if EVERYTHING else list(MODES)[:1])
def test_ranks_in_different_modes(mode: str, world_size: int) -> None:
    _, problem = problem_in(mode, world_size, blocked_seconds=1.5)
    assert not problem


@distributed(2)
def test_loops_one_after_the_other(world_size: int) -> None:
    for _ in range(3):
        with fail_together():
            pass


def test_a_process_without_a_group() -> None:
    with pytest.raises(ValueError, match="no data"), fail_together():
        raise ValueError("no data")


def test_an_exception_as_text() -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert describe(UnreadableError()) == "UnreadableError"
    with pytest.raises(KeyError) as caught:
        raise KeyError("x")
    assert describe(caught.value).startswith("KeyError: 'x' (at test_loop_watch.py:")


def test_errors_of_the_backend() -> None:
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert is_backend_error(closed)
    assert not is_backend_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_backend_error(ValueError("gloo"))
    assert not is_backend_error(RuntimeError("DataLoader timed out after 2 seconds"))
    assert not is_backend_error(RuntimeError("the upload was aborted"))
    wrapped = PeerFailedError("rank 0: step() has waited")
    assert not is_backend_error(wrapped)
    wrapped.__cause__ = closed
    assert is_backend_error(wrapped)


@distributed(2)
def test_an_exit_without_an_error_leaves_the_block_in_order(world_size: int) -> None:
    ends = pytest.raises(SystemExit) if dist.get_rank() == 0 else contextlib.nullcontext()
    with ends, fail_together():
        if dist.get_rank() == 0:
            sys.exit()
    dist.barrier()  # the process group was not aborted


@pytest.mark.skipif(sys.platform != "linux", reason="bytes are counted on Linux only")
@distributed(2)
def test_bytes_that_gloo_sends_are_counted(world_size: int) -> None:
    before = bytes_written()
    dist.broadcast(torch.zeros(BYTES_SENT), src=0)
    dist.barrier()
    sent = bytes_written() - before
    assert sent > BYTES_SENT if dist.get_rank() == 0 else sent < BYTES_SENT
