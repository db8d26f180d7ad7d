"""Workers that run the tasks of the overlapped step: a thread on the CPU, a side stream on an accelerator."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.futures import Future

from onecopy.comm.collectives import Collectives
from onecopy.comm.streams import SideStream

Task = Callable[[], None]


class TaskWorker(Protocol):
    """Runs tasks one at a time, in the order in which they were submitted."""

    def submit(self, task: Task) -> None:
        """Run a task now or later; a task must not raise."""

    def future(self) -> Future[Any]:
        """Return a future that a task will complete."""

    def group_for_tasks(self, collectives: Collectives) -> Collectives:
        """Return the process group, over the ranks of ``collectives``, on which tasks communicate."""


class ThreadWorker:
    """Runs tasks on one thread, so that every rank starts its collectives in the same order.

    The thread ends when this object is freed.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # The thread refers to the queue only: a reference to this object would keep it, and the thread, alive.
        thread = threading.Thread(
            target=_run_tasks, args=(self._tasks, torch.get_num_threads()), name="onecopy-overlap", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, task: Task) -> None:
        """Add a task to the thread's queue."""
        self._tasks.put(task)

    def future(self) -> Future[Any]:
        """Return a future without devices."""
        return Future()

    def group_for_tasks(self, collectives: Collectives) -> Collectives:
        """Return a dedicated group, because autograd's thread communicates at the same time."""
        return collectives.dedicated_group()


class StreamWorker:
    """Enqueues the kernels of each task on a side stream; on the CPU, runs the task at once.

    The host does not wait for kernels and messages, except to read which parameters have a gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._side_stream = SideStream(device)

    def submit(self, task: Task) -> None:
        """Run a task with the side stream as the current stream."""
        with self._side_stream.use():
            task()

    def future(self) -> Future[Any]:
        """Return a future; streams that wait for it wait for the side stream."""
        return self._side_stream.future()

    def group_for_tasks(self, collectives: Collectives) -> Collectives:
        """Return the same group.

        All collectives are issued by autograd's thread, in the order of DDP's buckets, which is the same on all ranks.
        Another communicator would take memory of the accelerator, and kernels of two communicators can block each other
        if the ranks' accelerators run them in different orders. With one communicator the reduction of a bucket starts
        after the parameters of the bucket before have been sent. The backward pass goes on meanwhile.
        """
        return collectives


def make_worker(device: torch.device) -> TaskWorker:
    """Return a worker for parameters on this device."""
    return ThreadWorker() if device.type == "cpu" else StreamWorker(device)


def _run_tasks(tasks: queue.SimpleQueue[Task | None], num_threads: int) -> None:
    """Run tasks from a queue until it gives None."""
    torch.set_num_threads(num_threads)
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        # A task refers to tensors and a future: free them before waiting for the next task.
        del task
