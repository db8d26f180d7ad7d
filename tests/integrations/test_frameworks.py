"""How frameworks call an optimizer to save and resume, without the frameworks; ``make clients`` runs the frameworks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.check_gpu import start
from tests.support.harness import distributed, takes_long
from tests.support.models import assert_equal, small_model
from tests.support.paths import ROOT

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


def consolidates_if_it_can(optimizer: Any) -> Any:
    """Lightning and Fabric look for the method; Ignite looks for torch's class and names the rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchClass  # warns before onecopy is imported

    assert isinstance(optimizer, TorchClass)
    assert hasattr(optimizer, "consolidate_state_dict")
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}


PATTERNS = (rank_zero_alone, every_rank_asks, consolidates_if_it_can)


@pytest.mark.parametrize("way", ["ddp", "ddp, frozen", "sharded"])
@pytest.mark.parametrize("pattern", PATTERNS)
@distributed(2)
def test_a_run_is_saved_and_resumed(world_size: int, pattern: Callable[[Any], Any], way: str, tmp_path: Path) -> None:
    """Each run trains half, saves, loads into a new model and optimizer, and ends as plain AdamW in one go does."""
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


class Trainer:
    """Calls the callbacks as transformers' Trainer does: a model, a sharded optimizer and a scheduler."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(small_model())
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), AdamW, lr=0.01)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)
        wrapped = SimpleNamespace(optimizer=self.optimizer)  # as Accelerate wraps it
        self.objects = {"model": self.model.module, "optimizer": wrapped, "lr_scheduler": self.scheduler}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()


@distributed(2)
@pytest.mark.parametrize("epoch", [1.0, 1.5])
def test_training_resumes_with_optimizer_scheduler_and_random_numbers(
    world_size: int, epoch: float, tmp_path: Path
) -> None:
    from onecopy.integrations.transformers import ShardedCheckpoints

    args = SimpleNamespace(output_dir=str(tmp_path), save_only_model=True)
    first, second = Trainer(), Trainer()
    torch.manual_seed(dist.get_rank())
    first.train(3)
    state = SimpleNamespace(global_step=3, epoch=epoch)
    for _ in range(2):  # again, as a run that has gone back to an older checkpoint does
        ShardedCheckpoints().on_save(args, state, None, **first.objects)
    second.model.load_state_dict(first.model.state_dict())  # Trainer does this
    first.train(2)

    resumed = ShardedCheckpoints()
    for call in (resumed.on_train_begin, resumed.on_epoch_begin, resumed.on_step_begin):
        call(args, state, None, **second.objects)
        if epoch == 1.5 and call != resumed.on_step_begin:
            torch.rand(7)  # Trainer skips batches
    second.train(2)
    assert_equal(second.model.parameters(), first.model.parameters(), "resumed")
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()

    wrong = SimpleNamespace(output_dir=str(tmp_path), save_only_model=False)
    with pytest.raises(ValueError, match=re.escape("TrainingArguments(save_only_model=True)")):
        ShardedCheckpoints().on_save(wrong, state, None, **first.objects)


@distributed(2)
@pytest.mark.parametrize("way", ["on_step_end", "on_epoch_end", "on_evaluate"])
def test_the_state_is_gathered_when_trainer_saves(world_size: int, way: str) -> None:
    from onecopy.integrations.transformers import ConsolidatedCheckpoints

    training, tell = Trainer(), getattr(ConsolidatedCheckpoints(), way)
    args: Any = SimpleNamespace(save_only_model=False, save_strategy="best" if way == "on_evaluate" else "steps")
    training.train(2)
    if way != "on_evaluate":
        tell(args, None, SimpleNamespace(should_save=False), **training.objects)
        with pytest.raises(RuntimeError, match="was not gathered"):
            training.optimizer.state_dict()
    tell(args, None, SimpleNamespace(should_save=True), **training.objects)
    if dist.get_rank() == 0:  # as Trainer does
        assert sorted(training.optimizer.state_dict()["state"]) == [0, 1, 2, 3]


@takes_long
def test_the_example_without_a_framework_runs_and_resumes(tmp_path: Path) -> None:
    for _ in range(2):
        done = start([str(ROOT / "examples/frameworks/rank_zero_saves.py"), str(tmp_path)])
        assert done.returncode == 0, done.stderr
