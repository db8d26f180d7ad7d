"""mmengine: ``torchrun --nproc-per-node 2 examples/frameworks/mmengine_runner.py DIR``; run it again to resume."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from onecopy import ZeroRedundancyOptimizer
from onecopy.integrations.mmengine import ConsolidatedCheckpoints


class Model(BaseModel):
    """A model with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def forward(self, inputs: Tensor, targets: Tensor, mode: str = "loss") -> dict[str, Tensor]:  # noqa: ARG002
        """Return the loss."""
        return {"loss": (self.layer(inputs) - targets).square().mean()}


os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # mmengine saves objects that torch.load refuses by default
resumes = (Path(sys.argv[1]) / "last_checkpoint").is_file()
inputs = torch.randn(64, 16)
samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
optimizer = {"type": ZeroRedundancyOptimizer, "optimizer_class": torch.optim.AdamW, "lr": 1e-2}
dist.init_process_group("gloo")  # with GPUs, launcher="pytorch" does this and the next line's wrapping
runner = Runner(
    model=MMDistributedDataParallel(Model()),
    work_dir=sys.argv[1],
    train_dataloader=DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples)),
    train_cfg={"by_epoch": True, "max_epochs": 2 if resumes else 1},
    optim_wrapper={"type": "OptimWrapper", "optimizer": optimizer},
    custom_hooks=[ConsolidatedCheckpoints()],
    resume=resumes,
)
runner.train()
