"""Level 1: the one changed line in a DDP script. The optimizer state is sharded.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/level_1.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from shared_parts import loss_of, make_model, run
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    model = DistributedDataParallel(module)
    # Before: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(optimizer.layout)  # the owner of every range of every parameter
    return losses


if __name__ == "__main__":
    run(train)
