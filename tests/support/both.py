"""A sharded and a plain optimizer of one class, to which everything is done alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.models import assert_equal


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def set_gradients(optimizer: Optimizer, step: int, grad_like: Callable[[Tensor], Tensor] = as_it_is) -> None:
    """Give every parameter a gradient, the same on every rank; ``grad_like`` may give it other strides."""
    for position, param in enumerate(tensors_of(optimizer)):
        generator = torch.Generator().manual_seed(10 * step + position)
        param.grad = grad_like(torch.randn(param.shape, dtype=param.dtype, generator=generator))


class Both:
    """A sharded and a plain optimizer over equal parameters, with equal gradients."""

    def __init__(
        self, make_params: Callable[[], Any], optimizer_class: Any, options: dict[str, Any], **ours: Any
    ) -> None:
        self.ours = ZeroRedundancyOptimizer(make_params(), optimizer_class, **options, **ours)
        self.plain: Optimizer = optimizer_class(make_params(), **options)
        self.steps = 0
        self.grad_like: Callable[[Tensor], Tensor] = as_it_is

    @property
    def optimizers(self) -> tuple[Any, Any]:
        return self.ours, self.plain

    def step(self) -> None:
        self.steps += 1
        for optimizer in self.optimizers:
            set_gradients(optimizer, self.steps, self.grad_like)
            optimizer.step()

    def check(self) -> None:
        assert_equal(tensors_of(self.ours), tensors_of(self.plain), "after training")
