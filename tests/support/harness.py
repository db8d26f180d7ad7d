"""Distributed tests on real gloo processes that are started once per world size and reused by all tests.

A test marked ``@distributed(2, 3)`` runs its body in every rank of a pool of 2 and then of 3 processes; it takes a
``world_size`` argument and any others that ``parametrize`` gives it. If a rank raises, the test fails with the
traceback of every rank that raised. If a rank's process ends, the test fails with its exit code or the name of the
signal that killed it. If a rank does not answer within the limit, the test fails too. After a failure the pool is
thrown away, so that the next test starts with fresh processes.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from tests.support.bf16_probe import ending
from tests.support.paths import ROOT

LIMIT = 60.0
"""Seconds a distributed test may take."""

COLLECTIVE_LIMIT = 30.0
"""Seconds after which gloo gives up on a collective, so that a hang comes with a traceback."""

EVERYTHING = os.environ.get("ONECOPY_ALL_CASES", "0") != "0"
"""Whether every case of every table is to be run."""

takes_long = pytest.mark.skipif(not EVERYTHING, reason="it takes long: make test-all runs it")
"""Marks a test that starts many processes, and whose parts other tests run in less time."""

Function = TypeVar("Function", bound=Callable[..., Any])

# The process that workers are forked from finds what it preloads through the environment only.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


class RanksFailedError(AssertionError):
    """The errors that ranks raised, and the ranks that did not answer."""


class Pool:
    """``world_size`` processes with one default process group among them.

    Args:
        world_size: the number of processes.
        collective_limit: the timeout of the process group, in seconds.
        hosts_store: whether this process hosts the store of the group, as torchrun does. Otherwise it is a file, and a
            process that is stopped may hold its lock.
    """

    def __init__(self, world_size: int, collective_limit: float = COLLECTIVE_LIMIT, hosts_store: bool = False) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if hosts_store else None
        store = os.path.join(self._folder.name, "store") if self._store is None else self._store.port
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, rank, world_size, store, collective_limit), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, module: str, name: str, kwargs: dict[str, Any], limit: float, may_end: Collection[int] = ()
    ) -> list[Any]:
        """Call a function on every rank and return the results; None for ranks in ``may_end`` that have ended.

        Those of them that have not ended when all others have answered are killed: they may be stopped.
        """
        for pipe in self._pipes:
            pipe.send((module, name, kwargs))
        deadline = time.monotonic() + limit
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for answering in ready:
                assert isinstance(answering, Connection)
                rank = waiting.pop(answering)
                try:
                    answer, problem = answering.recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(timeout=5.0)
                    answer, problem = None, f"the process {ending(self._processes[rank].exitcode)}"
                    if rank in may_end:
                        problem = None
                results[rank] = answer
                if problem is not None:
                    problems[rank] = problem
                    # The others wait for this one: give them as long as a collective takes to give up, not more.
                    deadline = min(deadline, time.monotonic() + COLLECTIVE_LIMIT + 5)
            if set(waiting.values()) <= set(may_end):
                for rank in waiting.values():
                    self._processes[rank].kill()
        for rank in waiting.values():
            problems[rank] = f"no answer within the limit of {limit:.0f} s"
        if problems:
            text = "\n".join(f"--- rank {rank} of {self.world_size}\n{problems[rank]}" for rank in sorted(problems))
            raise RanksFailedError(text)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


class Pools:
    """One pool per world size, made when first needed and again after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def run(self, world_size: int, module: str, name: str, kwargs: dict[str, Any], limit: float = LIMIT) -> list[Any]:
        """Call a function on every rank of a pool; a failure costs the pool."""
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size)
        try:
            return self._pools[world_size].run(module, name, kwargs, limit)
        except BaseException:
            self._pools.pop(world_size).close()
            raise

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


pools = Pools()


def distributed(*world_sizes: int, limit: float = LIMIT) -> Callable[[Function], Function]:
    """Run a test's body in every rank of these numbers of processes."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def in_ranks(world_size: int, **kwargs: Any) -> None:
            everything = {**kwargs, "world_size": world_size}
            pools.run(world_size, function.__module__, function.__qualname__, everything, limit)

        profiled: Function = pytest.mark.parametrize("world_size", world_sizes)(in_ranks)
        return profiled

    return decorate


def _serve(pipe: Connection, rank: int, world_size: int, store: str | int, collective_limit: float) -> None:
    """Join the group by a file or a port, then run the functions that come through the pipe until it closes."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own checkpoints use it before 2.13
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=FileStore(store, world_size) if isinstance(store, str) else TCPStore("127.0.0.1", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_limit),
    )
    while True:
        try:
            module, name, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            answer: tuple[Any, str | None] = (getattr(function, "__wrapped__", function)(**kwargs), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionError):
            return
