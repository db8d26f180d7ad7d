"""Errors on an accelerator: the rank that fails raises at once, and the others one or two calls later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from onecopy.data_parallel.bucket import GradientBucket
from tests.accelerator import device
from tests.accelerator.cases import BY_NAME
from tests.accelerator.comparing import abandoning_on_failure
from tests.accelerator.harness import HYBRID, SIMCCL, meet, run, simulated
from tests.accelerator.training import Case, Training, adamw, level_1, level_2, on_device, one_pass, small_sizes

NO_MEMORY = "no memory is left"
FAILS_AT = 4
SECONDS = 20.0


def _no_memory(*_args: Any, **_kwargs: Any) -> None:
    raise MemoryError(NO_MEMORY)


def update_fails(training: Training, _patch: pytest.MonkeyPatch) -> None:
    training.optimizer.optim.register_step_pre_hook(_no_memory)


def backward_fails(_training: Training, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientBucket, "put", mock.Mock(side_effect=MemoryError(NO_MEMORY)))


def gradient_is_infinite(training: Training, _patch: pytest.MonkeyPatch) -> None:
    training.batches = [batch * float("inf") for batch in training.batches]


def options_differ(training: Training, _patch: pytest.MonkeyPatch) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.5


class Failure(NamedTuple):
    """What goes wrong on the last rank, and the error of that rank and of the others: its class, a part of its text."""

    levels: tuple[str, ...]  # names of training programs
    cause: Callable[[Training, pytest.MonkeyPatch], None]
    there: tuple[str, str]
    elsewhere: tuple[str, str]  # "{rank}" is the last rank


PROGRAMS = BY_NAME | {
    "level 1 refusing": Case("level 1 refusing", level_1, parts=adamw(nonfinite="raise")),
    "level 2 refusing": Case("level 2 refusing", level_2, parts=adamw(nonfinite="raise")),
}
HOOKS_AND_LEVELS = ("level 1 master weights", "level 2", "after backward", "interleaved", "level 3", "level 3 overlap")
MEMORY = ("MemoryError", NO_MEMORY)
NONFINITE = ("NonfiniteError", "in the previous step() the gradient of parameter 'group0[0]'")
OPTIONS = ("RanksDisagreeError", "different options")
LATER = ("PeerFailedError", "the previous backward() failed on global rank {rank}")
FAILURES = [
    Failure(("level 1", *HOOKS_AND_LEVELS), update_fails, MEMORY, ("PeerFailedError", "global rank {rank}")),
    Failure(("level 3", "level 3 overlap"), backward_fails, MEMORY, LATER),
    Failure(("level 1 refusing", "level 2 refusing"), gradient_is_infinite, NONFINITE, NONFINITE),
    Failure(("level 1", "level 2", "level 3"), options_differ, OPTIONS, OPTIONS),
]
ROWS = [
    pytest.param(number, level, id=f"{failure.cause.__name__} at {level}")
    for number, failure in enumerate(FAILURES)
    for level in failure.levels
]


@pytest.mark.parametrize("ahead", ["far", 0])
@pytest.mark.parametrize("backend", [SIMCCL, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("number", "level"), ROWS)
def test_all_ranks_raise_soon(
    number: int, level: str, world_size: int, backend: str, ahead: int | str, tmp_path: Path
) -> None:
    failure, last = FAILURES[number], world_size - 1
    arguments = {"number": number, "level": level, "ahead": ahead, "meeting": str(tmp_path / "store")}
    for rank, (name, text, iterations, seconds) in enumerate(run(fail, world_size, arguments, backend)):
        expected = failure.there if rank == last else failure.elsewhere
        assert name == expected[0], text
        assert expected[1].format(rank=last) in text
        assert iterations <= 1
        assert seconds < SECONDS


def fail(number: int, level: str, ahead: int | str, meeting: str) -> tuple[str, str, int, float]:
    """In a worker: the last rank fails; return the error, and how many iterations and seconds later it was raised."""
    step, start, seconds = 0, 0.0, 0.0
    try:
        with (
            small_sizes(),
            pytest.MonkeyPatch.context() as patch,
            abandoning_on_failure(),
            device.simulate(seed=2, host_ahead=ahead),
        ):
            training = Training(PROGRAMS[level], on_device())
            for step in range(FAILS_AT + 3):
                if step == FAILS_AT:
                    start = time.monotonic()
                    if dist.get_rank() == dist.get_world_size() - 1:
                        FAILURES[number].cause(training, patch)
                try:
                    one_pass(training, step)
                except Exception as error:
                    seconds = time.monotonic() - start
                    if isinstance(error, MemoryError):
                        torch.accelerator.synchronize()
                    meet(meeting, dist.get_world_size())  # no accelerator stops before the others have what it sent
                    raise
    except Exception as error:
        return type(error).__name__, str(error), step - FAILS_AT, seconds
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@simulated(2)
def test_state_dict_without_consolidation_is_refused_by_name(world_size: int, backend: str) -> None:
    with small_sizes(), device.simulate(seed=1, host_ahead="far") as simulation:
        training = Training(Case("state dict", level_1), on_device())
        for step in range(3):
            one_pass(training, step)
        zero = training.optimizer
        with pytest.raises(RuntimeError, match=r"consolidate_state_dict.* onecopy.checkpoint.save"):
            zero.state_dict()
        for to in (1, 0):
            zero.consolidate_state_dict(to=to)
            if dist.get_rank() == to:
                assert all(state["step"] == 3 for state in zero.state_dict()["state"].values())
        zero.state_dict()  # on all ranks, as Accelerate calls it
    assert simulation.reports == []
