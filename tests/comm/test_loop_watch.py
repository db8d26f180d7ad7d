"""A training loop in ``fail_together``: if it fails on one rank, all ranks raise soon, and name the cause."""

from __future__ import annotations

import pytest

from onecopy import fail_together
from onecopy.comm.backend_errors import is_backend_error
from onecopy.comm.loop_watch import describe
from onecopy.errors import PeerFailedError
from tests.support.different_modes import MODES
from tests.support.different_modes import problem_of as problem_in
from tests.support.failing_loops import CASES, KINDS, SLOW, kinds_of, outcomes, problem_of
from tests.support.harness import EVERYTHING, distributed

PLACES = [(2, 0), (3, 1)]
"""The number of ranks, and the rank that fails."""

FAILURES = [(kind, case) for case in CASES for kind in kinds_of(case)]
FEW = [(kinds_of(case)[number % len(kinds_of(case))], case) for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("world_size", "failing_rank"), PLACES if EVERYTHING else PLACES[1:])
@pytest.mark.parametrize(("kind", "case"), FAILURES if EVERYTHING else FEW)
def test_all_ranks_raise_and_name_the_cause(world_size: int, failing_rank: int, kind: str, case: str) -> None:
    found = outcomes(world_size, kind=kind, case=case, failing_rank=failing_rank)
    assert not problem_of(case, failing_rank, found)


@pytest.mark.parametrize("case", SLOW)
@pytest.mark.parametrize("kind", KINDS if EVERYTHING else KINDS[:1])
def test_a_slow_rank_is_no_failure(kind: str, case: str) -> None:
    found = outcomes(2, kind=kind, case=case, failing_rank=0, blocked_seconds=1.0)
    assert not problem_of(case, 0, found)


@pytest.mark.parametrize("world_size", [2, 3] if EVERYTHING else [2])
@pytest.mark.parametrize("mode", MODES if EVERYTHING else list(MODES)[:1])
def test_ranks_in_different_modes(mode: str, world_size: int) -> None:
    assert not problem_in(mode, world_size)


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
    wrapped = PeerFailedError("rank 0: step() has waited")
    assert not is_backend_error(wrapped)
    wrapped.__cause__ = closed
    assert is_backend_error(wrapped)
