"""The ways in which frameworks call an optimizer to save and resume, without the frameworks.

Each trains half, saves, makes a new model and a new optimizer, loads and trains the rest. The parameters must equal
those of plain AdamW in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchClass
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.models import assert_equal, small_model

HALF = 3


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def make(way: str) -> tuple[nn.Module, Any]:
    model = small_model()
    if way.endswith("frozen"):
        model[0].weight.requires_grad = False  # as the base of LoRA
    trainable = [param for param in model.parameters() if param.requires_grad]
    if way.startswith("plain"):
        return DistributedDataParallel(model), AdamW(trainable, lr=0.01)
    optimizer = ZeroRedundancyOptimizer(trainable, AdamW, lr=0.01)
    return ShardedDataParallel(model, optimizer) if way == "sharded" else DistributedDataParallel(model), optimizer


def rank_zero_alone(optimizer: Any) -> Any:
    """nanoGPT, and transformers' Trainer with a callback that consolidates."""
    optimizer.consolidate_state_dict()
    return optimizer.state_dict() if dist.get_rank() == 0 else None


def every_rank_asks(optimizer: Any) -> Any:
    """Accelerate with a hook that consolidates: all ranks call ``state_dict()``, and rank 0 writes."""
    optimizer.consolidate_state_dict()
    return optimizer.state_dict()


def rank_zero_copies(optimizer: Any) -> Any:
    """Rank 0 rebuilds the dicts and lists of the state dict with tensors on the CPU, as mmengine does."""

    def to_cpu(value: Any) -> Any:
        if isinstance(value, dict):
            copied = type(value)()
            for key, inner in value.items():
                copied[key] = to_cpu(inner)
            return copied
        if isinstance(value, (tuple, list)):
            return type(value)(to_cpu(inner) for inner in value)
        return value.cpu() if hasattr(value, "cpu") else value

    return to_cpu(rank_zero_alone(optimizer))


def consolidates_if_it_can(optimizer: Any) -> Any:
    """Lightning and Fabric look for the method; Ignite looks for torch's class and names the rank."""
    assert isinstance(optimizer, TorchClass)
    assert hasattr(optimizer, "consolidate_state_dict")
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}


PATTERNS = (rank_zero_alone, every_rank_asks, rank_zero_copies, consolidates_if_it_can)


@pytest.mark.parametrize("way", ["ddp", "ddp, frozen", "sharded"])
@pytest.mark.parametrize("pattern", PATTERNS)
@distributed(2)
def test_a_run_is_saved_and_resumed(world_size: int, pattern: Callable[[Any], Any], way: str, tmp_path: Path) -> None:
    model, optimizer = make(way)
    # Accelerate does this in ``prepare``, to move the state to a device.
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 0, HALF)
    state, file = pattern(optimizer), tmp_path / "optimizer.pt"
    if dist.get_rank() == 0:
        torch.save(state, file)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, HALF, HALF + 1)  # the run goes on after a save
    dist.barrier()
    model, optimizer = make(way)
    model.load_state_dict(weights)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer, HALF, 2 * HALF)
    plain, plain_optimizer = make("plain, frozen" if way.endswith("frozen") else "plain")
    train(plain, plain_optimizer, 0, 2 * HALF)
    assert_equal(model.parameters(), plain.parameters(), way)


@distributed(2)
def test_a_subclass_that_consolidates_in_state_dict_works(world_size: int) -> None:
    """mmengine's own subclass of torch's class does this; it works if all ranks call ``state_dict()``."""

    class Consolidating(ZeroRedundancyOptimizer):
        def state_dict(self) -> dict[str, Any]:
            self.consolidate_state_dict()
            return super().state_dict() if self.rank == 0 else {}

    model = DistributedDataParallel(small_model())
    optimizer = Consolidating(model.parameters(), AdamW, lr=0.01)
    train(model, optimizer, 0, HALF)
    state = optimizer.state_dict()
    assert sorted(state) == (["param_groups", "state"] if dist.get_rank() == 0 else [])
