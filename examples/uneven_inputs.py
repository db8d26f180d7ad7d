"""Uneven inputs: some ranks have more batches than others, and train on inside Join.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/uneven_inputs.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from shared_parts import loss_of, make_model, run
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from onecopy import ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank; rank r has 5 r batches more than rank 0."""
    module = make_model(device)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    losses = []
    with Join([model, optimizer], model=model):
        for step in range(steps + 5 * dist.get_rank()):
            optimizer.zero_grad()
            loss = loss_of(model, step, device)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
