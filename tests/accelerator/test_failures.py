"""A rank that fails on an accelerator: it raises its own error, and the others raise one or two calls later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onecopy import PeerFailedError
from tests.accelerator import device
from tests.accelerator.abandoning import abandoning_on_failure
from tests.accelerator.cases import BY_NAME
from tests.accelerator.harness import HYBRID, SIMCCL, meet, run
from tests.accelerator.training import Place, Training, one_pass, small_sizes

NO_MEMORY = "no memory is left"
SECONDS = 20.0

LEVELS = ["level 1", "level 1 master weights", "level 2", "after backward", "interleaved", "level 3", "level 3 overlap"]


@pytest.mark.parametrize("ahead", ["far", 0])
@pytest.mark.parametrize("backend", [SIMCCL, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_the_other_ranks_raise_soon(
    level: str, world_size: int, backend: str, ahead: int | str, tmp_path: Path
) -> None:
    arguments = {"level": level, "ahead": ahead, "meeting": str(tmp_path / "store")}
    found = run(fail, world_size, arguments, backend)
    *others, culprit = found
    assert culprit[0] == "MemoryError"
    assert NO_MEMORY in culprit[1]
    for kind, text, iterations, seconds in others:
        assert kind == PeerFailedError.__name__, text
        assert str(world_size - 1) in text
        assert iterations <= 1
        assert seconds < SECONDS


def fail(level: str, ahead: int | str, meeting: str) -> tuple[str, str, int, float]:
    """In a worker: the update fails on the last rank; return the error, and how many iterations and seconds later."""
    place = Place(torch.device("sim", torch.accelerator.current_device_index()), None)
    step = 0
    start = time.monotonic()
    seconds = 0.0
    try:
        with small_sizes(), abandoning_on_failure(), device.simulate(seed=2, host_ahead=ahead):
            training = Training(BY_NAME[level], place)
            for step in range(7):
                if step == 4:
                    start = time.monotonic()
                    if dist.get_rank() == dist.get_world_size() - 1:
                        training.optimizer.optim.register_step_pre_hook(_fail)
                try:
                    one_pass(training, step)
                except Exception as error:
                    seconds = time.monotonic() - start
                    if isinstance(error, MemoryError):
                        torch.accelerator.synchronize()
                    meet(meeting, dist.get_world_size())  # no accelerator stops before the others have what it sent
                    raise
    except Exception as error:
        return type(error).__name__, str(error), step - 4, seconds
    raise AssertionError("nothing was raised")


def _fail(*_args: Any, **_kwargs: Any) -> None:
    raise MemoryError(NO_MEMORY)
