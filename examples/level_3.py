"""Level 3: gradients are sharded, too. Updated parameters arrive while the next forward pass runs.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/level_3.py
"""

from __future__ import annotations

import torch
from shared_parts import loss_of, make_model, run

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    model = ShardedDataParallel(module, optimizer, overlap_forward=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
        optimizer.step()
        losses.append(loss.item())
    optimizer.wait()  # before other code reads the parameters
    return losses


if __name__ == "__main__":
    run(train)
