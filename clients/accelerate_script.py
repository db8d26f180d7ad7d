"""Accelerate: ``save_state`` and ``load_state``, with a hook that consolidates or a call before."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import BATCH, EPOCHS, Run, make_model, make_samples
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    run = Run("hook", "consolidate")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    net = make_model()
    optimizer = run.make_optimizer(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader: Any = DataLoader(make_samples(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    is_sharded = hasattr(optimizer.optimizer, "consolidate_state_dict")
    if run.variant == "hook" and is_sharded:
        accelerator.register_save_state_pre_hook(lambda *_: optimizer.optimizer.consolidate_state_dict())
    folder, first = run.checkpoints / "state", 0
    if run.is_resumed:
        accelerator.load_state(str(folder))
        first = 1
    for _ in range(first, EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if run.variant == "consolidate" and is_sharded:
            optimizer.optimizer.consolidate_state_dict()
        accelerator.save_state(str(folder))
        if run.is_first_half:
            run.die()
    run.finish(net)
    accelerator.end_training()


if __name__ == "__main__":
    main()
