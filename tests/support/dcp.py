"""A small model with a sharded optimizer, for torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint


def make(way: str, seed: int = 0, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any]:
    """A small model with a channels-last weight, and its optimizer."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 70, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module = nn.Sequential(conv, nn.Flatten(), nn.Linear(280, 40), nn.ReLU(), nn.Linear(40, 10))
    sharding = {} if way == "wrapped" else {"shard_by": way}
    zero = ZeroRedundancyOptimizer(module.parameters(), optimizer, **{"lr": 1e-2, **sharding, **options})
    return (ShardedDataParallel(module, zero, bucket_bytes=4000) if way == "wrapped" else module), zero


def train(model: nn.Module, zero: ZeroRedundancyOptimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        zero.zero_grad()
        model(torch.randn(4, 3, 4, 4)).square().mean().backward()
        zero.step()


def full_state(model: nn.Module, zero: ZeroRedundancyOptimizer) -> Any:
    return checkpoint.get_optimizer_state_dict(model, zero, options=StateDictOptions(full_state_dict=True))
