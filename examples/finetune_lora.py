"""Fine-tune a model with LoRA, and save only the adapters and their optimizer state.

Start it, and start it again with more steps::

    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py --root adapters

The second run loads the adapters of the first and goes on. With ``--base-seed 1`` the frozen layers have other values,
and the load is refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer, checkpoint


class LoRALinear(nn.Module):
    """A frozen linear layer, and a trainable product of two small matrices that is added to its weight."""

    def __init__(self, base: nn.Linear, width: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, width, bias=False)
        self.up = nn.Linear(width, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the frozen layer plus the adapter's."""
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="the directory for checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--base-seed", type=int, default=0)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(arguments.base_seed)  # in place of a file with pretrained weights
    first, second = nn.Linear(64, 512), nn.Linear(512, 64)
    model = DistributedDataParallel(nn.Sequential(LoRALinear(first), nn.GELU(), LoRALinear(second)))
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = ZeroRedundancyOptimizer(adapters, AdamW, lr=1e-2)

    loaded = checkpoint.load(arguments.root, model=model, optimizer=optimizer, missing_ok=True)
    start = 0 if loaded is None else loaded.step
    for step in range(start, arguments.steps):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sin())
        loss.backward()
        optimizer.step()
    if arguments.steps > start:
        folder = checkpoint.save(arguments.root, arguments.steps, model=model, optimizer=optimizer, trainable_only=True)
        if dist.get_rank() == 0:
            count = sum(param.numel() for param in model.parameters())
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"from step {start} to {arguments.steps}: loss {loss.item():.6f}, ", end="")
            print(f"{4 * count:,} bytes of parameters, {size:,} bytes of checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
