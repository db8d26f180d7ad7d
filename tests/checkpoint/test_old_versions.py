"""Checkpoints that earlier versions have written, and that every later version must be able to load.

``tests/fixtures/README.md`` says how they were written.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint
from tests.support.harness import distributed
from tests.support.models import assert_same_tree
from tests.support.paths import FIXTURES

OLD = sorted(folder.name for folder in FIXTURES.glob("checkpoint-*"))
SAVED = {"float32": (1, "zero"), "bfloat16": (2, "sharded")}
"""By the type of the model: the step under which it was saved, and the kind of optimizer that did."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Small(nn.Module):
    """Two weights, one of them channels-last, a bias and a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.conv = nn.Conv2d(2, 4, 3, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, number: int) -> Tensor:
        """A loss whose gradients are made up and the same on all ranks."""
        generator = torch.Generator().manual_seed(number)
        loss = torch.zeros(())
        for param in self.parameters():
            loss = loss + (param * torch.randn(param.shape, generator=generator)).sum()
        return loss


def make(kind: str, dtype: torch.dtype, seed: int = 9) -> tuple[nn.Module, Small, Optimizer]:
    """The model as it is saved, the module inside, and its optimizer of two groups.

    A plain optimizer has no master weights: its model is float32.
    """
    torch.manual_seed(seed)
    module = Small()
    if kind != "plain":
        for param in module.parameters():
            param.data = param.data.to(dtype)
    groups = [{"params": module.wide.parameters()}, {"params": module.conv.parameters(), "weight_decay": 0.0}]
    if kind == "plain":
        return module, module, AdamW(groups, **ADAMW)
    zero = ZeroRedundancyOptimizer(groups, AdamW, shard_by="element", master_weights=dtype != torch.float32, **ADAMW)
    return (ShardedDataParallel(module, zero) if kind == "sharded" else module), module, zero


def scheduler_of(optimizer: Optimizer) -> MultiStepLR:
    return MultiStepLR(optimizer, milestones=[1, 5], gamma=0.5)


def state_of(optimizer: Optimizer) -> Any:
    """The plain state dict, on rank 0."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else None


def write(folder: str) -> None:
    """Write the checkpoints and, in a file of torch.save, what must come out of them. On two ranks."""
    expected: dict[str, Any] = {}
    for name, (step, kind) in SAVED.items():
        model, module, optimizer = make(kind, getattr(torch, name), seed=0)
        scheduler = scheduler_of(optimizer)
        for number in range(2):
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
            scheduler.step()
        module.seen += torch.tensor([1.0, 2.0, 3.0])
        position = {"sample": 10 + dist.get_rank()}
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        extra = checkpoint.capture(scheduler=scheduler, position=position) | {"epoch": (4, "five")}
        extra["random numbers"].value.pop("numpy")  # to keep the files small
        if name != "float32":
            del extra["random numbers"]
        checkpoint.save(folder, step, model=model, optimizer=optimizer, extra=extra)
        expected[name] = {"model": module.state_dict(), "optimizer": state_of(optimizer)}
    if dist.get_rank() == 0:
        torch.save(expected, Path(folder) / "expected.pt")


def drawn_on(group_rank: int) -> tuple[Tensor, float]:
    """The first random numbers after those that were saved."""
    return torch.rand(3, generator=torch.Generator().manual_seed(group_rank)), random.Random(group_rank).random()


@pytest.mark.parametrize("version", OLD)
@distributed(1, 2, 3)
def test_every_number_of_ranks_and_every_optimizer_loads_it(world_size: int, version: str) -> None:
    for precision in SAVED:
        for kind in ("zero", "sharded", "plain"):
            load_and_compare(FIXTURES / version, kind, precision)


def load_and_compare(folder: Path, kind: str, precision: str) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)[precision]
    state, masters = expected["optimizer"], expected["optimizer"].get("master_weights", {})
    model, module, optimizer = make(kind, getattr(torch, precision))
    scheduler = scheduler_of(optimizer)
    step, _ = SAVED[precision]
    loaded = checkpoint.load(folder / f"step-{step:08}", model=model, optimizer=optimizer)
    position = checkpoint.restore(loaded.extra, scheduler=scheduler)
    values = expected["model"]
    if kind == "plain" and masters:  # then the float32 model has the float32 values
        names = [name for name, _ in module.named_parameters()]
        values = {**values, **{names[index]: value for index, value in masters.items()}}
        state = {key: value for key, value in state.items() if key != "master_weights"}
    assert loaded.step == step
    assert loaded.extra["epoch"] == (4, "five")
    assert_same_tree(dict(module.state_dict()), dict(values), f"model of {kind}")
    found = state_of(optimizer)
    if dist.get_rank() == 0:
        groups = zip(found["param_groups"], state["param_groups"], strict=True)  # torch may have got new options since
        found["param_groups"] = [{key: mine[key] for key in mine if key in theirs} for mine, theirs in groups]
        assert_same_tree(found, state, f"state of {kind}")
    assert scheduler.last_epoch == 2
    assert scheduler.get_last_lr() == [5e-3, 5e-3]
    assert [each["position"] for each in loaded.per_rank] == [{"sample": 10}, {"sample": 11}]
    if dist.get_world_size() != 2:
        assert position is None
        return
    assert position == {"sample": 10 + dist.get_rank()}
    if precision == "float32":
        numbers, number = drawn_on(dist.get_rank())
        assert torch.equal(torch.rand(3), numbers)
        assert random.random() == number


def test_there_is_a_checkpoint_of_each_version_and_every_byte_of_it_is_right() -> None:
    assert "checkpoint-0.1" in OLD
    for version in OLD:
        for step, _ in SAVED.values():
            assert checkpoint.verify(FIXTURES / version / f"step-{step:08}") > 0
