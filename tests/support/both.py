"""A sharded and a plain optimizer of one class, to which everything is done alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.models import assert_equal

BUCKET_VIEWS = pytest.mark.parametrize("bucket_view", [False, True])
POLICIES = pytest.mark.parametrize("shard_by", ["parameter", "element"])

GradLike = Callable[[Tensor, Tensor], Tensor]
"""Returns a gradient with the values of another one; it gets the parameter, too."""


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters; one that a group has several times is there once."""
    return list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))


def as_it_is(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient


def as_the_parameter(gradient: Tensor, param: Tensor) -> Tensor:
    """The same values with the strides of the parameter."""
    return torch.empty_like(param.detach()).copy_(gradient)


def set_gradients(optimizer: Optimizer, step: int, grad_like: GradLike = as_it_is) -> None:
    """Give every parameter a gradient, the same on every rank; ``grad_like`` may give it other strides."""
    for position, param in enumerate(tensors_of(optimizer)):
        generator = torch.Generator().manual_seed(10 * step + position)
        param.grad = grad_like(torch.randn(param.shape, dtype=param.dtype, generator=generator), param)


class Both:
    """A sharded and a plain optimizer over equal parameters, with equal gradients."""

    def __init__(
        self, make_params: Callable[[], Any], optimizer_class: Any, options: dict[str, Any], **ours: Any
    ) -> None:
        self.ours = ZeroRedundancyOptimizer(make_params(), optimizer_class, **options, **ours)
        self.plain: Optimizer = optimizer_class(make_params(), **options)
        self.steps = 0
        self.grad_like: GradLike = as_it_is

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


class Tensors(Both):
    """Both over parameters with these values and strides."""

    def __init__(
        self,
        values: list[Tensor],
        optimizer_class: type[Optimizer] = Adam,
        grad_like: GradLike = as_it_is,
        **ours: Any,
    ) -> None:
        def copies() -> list[nn.Parameter]:
            empty = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) for value in values]
            return [nn.Parameter(each.copy_(value)) for each, value in zip(empty, values, strict=True)]

        super().__init__(copies, optimizer_class, {"lr": 0.1}, **ours)
        self.params, self.plain_params = tensors_of(self.ours), tensors_of(self.plain)
        self.grad_like = grad_like

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.step()
        self.check()
        assert [param.stride() for param in self.params] == [plain.stride() for plain in self.plain_params]
