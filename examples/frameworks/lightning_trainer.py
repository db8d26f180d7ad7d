"""Lightning: ``torchrun --nproc-per-node 2 examples/frameworks/lightning_trainer.py DIR``; run it again to resume."""

import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn

from onecopy import ZeroRedundancyOptimizer
from onecopy.integrations.lightning import ShardedStrategy


class Module(lightning.LightningModule):
    """A model with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss."""
        (inputs,) = batch
        return nn.functional.mse_loss(self.layer(inputs), inputs.sum(1, keepdim=True))

    def configure_optimizers(self) -> ZeroRedundancyOptimizer:
        """Return the sharded optimizer."""
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)


folder = Path(sys.argv[1])
file = folder / "last.ckpt"
epochs = 2 if file.exists() else 1
# strategy="ddp" works too. It gathers the state on rank 0 to save it.
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=ShardedStrategy(), max_epochs=epochs, default_root_dir=folder, logger=False
)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=8, shuffle=True)
trainer.fit(Module(), loader, ckpt_path=file if file.exists() else None)
trainer.save_checkpoint(file)
