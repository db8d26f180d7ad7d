"""One behaviour on every device: a program enters the same functions on gloo and on the simulated accelerator."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
from tests.accelerator import device
from tests.accelerator.cases import BY_NAME
from tests.accelerator.harness import run
from tests.accelerator.training import Place, Training, on_device, small_sizes

ROOT = os.path.dirname(onecopy.__file__) + os.sep

PROGRAMS = [
    *("level 1", "level 1 clipped", "level 1 Muon", "level 1 master weights", "level 1 guarded"),
    *("level 2", "level 2 clipped", "level 2 no_sync", "after backward", "interleaved"),
    *("level 3", "level 3 overlap", "level 3 bf16", "level 3 no_sync", "level 3 saved"),
]

BEFORE_THE_UPDATE = "at level 3 the ranks vote before the update, where the host can read the vote without waiting"

ALLOWED = {
    "step/checks.py:GradientProbe.compare": BEFORE_THE_UPDATE,
    "step/checks.py:GradientProbe.take": BEFORE_THE_UPDATE,
    "step/engine.py:Engine.confirm": BEFORE_THE_UPDATE,
}
"""Functions outside of ``comm/`` that only one of the devices enters, each with the reason."""


class Entered:
    """Collects the functions of the package outside of ``comm/`` that are entered inside the block."""

    def __init__(self) -> None:
        self.functions: set[str] = set()

    def _see(self, frame: FrameType, event: str, _arg: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and not file.startswith(ROOT + "comm"):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has names alone
            # A comprehension or a lambda is a part of its function. An object is deleted at any time.
            if not name.endswith((">", ".__del__")):
                self.functions.add(f"{file.removeprefix(ROOT)}:{name}")

    def __enter__(self) -> set[str]:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self.functions

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def entered(name: str) -> tuple[set[str], set[str]]:
    """In a worker: the functions that a program enters on the CPU, and on the simulated accelerator."""
    case = BY_NAME[name]
    group = dist.new_group(backend="gloo")
    with Entered() as on_cpu:
        case.run(Place(torch.device("cpu"), group))
    # Autograd's threads for an accelerator are not Python's, and are not seen.
    with (
        torch.autograd.set_multithreading_enabled(False),
        device.simulate(seed=1, host_ahead="far") as simulation,
        Entered() as on_sim,
    ):
        case.run(on_device())
    assert simulation.reports == []
    return on_cpu, on_sim


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_enters_the_same_functions(name: str) -> None:
    for on_cpu, on_sim in run(entered, 2, {"name": name}, limit=120):
        assert len(on_cpu) > 20
        assert not (different := sorted((on_cpu ^ on_sim) - ALLOWED.keys())), "\n".join(different)


def left_behind(name: str) -> tuple[set[str], int]:
    """In a worker: threads of Python that a training has started, and exit functions that it has registered."""
    threads, functions = set(threading.enumerate()), atexit._ncallbacks()
    with small_sizes(), device.simulate(seed=1):
        training = Training(BY_NAME[name], on_device())
        training.case.program(training)
        started = {thread.name for thread in set(threading.enumerate()) - threads}
        training.results()
    return started, atexit._ncallbacks() - functions


@pytest.mark.parametrize("name", ["level 1", "level 2", "interleaved", "after backward", "level 3 overlap"])
def test_training_has_no_thread_and_no_exit_function(name: str) -> None:
    for threads, functions in run(left_behind, 2, {"name": name}):
        assert threads == set()
        assert functions == 0
