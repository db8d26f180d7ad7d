"""Overlap: parameters are updated inside the backward pass, bucket by bucket.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/overlapped_step.py
"""

from __future__ import annotations

import torch
from shared_parts import loss_of, make_model, run
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()  # waits for the updates that backward() has started
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
