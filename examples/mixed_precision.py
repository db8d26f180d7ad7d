"""Mixed precision: bf16 parameters and gradients, fp32 master weights that only their owner has.

Start it with one process per device, or on the CPU::

    torchrun --standalone --nproc-per-node 2 examples/mixed_precision.py
"""

from __future__ import annotations

import torch
from shared_parts import loss_of, make_model, run

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train and return the losses of this rank."""
    module = make_model(device)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    # With DDP instead: ZeroRedundancyOptimizer(module.bfloat16().parameters(), ..., master_weights=True)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = ShardedDataParallel(module, optimizer, mixed_precision=precision)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())
    return losses


if __name__ == "__main__":
    run(train)
