"""Tests on the simulated accelerator, in processes of their own: a process in which it is loaded has an accelerator."""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import build
from tests.support.harness import COLLECTIVE_LIMIT, LIMIT, Function, Pools

SIMCCL = "simccl"
HYBRID = "cpu:gloo,sim:simccl"
sim_pools = Pools()
"""Processes with the device, one pool per number of ranks."""

_rank: list[int] = []


def simulated(*world_sizes: int, backend: str = SIMCCL, limit: float = LIMIT) -> Callable[[Function], Function]:
    """Run a test's body in every rank of these numbers of processes, with the device and a group of this backend.

    The body takes ``world_size`` and the arguments that ``parametrize`` gives it; one named ``backend`` replaces the
    backend given here. Rank r has device "sim:r". The test is skipped where there is no compiler.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def in_ranks(world_size: int, **kwargs: Any) -> None:
            run(function, world_size, {**kwargs, "world_size": world_size}, kwargs.get("backend", backend), limit)

        marked: Function = pytest.mark.parametrize("world_size", world_sizes)(in_ranks)
        return marked

    return decorate


def run(
    function: Callable[..., Any], world_size: int, kwargs: dict[str, Any], backend: str = SIMCCL, limit: float = LIMIT
) -> list[Any]:
    """Call a function on every rank and return what each returned."""
    if build.compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler, and there is no g++ here")
    build.library()
    with tempfile.TemporaryDirectory() as folder:
        call: dict[str, Any] = {"store": os.path.join(folder, "store"), "world_size": world_size, "backend": backend}
        call |= {"module": function.__module__, "name": function.__qualname__, "kwargs": kwargs}
        return sim_pools.run(world_size, __name__, "on_rank", call, limit)


def on_rank(module: str, name: str, kwargs: dict[str, Any], backend: str, store: str, world_size: int) -> Any:
    """Run in a worker: load the device, make the group, call the function."""
    from tests.accelerator import device

    if not _rank:
        _rank.append(dist.get_rank())
        dist.barrier()  # a group is not destroyed while others are still making it
        dist.destroy_process_group()
    device.load()
    torch.accelerator.set_device_index(_rank[0])
    ranks: Any = {"init_method": f"file://{store}", "rank": _rank[0], "world_size": world_size}
    dist.init_process_group(backend, **ranks, timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT))
    torch.manual_seed(0)
    function: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    answer = getattr(function, "__wrapped__", function)(**kwargs)
    meet(f"{store}.end", world_size)
    dist.destroy_process_group()
    return answer


def meet(path: str, world_size: int) -> None:
    """Wait for all ranks without the group, in which a test may have left collectives that never end."""
    store = torch._C._distributed_c10d.FileStore(path, world_size)
    store.add("ranks", 1)
    while store.add("ranks", 0) < world_size:
        time.sleep(0.002)
