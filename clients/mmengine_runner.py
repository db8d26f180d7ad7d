"""mmengine's Runner with its OptimWrapper; the variant ``subclass`` consolidates as mmengine's own subclass does.

mmengine's launcher calls ``torch.cuda.set_device``, so that on CPUs the script makes the process group and wraps the
model.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from common import BATCH, EPOCHS, Run, make_model, make_samples
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import Tensor, nn

import onecopy


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


class Subclass(onecopy.ZeroRedundancyOptimizer):
    """What mmengine's subclass of torch's class does, with onecopy's class as its base."""

    def __init__(self, params: Any, optimizer_type: str, **options: Any) -> None:
        super().__init__(list(params), getattr(torch.optim, optimizer_type), **options)

    def state_dict(self) -> dict[str, Any]:
        self.consolidate_state_dict()
        return super().state_dict() if self.rank == 0 else {}


def optimizer_of(run: Run) -> dict[str, Any]:
    if run.optimizer == "plain":
        return {"type": "AdamW", "lr": 1e-2}
    if run.optimizer == "torch":
        return {"type": "ZeroRedundancyOptimizer", "optimizer_type": "AdamW", "lr": 1e-2}
    if run.variant == "subclass":
        return {"type": Subclass, "optimizer_type": "AdamW", "lr": 1e-2}
    return {"type": onecopy.ZeroRedundancyOptimizer, "optimizer_class": torch.optim.AdamW, "lr": 1e-2}


def main() -> None:
    run = Run("class", "subclass")
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
        custom_hooks=[Die(run)] if run.is_first_half else None,
        randomness={"seed": 0},
        resume=run.is_resumed,
        log_level="ERROR",
    )
    runner.train()
    run.finish(runner.model)


if __name__ == "__main__":
    main()
