"""The process group of the simulated accelerator behaves as NCCL does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import device
from tests.accelerator.harness import HYBRID, SIMCCL, simulated

AHEAD = pytest.mark.parametrize("host_ahead", [0, 5, "far"])


def train(where: str, group: Any, optimizer_class: Any, steps: int = 3) -> list[torch.Tensor]:
    """Train a small model with DDP and return its parameters on the CPU."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).to(where)
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = optimizer_class(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        wrapped(torch.randn(4, 5).to(where)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@AHEAD
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
@simulated(2)
def test_ddp_gives_the_bits_of_the_cpu(world_size: int, host_ahead: Any, optimizer_class: Any) -> None:
    expected = train("cpu", dist.new_group(backend="gloo"), optimizer_class)
    with device.simulate(seed=3, host_ahead=host_ahead) as run:
        actual = train("sim", None, optimizer_class)
    assert run.reports == []
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)
