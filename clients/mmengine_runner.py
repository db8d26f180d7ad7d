"""mmengine's Runner with its OptimWrapper; the optimizer's ``type`` is a class or, as in config files, a name.

mmengine's launcher calls ``torch.cuda.set_device``, so that on CPUs the script makes the process group and wraps the
model.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, Run, make_model, make_samples
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner
from torch import Tensor, nn

import onecopy
from onecopy.integrations.mmengine import ConsolidatedCheckpoints


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "loss") -> dict[str, Tensor]:  # noqa: ARG002
        return {"loss": nn.functional.mse_loss(self.net(inputs), targets)}


class Die(Hook):
    priority = "LOWEST"

    def __init__(self, run: Run) -> None:
        self.run = run

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            self.run.die()


class Consolidate(Hook):
    """Consolidates on all ranks before CheckpointHook, whose priority is lower, saves on rank 0."""

    def after_train_epoch(self, runner: Any) -> None:
        if hasattr(runner.optim_wrapper.optimizer, "consolidate_state_dict"):
            runner.optim_wrapper.optimizer.consolidate_state_dict()


def sharded(params: Any, optimizer_type: str, **options: Any) -> onecopy.ZeroRedundancyOptimizer:
    """What a user registers, so that a config file has names only."""
    return onecopy.ZeroRedundancyOptimizer(params, getattr(torch.optim, optimizer_type), **options)


OPTIMIZERS.register_module(module=sharded, force=True)  # force: a fork runs this script a second time


def optimizer_of(run: Run) -> dict[str, Any]:
    if run.optimizer == "plain":
        return {"type": "AdamW" if run.variant == "name" else torch.optim.AdamW, "lr": 1e-2}
    if run.variant != "name":
        return {"type": run.sharding_class(), "optimizer_class": torch.optim.AdamW, "lr": 1e-2}
    # mmengine has registered a subclass of torch's class, which consolidates in state_dict().
    name = "ZeroRedundancyOptimizer" if run.optimizer == "torch" else "sharded"
    return {"type": name, "optimizer_type": "AdamW", "lr": 1e-2}


def hooks_of(run: Run) -> list[Hook]:
    if run.variant == "hook":
        return [Consolidate()]
    return [ConsolidatedCheckpoints()] if run.optimizer == "onecopy" else []


def main() -> None:
    run = Run("class", "hook", "name")
    # mmengine reads its checkpoints with torch.load, whose default refuses the objects that mmengine saves in them.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    runner = Runner(
        model=MMDistributedDataParallel(Model()),
        work_dir=str(run.checkpoints),
        train_dataloader={
            "batch_size": BATCH,
            "dataset": make_samples(),
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS},
        optim_wrapper={"type": "OptimWrapper", "optimizer": optimizer_of(run), "clip_grad": {"max_norm": 0.5}},
        param_scheduler={"type": "StepLR", "step_size": 1, "gamma": 0.5},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        custom_hooks=[Die(run)] * run.is_first_half + hooks_of(run),
        randomness={"seed": 0},
        resume=run.is_resumed,
        log_level="ERROR",
    )
    runner.train()
    run.finish(runner.model)


if __name__ == "__main__":
    main()
