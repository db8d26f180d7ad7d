"""Accelerate: ``torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py DIR``; run it again to resume."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from onecopy import ZeroRedundancyOptimizer

accelerator = Accelerator(cpu=True)  # first: the optimizer needs the process group that this makes
layer = nn.Linear(16, 1)
optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.AdamW, lr=1e-2)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(layer, optimizer, loader)
accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())
folder = Path(sys.argv[1]) / "state"
if folder.is_dir():
    accelerator.load_state(str(folder))
for (inputs,) in loader:
    optimizer.zero_grad()
    accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
    optimizer.step()
accelerator.save_state(str(folder))
accelerator.print("saved")
accelerator.end_training()
