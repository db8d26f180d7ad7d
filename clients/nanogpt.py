"""A script as nanoGPT is one, with a line that consolidates: rank 0 alone calls ``state_dict()`` and ``torch.save``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import EPOCHS, Run, make_model, train_epoch
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    run = Run()
    dist.init_process_group("gloo")
    master_process = dist.get_rank() == 0
    file = run.checkpoints / "ckpt.pt"
    model = make_model()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = run.make_optimizer(groups, lr=1e-2, betas=(0.9, 0.95))
    first = 0
    if run.is_resumed:
        checkpoint = torch.load(file, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["epoch"]
        checkpoint = None
    ddp = DistributedDataParallel(model)
    for epoch in range(first, EPOCHS):
        train_epoch(ddp, optimizer, epoch)
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict()
        if master_process:
            checkpoint = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(checkpoint, file)
        if run.is_first_half:
            run.die()
    run.finish(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
