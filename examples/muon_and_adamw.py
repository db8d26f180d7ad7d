"""Muon for the matrices and AdamW for the rest, in one optimizer object, which is sharded.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/muon_and_adamw.py
"""

from __future__ import annotations

import torch
from shared_parts import loss_of, make_model, run

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.optim import Muon, matrix_groups


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    groups = matrix_groups(module, matrix={"optimizer_class": Muon, "lr": 2e-2}, other={"lr": 1e-2}, head=None)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW)
    model = ShardedDataParallel(module, optimizer)  # or DistributedDataParallel(module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)  # for the groups of both classes
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # one norm over all
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
