r"""Train so that torchrun can restart the run after a failure, and on more or fewer machines.

Run the same command on each of one or two machines. The second one may come later, or leave::

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 \
        examples/elastic.py --root DIRECTORY_THAT_ALL_MACHINES_SEE

When a process dies or a machine joins, torchrun ends all processes and starts them again. They load the newest
checkpoint and go on in the middle of the epoch. Each step has the same samples on any number of ranks. docs/clusters.md
explains the variable.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from onecopy import ZeroRedundancyOptimizer, checkpoint

SAMPLES, BATCH = 100, 12  # samples of the data set, and of a batch of all ranks together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="the directory for checkpoints")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for time to kill a process")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    train(arguments.root, arguments.epochs, arguments.save_every, arguments.pause)
    dist.destroy_process_group()


def train(root: Path, epochs: int = 3, save_every: int = 5, pause: float = 0.0) -> int:
    """Train from the newest checkpoint on, and return the step of that checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(SAMPLES), data, data.sin().sum(1, keepdim=True))
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    sampler = checkpoint.ResumableSampler(SAMPLES, BATCH)
    counts = torch.zeros(SAMPLES)  # how often each sample was used

    loaded = checkpoint.load(root, model=model, optimizer=optimizer, missing_ok=True)
    if loaded is not None:
        checkpoint.restore(loaded.extra, sampler=sampler)
        counts = loaded.extra["counts"]
    first_step = sampler.position // BATCH
    if rank == 0:
        print(f"from step {first_step} on {world_size} ranks", flush=True)

    for _ in range(sampler.epoch, epochs):
        for numbers, inputs, targets in DataLoader(dataset, batch_sampler=sampler):
            optimizer.zero_grad()
            losses = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
            (losses * world_size / BATCH).backward()  # DDP divides by world_size: the mean over the batch
            optimizer.step()
            sampler.advance()
            used = torch.bincount(numbers, minlength=SAMPLES).float()
            dist.all_reduce(used)
            counts += used
            step = sampler.position // BATCH
            if step % save_every == 0:
                extra = {**checkpoint.capture(sampler=sampler), "counts": counts}
                checkpoint.save(root, step, model=model, optimizer=optimizer, extra=extra, keep=2)
            time.sleep(pause)
    if rank == 0:
        print(f"to step {sampler.position // BATCH}: samples were used {counts.min():.0f} to {counts.max():.0f} times")
    return first_step


if __name__ == "__main__":
    main()
