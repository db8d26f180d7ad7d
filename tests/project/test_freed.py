"""What is deleted is freed by reference counting alone: optimizer, hook and wrapper, at every level."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import (
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.harness import EVERYTHING, distributed

COUNT = 200 if EVERYTHING else 10

Made = tuple[nn.Module, Optimizer]


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))


def ddp() -> Made:
    model = DistributedDataParallel(module(), bucket_cap_mb=0.01)
    return model, AdamW(model.parameters())


def level_1(views: bool) -> Made:
    model = DistributedDataParallel(module(), bucket_cap_mb=0.01)
    return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, parameters_as_bucket_view=views)


def level_2() -> Made:
    model, optimizer = level_1(views=False)
    model.register_comm_hook(optimizer, reduce_scatter_hook)  # type: ignore[operator]
    return model, optimizer


def overlapped(make_hook: Callable[..., Any]) -> Made:
    model = DistributedDataParallel(module(), bucket_cap_mb=0.01)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, overlap_with_ddp=True)
    model.register_comm_hook(None, make_hook(allreduce_hook, model, optimizer))
    return model, optimizer


def level_3(overlap_forward: bool) -> Made:
    inside = module()
    optimizer = ZeroRedundancyOptimizer(inside.parameters(), AdamW)
    return ShardedDataParallel(inside, optimizer, overlap_forward=overlap_forward, bucket_bytes=1 << 13), optimizer


MODES: dict[str, Callable[[], Made]] = {
    "level 1": lambda: level_1(views=False),
    "level 1, bucket views": lambda: level_1(views=True),
    "level 2": level_2,
    "hook_with_zero_step": lambda: overlapped(hook_with_zero_step),
    "hook_with_zero_step_interleaved": lambda: overlapped(hook_with_zero_step_interleaved),
    "level 3": lambda: level_3(overlap_forward=False),
    "level 3, overlap_forward": lambda: level_3(overlap_forward=True),
}


def train_and_delete(make: Callable[[], Made]) -> None:
    model, optimizer = make()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 40)).sum().backward()
        optimizer.step()


def alive() -> tuple[int, int]:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects()), len(os.listdir("/proc/self/fd"))


def growth(make: Callable[[], Made]) -> tuple[int, int]:
    """By how many tensors and descriptors a rank grows while it trains and deletes, ``COUNT`` times."""
    for _ in range(3):
        train_and_delete(make)
    dist.barrier()
    gc.collect()
    tensors, descriptors = alive()
    for _ in range(COUNT):
        train_and_delete(make)
    dist.barrier()
    deadline = time.monotonic() + 5.0
    while alive() > (tensors, descriptors) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's threads let go of a message after it has arrived
    now = alive()
    return now[0] - tensors, now[1] - descriptors


@pytest.mark.parametrize("name", MODES)
@distributed(2)
def test_nothing_outlives_its_owner(world_size: int, name: str) -> None:
    gc.disable()
    try:
        of_ddp = growth(ddp)
        ours = growth(MODES[name])
    finally:
        gc.enable()
    assert ours[0] <= max(of_ddp[0], 0), f"tensors; plain DDP: {of_ddp[0]}"
    assert ours[1] <= max(of_ddp[1], 0), f"descriptors; plain DDP: {of_ddp[1]}"
