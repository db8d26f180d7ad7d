"""Processes that end in every way and after every kind of training: none of them may hang or abort.

This process imports everything, and each rank is a fork of it that ends as any Python program does.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from onecopy import ZeroRedundancyOptimizer
from tests.accelerator import training as programs
from tests.accelerator.training import Place, Training, after_backward, ddp, interleaved, level_1, level_2, level_3
from tests.faults.rows import Row

LIMIT = 300.0
"""Seconds after which a process counts as hanging; on a machine with much other work, an end takes a minute."""

AT_ONCE = 6
"""Groups that train at once, so that all are slow."""

BAD_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault", "Aborted", "core dumped")

kept: list[Any] = []
"""Models and optimizers of this process, which live until the interpreter ends."""


def fail(rank: int) -> NoReturn:
    raise ValueError(f"rank {rank} fails")


def raise_signal(number: signal.Signals, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), number)
    time.sleep(10)


def kill(who: int, rank: int) -> None:
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)


def destroy(rank: int) -> None:
    dist.destroy_process_group()


def destroy_host_first(rank: int) -> None:
    time.sleep(0.3 * rank)
    destroy(rank)


def drop_and_destroy(rank: int) -> None:
    kept.clear()
    destroy(rank)


def end_after_other_fails(rank: int) -> None:
    if rank == 0:
        fail(rank)
    time.sleep(0.3)


def end_as_multiprocessing_does(rank: int) -> NoReturn:
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stderr.flush()
    os._exit(0)


WAYS: dict[str, tuple[Callable[[int], object], tuple[int, int]]] = {
    "normal": (lambda _: None, (0, 0)),
    "exception": (fail, (1, 1)),
    "destroy_process_group": (destroy, (0, 0)),
    "child of multiprocessing": (end_as_multiprocessing_does, (0, 0)),
    "exception on the host alone": (end_after_other_fails, (1, 0)),
    "sys.exit": (lambda _: sys.exit(3), (3, 3)),
    "destroy_process_group, the host first": (destroy_host_first, (0, 0)),
    "optimizer dropped, destroy_process_group": (drop_and_destroy, (0, 0)),
    "SIGINT": (partial(raise_signal, signal.SIGINT), (-signal.SIGINT, -signal.SIGINT)),
    "SIGTERM": (partial(raise_signal, signal.SIGTERM), (-signal.SIGTERM, -signal.SIGTERM)),
    "the host killed": (partial(kill, 0), (-signal.SIGKILL, 0)),
    "the other killed": (partial(kill, 1), (0, -signal.SIGKILL)),
}
"""What each rank does last, called with its number, and the exit statuses of both; a negative number is a signal."""


def train_and_gather() -> None:
    """Train one step, and gather the state on one rank."""
    param = nn.Parameter(torch.ones(2000))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.Adam, shard_by="element")
    kept.append(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert optimizer.state_dict()["state"][0]["exp_avg"].numel() == 2000


def slow_gloo_down() -> None:
    """Let gloo's worker threads get the processor and the interpreter's lock late, as on a busy machine."""
    sys.setswitchinterval(1.0)
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("pt_gloo"):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def plain_ddp(training: Training) -> None:
    training.model = ddp(training)
    made: Any = torch.optim.AdamW(training.module.parameters())
    training.optimizers.append(made)


def torchs_class(training: Training) -> None:
    training.model = ddp(training)
    made: Any = TorchZero(training.module.parameters(), torch.optim.AdamW)
    training.optimizers.append(made)


TRAININGS = {
    "plain DDP": plain_ddp,
    "torch's ZeroRedundancyOptimizer": torchs_class,
    "level 1": level_1,
    "reduce_scatter_hook": level_2,
    "hook_with_zero_step": after_backward,
    "hook_with_zero_step_interleaved": interleaved,
    "ShardedDataParallel": level_3,
}


def train(setup: Callable[[Training], None]) -> None:
    """Make a few steps; the overlap hooks update from the third one on."""
    training = Training(programs.Case("", setup), Place(torch.device("cpu"), None))
    for step in range(5):
        if step == 4:
            slow_gloo_down()
        programs.one_pass(training, step)
    kept.append(training)


@dataclass(frozen=True)
class Case:
    """What two processes do, how they end, and the exit statuses that this must give."""

    name: str
    training: Callable[[], object]
    end: Callable[[int], object]
    statuses: tuple[int, int] = (0, 0)


class Group:
    """The two processes of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.begun = case, time.monotonic()
        self._folder = tempfile.mkdtemp()  # not a context manager, which a forked rank would leave, too
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            store = f"tcp://127.0.0.1:{found.getsockname()[1]}"
        self._children = [self._start(rank, store) for rank in range(2)]

    def _start(self, rank: int, store: str) -> int:
        """Start one rank, and return its process id."""
        child = os.fork()
        if child:
            return child
        opened = os.open(Path(self._folder, str(rank)), os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        torch.set_num_threads(1)
        timeout = timedelta(seconds=LIMIT / 2)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
        self.case.training()
        self.case.end(rank)
        sys.exit(0)

    def finish(self) -> list[str]:
        """Wait for the end of both; return what was wrong."""
        problems = []
        for rank, child in enumerate(self._children):
            status = self._wait_for(child)
            text = Path(self._folder, str(rank)).read_text(errors="replace")
            if status != self.case.statuses[rank] or any(word in text for word in BAD_WORDS):
                problems.append(f"{self.case.name}, rank {rank}: status {status}\n{text[-2000:]}")
        shutil.rmtree(self._folder)
        return problems

    def _wait_for(self, child: int) -> int | None:
        """Return the exit status of a process, or None if it was still there at the limit."""
        while time.monotonic() < self.begun + LIMIT:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


def row_of(fault: str, cases: Sequence[Case], at_once: int, kinds: str) -> Row:
    """End two processes for each case, ``at_once`` groups at a time."""
    waiting, running = deque(cases), deque[Group]()
    slowest, problems = 0.0, list[str]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(Group(waiting.popleft()))
        group = running.popleft()
        problems += group.finish()
        slowest = max(slowest, time.monotonic() - group.begun)
    tried = 2 * len(cases)
    return Row(fault, tried, tried - len(problems), slowest, f"{len({each.name for each in cases})} {kinds}", problems)


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for ``2 * count`` ends in all ways, and one for as many after each training, always in pairs."""
    importlib.import_module("torch._dynamo")  # each rank would import it
    gc.freeze()  # the ends of forks then take a third of the time
    ways = [Case(name, train_and_gather, *way) for name, way in WAYS.items()]
    yield row_of("a process ends", ways * -(-count // len(ways)), 1, "ways")
    trainings = [Case(name, partial(train, setup), destroy) for name, setup in TRAININGS.items()]
    yield row_of("a process ends after a training, under load", trainings * count, AT_ONCE, "kinds of training")
