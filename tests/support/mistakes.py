"""Mistakes that people make, made on real ranks: each function ends in the error that docs/troubleshooting.md shows."""

from __future__ import annotations

import copy
import re
import textwrap
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import (
    GradientsNotReducedWarning,
    ZeroRedundancyOptimizer,
    checkpoint,
    hook_with_zero_step,
)

WIDTH = 104
"""Characters in a line of a message on the page."""

BACKEND_TEXT = re.compile(r"(\[\S*/gloo/\S*\]|Application timeout|wait timeout).*", re.DOTALL)
"""The end of a message that comes from gloo: it has file names and port numbers."""


class Net(nn.Module):
    """A small model whose layers have names."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.head(self.encoder(batch).tanh())
        return result


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def trained(
    model: nn.Module | None = None, steps: int = 1, **options: Any
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """A model in DDP and its optimizer, after some steps."""
    model = DistributedDataParallel(Net()) if model is None else model
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().sum().backward()
        optimizer.step()
    return model, optimizer


def no_process_group(folder: Path) -> None:
    """In a process that belongs to no group."""
    ZeroRedundancyOptimizer(Net().parameters(), AdamW, lr=1e-3)


def different_gradients(folder: Path) -> None:
    model, optimizer = trained()
    model(batch()).sum().backward()
    if dist.get_rank() == 1:
        list(model.parameters())[2].grad = None
    optimizer.step()


def another_call(folder: Path) -> None:
    _, optimizer = trained()
    if dist.get_rank() == 0:
        checkpoint.save(folder / "run", 1, optimizer=optimizer)
    else:
        optimizer.step()


def no_call(folder: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    try:
        if dist.get_rank() == 0:
            checkpoint.save(folder / "run", 1, model=Net(), process_group=group)
    finally:
        dist.barrier()


def scaler_with_overlap(folder: Path) -> None:
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3, overlap_with_ddp=True)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch()).sum()).backward()
    scaler.step(optimizer)


def other_state_dict(folder: Path) -> None:
    other = AdamW(Net(width=9).parameters())
    for param in other.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    other.step()
    trained()[1].load_state_dict(other.state_dict())


def saved(folder: Path) -> Path:
    """A checkpoint of the model."""
    model, optimizer = trained()
    return checkpoint.save(folder / "run", 1, model=model, optimizer=optimizer)


def other_model(folder: Path) -> None:
    saved(folder)
    checkpoint.load(folder / "run", model=Net(width=9))


def step_exists(folder: Path) -> None:
    saved(folder)
    saved(folder)


def damaged(folder: Path) -> None:
    path = saved(folder) / "rank-00001.safetensors"
    if dist.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    dist.barrier()
    checkpoint.load(folder / "run", model=Net())


def zero(*arguments: Any, **options: Any) -> object:
    return ZeroRedundancyOptimizer(*arguments, **options)


def consumed() -> Any:
    params = Net().parameters()
    sum(param.numel() for param in params)
    return params


Mistake = Callable[[Path], object]
ALONE: list[Mistake] = [no_process_group]
TOGETHER: dict[str, Mistake] = {
    "no_ddp": lambda _: trained(Net(), steps=3),
    "consumed_generator": lambda _: zero(consumed(), AdamW, lr=1e-3),
    "no_class": lambda _: zero(Net().parameters(), lr=1e-3),
    "instance": lambda _: zero(Net().parameters(), AdamW(Net().parameters(), lr=1e-3)),
    "lbfgs": lambda _: zero(Net().parameters(), torch.optim.LBFGS),
    "different_options": lambda _: zero(Net().parameters(), AdamW, lr=1e-3 * (1 + dist.get_rank())),
    "not_gathered": lambda _: trained()[1].state_dict(),
    "pickled": lambda _: copy.deepcopy(trained()[1]),
    **{
        each.__name__: each
        for each in (
            *(different_gradients, another_call, no_call, scaler_with_overlap),
            *(other_state_dict, other_model, step_exists, damaged),
        )
    },
}


def message_of(mistake: Mistake, folder: Path) -> str:
    """Make a mistake, and return the error or warning as Python prints it; paths begin with ``/data``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientsNotReducedWarning)
        try:
            mistake(folder)
        except Exception as error:
            place = type(error).__module__
            name = type(error).__qualname__ if place == "builtins" else f"onecopy.{type(error).__qualname__}"
            text = BACKEND_TEXT.sub("...", str(error))
            return f"{name}: {text}".replace(str(folder), "/data")
    return ""


def messages_of_rank(folder: str) -> dict[str, str]:
    """In a rank: make all mistakes that several ranks make together."""
    return {name: message_of(mistake, Path(folder) / name) for name, mistake in TOGETHER.items()}


def on_page(messages: list[str]) -> str:
    """The messages of all ranks as a block of the page: one, unless they differ in more than the number of the rank."""
    shown: list[str] = []
    known: set[str] = set()
    for rank, message in enumerate(messages):
        same = {
            message.replace(f": rank {rank}: ", ": rank 0: ", 1),
            re.sub(rf"(rank |to=){rank}\b", r"\g<1>0", message),
        }
        if message and not same & known:
            shown.append(message)
        known |= same
    return "\n\n".join(textwrap.fill(message, WIDTH, break_long_words=False) for message in shown)
