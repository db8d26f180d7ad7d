"""Lightning's Trainer; with the variant ``strategy`` it saves through ``onecopy.integrations.lightning``."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from common import BATCH, EPOCHS, Run, make_model, make_samples
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.net = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = self.run.make_optimizer(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class DieInSecondEpoch(Callback):
    def on_train_epoch_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.run.die()


def strategy_of(run: Run) -> Any:
    if run.variant == "trainer":
        return "ddp"
    from onecopy.integrations.lightning import ShardedStrategy

    return ShardedStrategy(shard_gradients=run.variant == "sharded")


def main() -> None:
    run = Run("trainer", "strategy", "sharded")
    warnings.simplefilter("ignore")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(run),
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(run.checkpoints, filename="{epoch}", every_n_epochs=1, save_top_k=-1),
            *([DieInSecondEpoch()] if run.is_first_half else []),
        ],
    )
    module = Module(run)
    path = run.checkpoints / "epoch=0.ckpt" if run.is_resumed else None
    trainer.fit(module, DataLoader(make_samples(), batch_size=BATCH, shuffle=True), ckpt_path=path)
    run.finish(module)


if __name__ == "__main__":
    main()
