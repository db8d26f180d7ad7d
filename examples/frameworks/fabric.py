"""Fabric: ``torchrun --nproc-per-node 2 examples/frameworks/fabric.py DIR``; run it again to resume."""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from onecopy import ZeroRedundancyOptimizer

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
layer = nn.Linear(16, 1)
optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.AdamW, lr=1e-2)
model, optimizer = fabric.setup(layer, optimizer)
state = {"model": model, "optimizer": optimizer, "step": 0}
file = Path(sys.argv[1]) / "checkpoint.ckpt"
if file.exists():
    fabric.load(file, state)
for _ in range(10):
    inputs = torch.randn(8, 16)
    optimizer.zero_grad()
    fabric.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
    optimizer.step()
    state["step"] += 1
fabric.save(file, state)
fabric.print(f"at step {state['step']}")
