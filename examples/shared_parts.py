"""The parts that the examples share: process group and device, a small model, a batch and its loss."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def run(train: Callable[[torch.device], list[float]]) -> None:
    """Initialise the process group, train on this rank's device, and print the first and the last loss of rank 0."""
    dist.init_process_group()  # NCCL for GPUs, gloo for CPUs
    losses = train(device_of_this_rank())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
    dist.destroy_process_group()


def device_of_this_rank() -> torch.device:
    """Return this rank's accelerator, or the CPU if there is none."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return device


def make_model(device: torch.device) -> nn.Module:
    """Return a small model with the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).to(device)


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """Return the loss of this rank's batch: the model learns the sine of the mean of its inputs."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(64, 64, generator=generator).to(device)
    return nn.functional.mse_loss(model(inputs).float(), inputs.mean(1, keepdim=True).mul(8).sin())
