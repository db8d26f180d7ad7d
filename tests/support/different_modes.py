"""Ranks that train in different modes, in a ``fail_together`` block: nothing compares them before they wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import (
    ReduceScatter,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    fail_together,
    hook_with_zero_step,
    reduce_scatter_hook,
)
from onecopy.comm import loop_watch
from tests.support.failing_loops import LIMIT, Outcome
from tests.support.harness import Pool
from tests.support.serving import allreduce


def _zero(module: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=0.01, **options)


def _ddp(register: Callable[[Any, Any], object], **options: Any) -> Any:
    """Construct DDP, then an optimizer, and give both to a function."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    register(ddp, _zero(ddp, **options))
    return ddp


def _sharded_at_the_end(is_first: bool) -> Any:
    module = nn.Linear(4, 4)
    zero = _zero(module)
    return DistributedDataParallel(module) if is_first else ShardedDataParallel(module, zero)


def _nothing(*_: Any) -> None:
    pass


def _sharded() -> Any:
    module = nn.Linear(4, 4)
    return ShardedDataParallel(module, _zero(module))


MODES: dict[str, tuple[Callable[[bool], Any], str, str]] = {
    "DDP and ShardedDataParallel": (
        lambda is_first: _ddp(_nothing) if is_first else _sharded(),
        "DistributedDataParallel() at ",
        "ZeroRedundancyOptimizer() at ",
    ),
    "reduce_scatter_hook on one rank": (
        lambda is_first: _ddp(
            lambda ddp, zero: ddp.register_comm_hook(zero, reduce_scatter_hook) if is_first else None
        ),
        "ReduceScatter() in backward() at ",
        "backward() at ",
    ),
    "DDP and ShardedDataParallel over one optimizer": (
        _sharded_at_the_end,
        "DistributedDataParallel() at ",
        "ShardedDataParallel() at ",
    ),
    "ReduceScatter on one rank": (
        lambda is_first: _ddp(lambda _, zero: ReduceScatter(zero) if is_first else None),
        "ReduceScatter() at ",
        "backward() at ",
    ),
    "an overlap hook on one rank": (
        lambda is_first: _ddp(
            lambda ddp, zero: hook_with_zero_step(allreduce, ddp, zero) if is_first else None, overlap_with_ddp=True
        ),
        "hook_with_zero_step() at ",
        "backward() at ",
    ),
}
"""How each mode is made on the first and on the other ranks, and the call in which each of both waits."""


def problem_of(mode: str, world_size: int, blocked_seconds: float = loop_watch.SECONDS) -> tuple[float, str]:
    """Train in different modes on fresh processes; return the longest time to an error, and what is wrong with it."""
    _, first, other = MODES[mode]
    pool = Pool(world_size)
    try:
        found: list[Outcome] = pool.run(__name__, "train", {"mode": mode, "blocked_seconds": blocked_seconds}, LIMIT)
    finally:
        pool.close()
    for each in found:
        calls = [f"rank 0: {first}", *(f"rank {rank}: {other}" for rank in range(1, world_size))]
        if each.error != "RanksDisagreeError" or not all(call in each.text for call in calls):
            return each.seconds, f"{mode}, {world_size} ranks: {each}"
    return max(each.seconds for each in found), ""


def train(mode: str, blocked_seconds: float) -> Outcome:
    """Construct everything, and run a pass."""
    loop_watch.SECONDS = blocked_seconds
    make, _, _ = MODES[mode]
    begun = time.monotonic()
    error: BaseException | None = None
    try:
        with fail_together():
            model = make(dist.get_rank() == 0)
            model(torch.ones(2, 4)).sum().backward()
    except BaseException as caught:
        error = caught
    return Outcome(time.monotonic() - begun, type(error).__name__, str(error), 0)
