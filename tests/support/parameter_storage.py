"""Models in unusual memory formats, beside a plain optimizer over equal parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.both import Both, as_it_is, tensors_of

BOTH = pytest.mark.parametrize("bucket_view", [False, True])
POLICIES = pytest.mark.parametrize("shard_by", ["parameter", "element"])


class Net(nn.Module):
    """A convolution large enough to be cut by element, and a few small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 20, 3)
        self.square = nn.Linear(20, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images.to(self.conv.weight.dtype)).mean(dim=(2, 3))
        result: Tensor = self.head(self.square(hidden).tanh())
        return result


class Twins:
    """Equal models, one with a plain optimizer and one with ours, that see equal inputs."""

    def __init__(self, optimizer_class: type[Optimizer] = Adam, **ours: Any) -> None:
        torch.manual_seed(1)
        self.model, self.plain_model = Net(), Net()
        self.plain_model.load_state_dict(self.model.state_dict())
        self.plain = optimizer_class(self.plain_model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.ours = ZeroRedundancyOptimizer(self.model.named_parameters(), optimizer_class, lr=0.1, **ours)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        """Do the same to both models."""
        change(self.model)
        change(self.plain_model)

    def backward(self) -> None:
        images = torch.randn(2, 8, 6, 6)
        for model in (self.model, self.plain_model):
            model.zero_grad()
            model(images).square().sum().backward()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.backward()
            self.ours.step()
            self.plain.step()
        self.check()

    def check(self) -> None:
        for (name, param), plain in zip(self.model.named_parameters(), self.plain_model.parameters(), strict=True):
            assert param.dtype == plain.dtype
            assert torch.equal(param, plain), name


class Tensors(Both):
    """The same for bare parameters with random gradients."""

    def __init__(
        self,
        values: list[Tensor],
        optimizer_class: type[Optimizer] = Adam,
        grad_like: Callable[[Tensor], Tensor] = as_it_is,
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


def storages(model: nn.Module) -> set[int]:
    return {param.untyped_storage().data_ptr() for param in model.parameters()}
