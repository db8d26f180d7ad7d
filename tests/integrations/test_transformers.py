"""The callbacks for transformers' Trainer, called as Trainer does; ``make clients`` runs them in Trainer itself."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from onecopy import ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.models import assert_equal, small_model


class Training:
    """A model, a sharded optimizer and a scheduler, and the arguments of a callback's methods."""

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
    first, second = Training(), Training()
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

    training, tell = Training(), getattr(ConsolidatedCheckpoints(), way)
    args: Any = SimpleNamespace(save_only_model=False, save_strategy="best" if way == "on_evaluate" else "steps")
    training.train(2)
    if way != "on_evaluate":
        tell(args, None, SimpleNamespace(should_save=False), **training.objects)
        with pytest.raises(RuntimeError, match="was not gathered"):
            training.optimizer.state_dict()
    tell(args, None, SimpleNamespace(should_save=True), **training.objects)
    if dist.get_rank() == 0:  # as Trainer does
        assert sorted(training.optimizer.state_dict()["state"]) == [0, 1, 2, 3]
