"""Train a small GPT with Muon for its matrices and AdamW for the rest: with DDP and two optimizers, and in one object.

Start it with one process per device, or on the CPU (it needs ``pip install 'onecopy[demo]'``, for the table)::

    torchrun --standalone --nproc-per-node 2 examples/muon_gpt.py

With two ranks the losses are equal in every step: each matrix is whole on one rank, which updates it as plain Muon
does.
"""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from compare_levels import WORDS, Training, print_report
from gpt import GPT, Sizes
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, reduce_scatter_hook
from onecopy.optim import matrix_groups

MUON: dict[str, Any] = {"lr": 2e-2, "momentum": 0.95}
ADAMW: dict[str, Any] = {"lr": 1e-3}


class Both:
    """Two plain optimizers, as everybody writes it without onecopy."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        self.state = dict(chain.from_iterable(each.state.items() for each in optimizers))

    def zero_grad(self) -> None:
        """Reset all gradients."""
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        """Step both."""
        for each in self.optimizers:
            each.step()
        self.state = dict(chain.from_iterable(each.state.items() for each in self.optimizers))


def make(level: str, module: GPT) -> tuple[nn.Module, Any]:
    """Return the wrapped model and the optimizer."""
    groups = matrix_groups(module, matrix={"optimizer_class": torch.optim.Muon, **MUON}, other=ADAMW)
    if level == "DDP":
        matrices, others = (group["params"] for group in groups)
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        return model, Both(torch.optim.Muon(matrices, **MUON), AdamW(others, **ADAMW))
    optimizer = ZeroRedundancyOptimizer(groups, AdamW)
    if level == "level 3":
        return ShardedDataParallel(module, optimizer), optimizer
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if level == "level 2":
        model.register_comm_hook(optimizer, reduce_scatter_hook)
    return model, optimizer


def main() -> None:
    """Train in turns, and print the comparison on rank 0."""
    parser = argparse.ArgumentParser(description="Muon and AdamW in one object. Start it with torchrun.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    sizes = Sizes(len(WORDS), options.width, len(WORDS), depth=4, batch=4, length=32, positions=32)
    trainings = [Training(level, sizes, make) for level in ("DDP", "level 1", "level 2", "level 3")]
    if dist.get_rank() == 0:
        groups = matrix_groups(trainings[0].module, matrix={"optimizer_class": torch.optim.Muon}, other={})
        print(groups)
    for _ in range(options.steps):
        for training in trainings:
            training.step()
    if dist.get_rank() == 0:
        about = f"{sizes.elements() / 1e6:.2f}M parameters, Muon and AdamW, {dist.get_world_size()} ranks"
        console = Console()
        console.width = max(console.width, 100)
        print_report(console, about, trainings)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
