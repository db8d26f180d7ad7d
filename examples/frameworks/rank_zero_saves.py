"""Rank 0 alone saves: ``torchrun --nproc-per-node 2 examples/frameworks/rank_zero_saves.py DIR``; again to resume."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
file = Path(sys.argv[1]) / "checkpoint.pt"
model = DistributedDataParallel(nn.Linear(16, 1))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
first = 0
if file.is_file():
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, first + 10):
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
optimizer.consolidate_state_dict()  # on all ranks, before state_dict()
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": first + 10}, file)
    print(f"steps {first} to {first + 10}")
dist.destroy_process_group()
