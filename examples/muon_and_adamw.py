"""Two optimizers for one model: Muon for the matrices, AdamW for the rest. Both are sharded.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/muon_and_adamw.py
"""

from __future__ import annotations

import torch
from shared_parts import loss_of, make_model, run

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    matrices = [param for param in module.parameters() if param.dim() == 2]
    others = [param for param in module.parameters() if param.dim() != 2]
    muon = ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=2e-2)  # keeps each matrix whole on one rank
    adamw = ZeroRedundancyOptimizer(others, torch.optim.AdamW, lr=1e-3)
    model = ShardedDataParallel(module, [muon, adamw])  # or DistributedDataParallel(module)
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        model.clip_grad_norm_(1.0)  # one norm over both optimizers
        muon.step()
        adamw.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
