"""Level 2: one more line. Gradients are reduce-scattered, so a step sends no more bytes than plain DDP.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/level_2.py
"""

from __future__ import annotations

import torch
from shared_parts import loss_of, make_model, run
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    model.register_comm_hook(optimizer, onecopy.reduce_scatter_hook)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        # Each rank has the gradients of its own shards only. torch.nn.utils.clip_grad_norm_ would find another norm.
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
