"""``torch.compile`` of ``optimizer.step``, and of a function that calls it: the result of the uncompiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from onecopy import ZeroRedundancyOptimizer
from tests.support.harness import distributed


def trained(compiled: Callable[[ZeroRedundancyOptimizer], Callable[[], Any]]) -> list[Tensor]:
    """The parameters after three steps with the step function that ``compiled`` makes."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    step = compiled(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        step()
    assert not optimizer.param_groups[0]["capturable"], "the compiler changed an option"
    return [param.detach() for param in model.parameters()]


def step_in_a_function(optimizer: ZeroRedundancyOptimizer) -> Callable[[], Any]:
    @torch.compile(backend="eager")
    def function() -> Tensor:
        optimizer.step()
        return torch.ones(1) + 1

    return function


@distributed(2)
def test_a_compiled_step_is_the_step(world_size: int) -> None:
    assert world_size == 2
    expected = trained(lambda optimizer: optimizer.step)
    for compiled in (lambda optimizer: torch.compile(optimizer.step, backend="eager"), step_in_a_function):
        for found, wanted in zip(trained(compiled), expected, strict=True):
            assert torch.equal(found, wanted)
