"""Train so that the run can be stopped at any time and resumed with the same command, on any number of ranks.

Start it, kill it, start it again::

    torchrun --standalone --nproc-per-node 2 examples/resume.py --root checkpoints

Every few steps a checkpoint is written in the background. At the start the newest checkpoint is loaded, if there is
one, and training continues from it. With as many ranks as before the result is the same bit by bit, dropout included.
With another number of ranks each batch consists of the same samples, but sums are rounded differently and each rank
draws new dropout masks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from onecopy import ZeroRedundancyOptimizer, checkpoint

BATCH = 12  # samples of all ranks together


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's samples of a step; all ranks together have the same samples, whatever their number."""
    inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
    mine = inputs[dist.get_rank() :: dist.get_world_size()]
    return mine, mine.sin().sum(1, keepdim=True)


def digest_of(model: nn.Module) -> str:
    """Return a hash of the model's parameters."""
    text = hashlib.sha256()
    for param in model.parameters():
        text.update(param.detach().numpy().tobytes())
    return text.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="the directory for checkpoints and losses")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--crash-at", type=int, help="the last rank kills itself at this step, in the first run")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(arguments.dropout), nn.Linear(64, 1))
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=arguments.steps)
    torch.manual_seed(1 + rank)  # different dropout on every rank

    first, losses = 0, []
    loaded = checkpoint.load(arguments.root, model=model, optimizer=optimizer, missing_ok=True)
    resumed = loaded is not None
    if loaded is not None:
        first, extra = loaded
        checkpoint.restore(extra, scheduler=scheduler)
        losses = extra["losses"]

    for step in range(first + 1, arguments.steps + 1):
        inputs, targets = batch_of(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        if step == arguments.crash_at and not resumed and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % arguments.save_every == 0:
            extra = {**checkpoint.capture(scheduler=scheduler), "losses": losses}
            checkpoint.save(arguments.root, step, model=model, optimizer=optimizer, extra=extra, keep=2, blocking=False)
    checkpoint.wait()

    if rank == 0:
        (arguments.root / "losses.txt").write_text("\n".join(map(repr, losses)) + "\n")
        print(f"from step {first} to {arguments.steps} on {world_size} ranks: loss {losses[-1]:.6f}, ", end="")
        print(f"parameters {digest_of(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
