"""A training loop in ``fail_together``: if it fails on one rank, all ranks raise soon, and name the cause."""

from __future__ import annotations

import pytest

from onecopy import fail_together
from onecopy.comm.loop_watch import describe, is_backend_error
from onecopy.errors import PeerFailedError
from tests.support.failing_loops import STEP, outcomes
from tests.support.harness import EVERYTHING, distributed

KINDS = ["parameter", "reduce-scatter", "overlap", "sharded data parallel"]

SECONDS = 10.0
"""No error may take longer."""

PLACES = [(2, 0), (3, 1)]
"""The number of ranks, and the rank that fails."""

EXCEPTIONS = [
    "exception before the forward pass",
    "exception in the backward pass",
    "exception in the closure",
    "exception after the step",
    "Ctrl-C",
]

CASES = [
    (kind, case)
    for kind in KINDS
    for case in EXCEPTIONS
    if (kind, case) != ("overlap", "exception in the closure")  # it takes none
]


@pytest.mark.parametrize(("world_size", "failing_rank"), PLACES if EVERYTHING else PLACES[1:])
@pytest.mark.parametrize(("kind", "case"), CASES if EVERYTHING else CASES[::4])
def test_all_ranks_raise_after_an_exception_on_one(world_size: int, failing_rank: int, kind: str, case: str) -> None:
    for rank, outcome in enumerate(outcomes(world_size, kind=kind, case=case, failing_rank=failing_rank)):
        assert outcome is not None
        assert outcome.seconds < SECONDS
        if rank == failing_rank:
            assert outcome.error in ("ValueError", "KeyboardInterrupt")
            continue
        assert outcome.error == "PeerFailedError", outcome
        expected = "KeyboardInterrupt" if case == "Ctrl-C" else "ValueError: no data"
        assert f"rank {failing_rank}: {expected}" in outcome.text
        assert outcome.steps <= STEP + 1


@pytest.mark.parametrize(("world_size", "failing_rank"), PLACES)
@pytest.mark.parametrize("kind", ["parameter", "reduce-scatter", "sharded data parallel"])
@pytest.mark.parametrize("case", ["skipped step", "skipped iteration", "left early", "load on one rank"])
def test_all_ranks_raise_when_they_wait_for_each_other(
    world_size: int, failing_rank: int, kind: str, case: str
) -> None:
    for rank, outcome in enumerate(outcomes(world_size, kind=kind, case=case, failing_rank=failing_rank)):
        assert outcome is not None
        if rank == failing_rank and case in ("left early", "skipped iteration"):
            assert outcome.error == "NoneType"  # it has made all its calls
            continue
        assert outcome.seconds < SECONDS
        assert outcome.error in ("RanksDisagreeError", "PeerFailedError"), outcome
        names = {"skipped step": ("step()", "backward()"), "load on one rank": ("load_state_dict()",)}
        for name in names.get(case, (f"rank {failing_rank}", "has left the training loop")):
            assert name in outcome.text


@pytest.mark.parametrize("kind", KINDS if EVERYTHING else KINDS[::3])
def test_a_killed_rank_is_named(kind: str) -> None:
    first, killed, last = outcomes(3, kind=kind, case="SIGKILL", failing_rank=1)
    assert killed is None
    for outcome in (first, last):
        assert outcome is not None
        assert outcome.seconds < SECONDS
        assert outcome.error == "PeerFailedError", outcome
        assert "rank 1 ended without an exception" in outcome.text


@pytest.mark.parametrize("case", ["evaluation", "long computation"])
@pytest.mark.parametrize("kind", KINDS if EVERYTHING else KINDS[:1])
def test_a_slow_rank_is_no_failure(kind: str, case: str) -> None:
    for outcome in outcomes(2, kind=kind, case=case, failing_rank=0, blocked_seconds=1.0):
        assert outcome is not None
        assert outcome.error == "NoneType", outcome


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
