"""Lightning Fabric: ``fabric.save`` and ``fabric.load`` with the model and the optimizer in one dict."""

from __future__ import annotations

import warnings
from typing import Any

from common import BATCH, EPOCHS, Run, make_model, make_samples
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    run = Run()
    warnings.simplefilter("ignore")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = make_model()
    model, optimizer = fabric.setup(net, run.make_optimizer(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(make_samples(), batch_size=BATCH))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    file = run.checkpoints / "checkpoint.ckpt"
    if run.is_resumed:
        fabric.load(file, state)
    for epoch in range(state["epoch"], EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
        fabric.save(file, {**state, "epoch": epoch + 1})
        if run.is_first_half:
            run.die()
    run.finish(net)


if __name__ == "__main__":
    main()
