"""The ways in which frameworks call an optimizer to save and resume, without the frameworks.

Each pattern trains half, saves, makes a new model and a new optimizer, loads and trains the rest. The parameters must
equal those of plain AdamW in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.models import small_model

HALF = 3


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def plain_result(freeze: bool) -> list[torch.Tensor]:
    model = make_model(freeze)
    wrapped = DistributedDataParallel(model)
    train(wrapped, AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01), 0, 2 * HALF)
    return [param.detach() for param in model.parameters()]


def make_model(freeze: bool = False) -> nn.Sequential:
    model = small_model()
    if freeze:
        model[0].weight.requires_grad = False  # as the base of LoRA
    return model


def rank_zero_alone(optimizer: Any, file: Path) -> None:
    """nanoGPT, and transformers' Trainer with a callback that consolidates."""
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), file)


def every_rank_asks(optimizer: Any, file: Path) -> None:
    """Accelerate with a hook that consolidates: all ranks call ``state_dict()``, and rank 0 writes."""
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, file)


def rank_zero_copies(optimizer: Any, file: Path) -> None:
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

    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        torch.save(to_cpu(optimizer.state_dict()), file)


def consolidates_if_it_can(optimizer: Any, file: Path) -> None:
    """Lightning and Fabric look for the method; Ignite looks for torch's class and names the rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchClass

    assert isinstance(optimizer, TorchClass)
    assert hasattr(optimizer, "consolidate_state_dict")
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if dist.get_rank() == 0 else {}
    if dist.get_rank() == 0:
        torch.save(state, file)


PATTERNS: dict[str, Callable[[Any, Path], None]] = {
    function.__name__: function
    for function in (
        rank_zero_alone,
        every_rank_asks,
        rank_zero_copies,
        consolidates_if_it_can,
    )
}


def expect_resumed(make: Callable[[], tuple[nn.Module, Any]], pattern: str, file: Path, freeze: bool) -> None:
    model, optimizer = make()
    train(model, optimizer, 0, HALF)
    PATTERNS[pattern](optimizer, file)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, optimizer, HALF, HALF + 1)  # the run goes on after a save
    dist.barrier()
    model, optimizer = make()
    model.load_state_dict(weights)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer, HALF, 2 * HALF)
    for name, found, expected in zip(weights, model.parameters(), plain_result(freeze), strict=True):
        assert torch.equal(found.detach(), expected), name


@distributed(2)
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_run_is_saved_and_resumed(world_size: int, pattern: str, freeze: bool, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = make_model(freeze)
        trainable = [param for param in model.parameters() if param.requires_grad]
        return DistributedDataParallel(model), ZeroRedundancyOptimizer(trainable, AdamW, lr=0.01)

    expect_resumed(make, pattern, tmp_path / "optimizer.pt", freeze)


@distributed(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_run_with_sharded_gradients_is_saved_and_resumed(world_size: int, pattern: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = make_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
        return ShardedDataParallel(model, optimizer), optimizer

    expect_resumed(make, pattern, tmp_path / "optimizer.pt", freeze=False)


@distributed(2)
def test_a_state_dict_is_loaded_back_before_the_first_step(world_size: int) -> None:
    """Accelerate does this in ``prepare``, to move the state to a device."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    state = optimizer.state_dict()
    assert dict(state["state"]) == {}
    optimizer.load_state_dict(state)
    train(model, optimizer, 0, 2 * HALF)
    for found, expected in zip(model.module.parameters(), plain_result(False), strict=True):
        assert torch.equal(found.detach(), expected)


@distributed(2)
def test_a_subclass_that_consolidates_in_state_dict_works(world_size: int) -> None:
    """mmengine's own subclass of torch's class does this; it works if all ranks call ``state_dict()``."""

    class Consolidating(ZeroRedundancyOptimizer):
        def state_dict(self) -> dict[str, Any]:
            self.consolidate_state_dict()
            return super().state_dict() if self.rank == 0 else {}

    model = DistributedDataParallel(make_model())
    optimizer = Consolidating(model.parameters(), AdamW, lr=0.01)
    train(model, optimizer, 0, HALF)
    state = optimizer.state_dict()
    assert sorted(state) == (["param_groups", "state"] if dist.get_rank() == 0 else [])
