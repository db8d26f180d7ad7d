"""Uses of the public interface for a type checker; this file is checked, never run."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer
from typing_extensions import assert_type

from onecopy import Shard, ZeroRedundancyOptimizer


def construct(model: torch.nn.Module) -> ZeroRedundancyOptimizer:
    ZeroRedundancyOptimizer(model.parameters(), torch.nn.Linear)  # type: ignore[arg-type]
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, shard_by=3)  # type: ignore[arg-type]
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=None, lr=1e-3)


def loss() -> float:
    return 1.0


def take(plain: Optimizer, joinable: Joinable) -> None: ...


def use(optimizer: ZeroRedundancyOptimizer, param: torch.Tensor) -> None:
    take(optimizer, optimizer)
    assert_type(optimizer.step(closure=loss), float)
    nothing: None = assert_type(optimizer.step(), None)
    assert nothing is None

    assert_type(optimizer.optim, Optimizer)
    assert_type(optimizer.state_dict(), dict[str, Any])
    assert_type(optimizer.join_hook(), JoinHook)
    assert_type(optimizer.join_device, torch.device)
    assert_type(optimizer.state[param], Any)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert_type(optimizer.layout.owned_by(0), tuple[Shard, ...])
