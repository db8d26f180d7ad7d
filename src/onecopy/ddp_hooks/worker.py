"""Who runs the jobs of overlapped stepping: a thread on the CPU, a side stream on an accelerator."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.futures import Future

from onecopy.comm.side_stream import SideStream

Task = Callable[[], None]


class Worker(Protocol):
    """Runs jobs one at a time, in the order in which they were submitted."""

    def submit(self, job: Task) -> None:
        """Run a job now or later. A job does not raise: what goes wrong in it is its own business to report."""

    def future(self) -> Future[Any]:
        """A future for a job to complete."""


class ThreadWorker:
    """One thread, so that jobs start their collectives in the same order on every rank. It ends with this object."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # The thread knows the queue only, so that this object can go away and take the thread with it.
        thread = threading.Thread(
            target=_work, args=(self._jobs, torch.get_num_threads()), name="onecopy-overlap", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Task) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def future(self) -> Future[Any]:
        """A future without devices."""
        return Future()


class StreamWorker:
    """Enqueues jobs on a side stream as they come (on a CPU: runs them in place).

    Kernels and transfers do not wait on the host; the last job's status word does.
    """

    def __init__(self, device: torch.device) -> None:
        self._lane = SideStream(device)

    def submit(self, job: Task) -> None:
        """Run a job on the side stream."""
        with self._lane.use():
            job()

    def future(self) -> Future[Any]:
        """A future whose completion makes streams wait for the lane."""
        return self._lane.future()


def make_worker(device: torch.device) -> Worker:
    """The kind that fits the device of the parameters."""
    return ThreadWorker() if device.type == "cpu" else StreamWorker(device)


def _work(jobs: queue.SimpleQueue[Task | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        # A job holds tensors and a future: they must not live on until the next one comes.
        del job
