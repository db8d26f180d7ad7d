"""examples/zero_in_100_lines.py and onecopy train to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from onecopy import ZeroRedundancyOptimizer
from tests.support.examples import EXAMPLES, example
from tests.support.harness import distributed

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (AdamW, {"lr": 0.01}),
    "fused": (AdamW, {"lr": 0.01, "fused": True}),
}


class Model(nn.Module):
    """Layers of uneven sizes, a scalar, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(7, 129), nn.Linear(129, 3)
        self.scale, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(5))
        self.first.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(inputs).tanh()) * self.scale
        return result


def trained(kind: Any, name: str, rank: int) -> list[Tensor]:
    """The parameters after some steps, of an optimizer with two groups and a scheduler; None as kind is plain DDP."""
    module = Model()
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer_class, options = OPTIMIZERS[name]
    groups = [
        {"params": [*module.first.parameters(), module.unused], "weight_decay": 0.1},
        {"params": [*module.last.parameters(), module.scale], "lr": 0.03},
    ]
    optimizer = optimizer_class(groups, **options) if kind is None else kind(groups, optimizer_class, **options)
    scheduler = StepLR(optimizer, 2, 0.5)
    for step in range(6):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(4, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(1, 2, 3)
def test_it_trains_to_the_bits_of_onecopy_and_of_ddp(world_size: int, name: str) -> None:
    rank = torch.distributed.get_rank()
    simple = trained(example("zero_in_100_lines").SimpleZeRO, name, rank)
    for kind in (None, ZeroRedundancyOptimizer):
        for one, other in zip(simple, trained(kind, name, rank), strict=True):
            assert torch.equal(one, other)


@distributed(2)
def test_a_rank_has_the_state_of_its_range_only(world_size: int) -> None:
    module = Model()
    optimizer = example("zero_in_100_lines").SimpleZeRO(module.parameters(), AdamW, lr=0.01)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = sum(state["exp_avg"].numel() for state in optimizer.inner.state.values())
    assert held <= len(optimizer.own) <= 0.5 * sum(param.numel() for param in module.parameters()) + 5 * 64


def test_it_has_at_most_100_lines() -> None:
    assert len((EXAMPLES / "zero_in_100_lines.py").read_text().splitlines()) <= 100
