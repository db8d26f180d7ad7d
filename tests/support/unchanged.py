"""A training whose whole state can be compared before and after a call that is refused."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.failures import named, parameter

VARIANTS: tuple[dict[str, Any], ...] = (
    {"shard_by": "parameter"},
    {"shard_by": "element", "parameters_as_bucket_view": True},
)
"""Arguments of the optimizer under which a refused call must leave everything alone."""


class Training:
    """A plain optimizer and ours over equal parameters, with equal gradients; the first parameter may be cut."""

    def __init__(self, optimizer_class: type[Optimizer] = Adam, **ours: Any) -> None:
        self.params = [parameter(64, 40), parameter(7), parameter(3, 5)]
        self.plain_params = [nn.Parameter(param.detach().clone()) for param in self.params]
        self.ours = ZeroRedundancyOptimizer(named(*self.params), optimizer_class, lr=0.1, **ours)
        self.plain = optimizer_class(named(*self.plain_params), lr=0.1)  # type: ignore[call-arg]
        self.steps = 0
        self.train()

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.steps += 1
            generator = torch.Generator().manual_seed(self.steps)
            for param, plain in zip(self.params, self.plain_params, strict=True):
                param.grad = torch.randn(param.shape, generator=generator)
                plain.grad = param.grad.clone()
            self.ours.step()
            self.plain.step()
        self.check()

    def check(self) -> None:
        for param, plain in zip(self.params, self.plain_params, strict=True):
            assert torch.equal(param, plain)

    def snapshot(self) -> list[Any]:
        """Everything of this rank that a refused call must leave alone, with where the memory is."""
        state = [
            (name, value.clone() if isinstance(value, Tensor) else value)
            for param in self.params
            for name, value in self.ours.state[param].items()
        ]
        places = [param.data_ptr() for param in self.params]
        groups = [
            [copy.deepcopy({key: value for key, value in group.items() if key != "params"}), len(group["params"])]
            for group in (*self.ours.param_groups, *self.ours.optim.param_groups)
        ]
        values = [param.detach().clone() for param in self.params]
        return [state, places, groups, values, self.ours.layout, len(self.ours.optim.state)]
