r"""Train with Ray Train, on as many workers as the cluster has room for.

Needs ``pip install 'onecopy[ray]'``. On a machine of the Ray cluster::

    python examples/ray_train.py --root DIRECTORY_THAT_ALL_MACHINES_SEE --workers 1 4

When a worker dies or a machine joins, Ray Train ends all workers and starts them again, at least one and at most four.
They load the newest checkpoint and go on in the middle of the epoch. Each step has the same samples on any number of
workers. docs/clusters.md explains how ``checkpoint.save`` and ``ray.train.report`` share the work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from onecopy import ZeroRedundancyOptimizer, checkpoint

SAMPLES, BATCH, SAVE_EVERY = 100, 12, 5  # samples of the data set, and of a batch of all workers together


def train(config: dict[str, Any]) -> None:
    """Train on one worker. Ray Train has made the process group."""
    root, rank, world_size = config["root"] / "onecopy", dist.get_rank(), dist.get_world_size()
    data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(data, data.sin().sum(1, keepdim=True))
    torch.manual_seed(0)  # the same weights on every worker
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-2)
    sampler = checkpoint.ResumableSampler(SAMPLES, BATCH)
    world_sizes: list[int] = []  # the number of workers in each step

    loaded = checkpoint.load(root, model=model, optimizer=optimizer, missing_ok=True)
    if loaded is not None:
        checkpoint.restore(loaded.extra, sampler=sampler)
        world_sizes = loaded.extra["world_sizes"]

    for _ in range(sampler.epoch, config["epochs"]):
        for inputs, targets in DataLoader(dataset, batch_sampler=sampler):
            optimizer.zero_grad()
            losses = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
            (losses * world_size / BATCH).backward()  # DDP divides by world_size: the mean over the batch
            optimizer.step()
            sampler.advance()
            world_sizes.append(world_size)
            time.sleep(config["pause"])
            step = sampler.position // BATCH
            if step % SAVE_EVERY == 0:
                extra = {**checkpoint.capture(sampler=sampler), "world_sizes": world_sizes}
                path = checkpoint.save(root, step, model=model, optimizer=optimizer, extra=extra, keep=2)
                with tempfile.TemporaryDirectory() as folder:  # Ray keeps only the name of the checkpoint
                    pointer = Checkpoint(folder)
                    pointer.set_metadata({"onecopy": str(path)})
                    report({"step": step, "loss": losses.item() / len(inputs)}, pointer if rank == 0 else None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="the directory for checkpoints")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), help="the smallest and the largest number")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to watch the workers")
    parser.add_argument("--resize-every", type=float, default=60.0, help="seconds between two looks for new machines")
    arguments = parser.parse_args()
    arguments.root = arguments.root.resolve()  # workers run in other directories
    workers = ScalingConfig(
        num_workers=tuple(arguments.workers), elastic_resize_monitor_interval_s=arguments.resize_every
    )
    failures, kept = FailureConfig(max_failures=3), CheckpointConfig(num_to_keep=2)
    run = RunConfig(name="ray", storage_path=str(arguments.root), failure_config=failures, checkpoint_config=kept)
    result = TorchTrainer(train, train_loop_config=vars(arguments), scaling_config=workers, run_config=run).fit()
    print(f"{result.metrics} in {result.checkpoint.get_metadata()['onecopy']}")


if __name__ == "__main__":
    main()
