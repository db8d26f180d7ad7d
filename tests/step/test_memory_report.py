"""``optimizer.memory_report()``: measured bytes of a rank beside those of plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, reduce_scatter_hook
from tests.support.harness import distributed

WIDTH = 64


def trained(
    level: int, optimizer_class: type[Optimizer], dtype: torch.dtype = torch.float32, frozen: int = 0, **options: Any
) -> tuple[ZeroRedundancyOptimizer, Any]:
    """An optimizer after two steps, with gradients, and its wrapped model."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 1500)).to(dtype)
    module[:frozen].requires_grad_(False)
    model: Any
    if level == 3:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class, lr=1e-3, **options)
        model = ShardedDataParallel(module, optimizer)
    else:
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=1e-3, **options)
        if level == 2:
            model.register_comm_hook(optimizer, reduce_scatter_hook)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
        optimizer.step()
    return optimizer, model


CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW with master weights": (AdamW, {"dtype": torch.bfloat16, "master_weights": True}),
    "amsgrad in bf16": (Adam, {"dtype": torch.bfloat16, "amsgrad": True}),
    "momentum": (SGD, {"momentum": 0.9}),
    "RMSprop": (RMSprop, {"centered": True, "momentum": 0.5}),
    "frozen layers": (AdamW, {"frozen": 3}),
}


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
@distributed(1, 2, 3)
def test_measured_bytes_are_a_share_of_those_predicted_for_ddp(world_size: int, level: int, case: str) -> None:
    optimizer_class, options = CASES[case]
    optimizer, _model = trained(level, optimizer_class, **options)
    report = optimizer.memory_report()
    assert report.measured["parameters"] == pytest.approx(report.ddp["parameters"], rel=0.02)
    assert all(report.measured[kind] for kind in ("parameters", "gradients", "state"))
    assert report.measured["state"] * world_size == pytest.approx(report.ddp["state"], rel=0.05)
    shared = world_size if level == 3 else 1
    assert report.measured["gradients"] * shared == pytest.approx(report.ddp["gradients"], rel=0.05)
    assert bool(report.measured["master weights"]) == ("master_weights" in options)
    has_frozen = report.measured["gradients"] * shared < 0.95 * report.measured["parameters"]
    assert has_frozen == ("frozen" in options)
    assert (report.group_rank, report.world_size) == (optimizer.rank, world_size)


class Unknown(torch.optim.SGD):
    """A class that the planner does not know."""


@distributed(2)
def test_it_prints_as_a_table_and_says_what_is_missing(world_size: int) -> None:
    optimizer, _model = trained(1, AdamW)
    if optimizer.rank == 0:
        assert optimizer.memory_report().in_flight >= 0  # it needs no other rank
    text = str(optimizer.memory_report())
    assert text.startswith(f"memory of rank {optimizer.rank} of {world_size}\n")
    for word in ("plain DDP", "measured", "parameters", "gradients", "state", "total", "in flight"):
        assert word in text, text
    optimizer.zero_grad()
    assert "there are no gradients now" in str(optimizer.memory_report())
    optimizer, _model = trained(1, Unknown, momentum=0.9, elementwise=True)
    report = optimizer.memory_report()
    assert report.ddp["state"] is None
    assert report.measured["state"] > 0
    assert str(report).count(" - ") == 2  # the state and the total
