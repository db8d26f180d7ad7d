"""A plain script that saves as PyTorch's tutorial says: all ranks consolidate where that exists, then rank 0 saves.

The variants are the classes with 8-bit state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import EPOCHS, Run, make_model, train_epoch
from torch.nn.parallel import DistributedDataParallel

FEATURES = 128  # so that weights have more elements than these classes keep in 32 bits


def inner_class(variant: str) -> Any:
    if variant == "bitsandbytes":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit
    if variant == "torchao":
        from torchao.optim import AdamW8bit

        return AdamW8bit
    return torch.optim.AdamW


def main() -> None:
    run = Run("adamw", "bitsandbytes", "torchao")
    dist.init_process_group("gloo")
    file = run.checkpoints / "checkpoint.pt"
    model = DistributedDataParallel(make_model(256, FEATURES))
    optimizer = run.make_optimizer(model.parameters(), inner_class(run.variant), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    first = 0
    if run.is_resumed:
        saved = torch.load(file, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = 1
    for epoch in range(first, EPOCHS):
        train_epoch(model, optimizer, epoch, FEATURES)
        scheduler.step()
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "scheduler": scheduler.state_dict()}, file)
        if run.is_first_half:
            run.die()
    run.finish(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
