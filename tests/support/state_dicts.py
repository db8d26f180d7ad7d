"""Pairs of a sharded and a plain optimizer that train alike, and bitwise comparison of their state dicts."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from onecopy import ZeroRedundancyOptimizer

Factory = functools.partial[Optimizer]
"""An optimizer class and its options."""

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((60, 40), torch.float32),
    "image": ((16, 8, 3, 3), torch.float32),  # in channels-last
    "wave": ((40, 30), torch.complex64),
    "half": ((50, 30), torch.bfloat16),
    "double": ((1100,), torch.float64),
    "small": ((7,), torch.float32),
    "scalar": ((), torch.float32),
    "nothing": ((0, 3), torch.float32),
}


def make_params(names: Iterable[str] = SHAPES) -> dict[str, nn.Parameter]:
    """Parameters of many kinds; most are large enough to be cut."""
    params = {}
    for name in names:
        shape, dtype = SHAPES[name]
        value = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(name)))
        if name == "image":
            value = value.to(memory_format=torch.channels_last)
        params[name] = nn.Parameter(value)
    return params


class Pair:
    """A plain optimizer and ours over equal parameters with equal gradients."""

    def __init__(
        self,
        factory: Factory | None = None,
        names: Iterable[str] = SHAPES,
        group: dist.ProcessGroup | None = None,
        options: dict[str, Any] | None = None,
        **ours: Any,
    ) -> None:
        self.params, self.plain_params = make_params(names), make_params(names)
        factory = factory or part(Adam, lr=0.1)
        optimizer_class: Any = factory.func
        defaults = {**factory.keywords, **(options or {})}
        self.ours = ZeroRedundancyOptimizer(
            self.params.items(), optimizer_class, process_group=group, **defaults, **ours
        )
        self.plain = optimizer_class(self.plain_params.items(), **defaults)
        self.steps = 0

    def train(self, steps: int = 2) -> Pair:
        for _ in range(steps):
            self.steps += 1
            for position, (name, param) in enumerate(self.params.items()):
                generator = torch.Generator().manual_seed(100 * self.steps + position)
                gradient = torch.empty_like(param).detach()
                gradient.copy_(torch.randn(param.shape, dtype=param.dtype, generator=generator))
                param.grad, self.plain_params[name].grad = gradient, gradient.clone()
            self.ours.step()
            self.plain.step()
        for name, param in self.params.items():
            expect_same(param.detach(), self.plain_params[name].detach())
        return self

    def consolidated(self, to: int = 0) -> dict[str, Any]:
        """Our state dict, on the group rank to which it goes; elsewhere an empty dict."""
        self.ours.consolidate_state_dict(to=to)
        return self.ours.state_dict() if self.ours.rank == to else {}

    def expect_plain(self, to: int = 0) -> None:
        """Our consolidated state dict is the plain optimizer's."""
        state_dict = self.consolidated(to)
        if self.ours.rank == to:
            expect_same(state_dict, self.plain.state_dict())

    def restart(self, source: Pair) -> Pair:
        """Take over where ``source`` stands, but for our optimizer's state."""
        with torch.no_grad():
            for name in self.params:
                self.params[name].copy_(source.plain_params[name])
                self.plain_params[name].copy_(source.plain_params[name])
        self.plain.load_state_dict(copy.deepcopy(source.plain.state_dict()))
        self.steps = source.steps
        return self


def expect_same(value: Any, expected: Any) -> None:
    """Equal bit by bit and type by type, through tuples, lists and dicts."""
    assert type(value) is type(expected), (value, expected)
    if isinstance(value, Tensor):
        assert (value.dtype, value.shape, value.device) == (expected.dtype, expected.shape, expected.device)
        if value.numel() > 1:
            assert value.stride() == expected.stride()
        assert torch.equal(bits(value), bits(expected)), (value, expected)
    elif isinstance(value, dict):
        assert value.keys() == expected.keys()
        for key in value:
            expect_same(value[key], expected[key])
    elif isinstance(value, (tuple, list)):
        assert len(value) == len(expected)
        for item, other in zip(value, expected, strict=True):
            expect_same(item, other)
    elif isinstance(value, float) and math.isnan(value):
        assert math.isnan(expected)
    else:
        assert value == expected


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def part(optimizer_class: type[Optimizer], **options: Any) -> Factory:
    return functools.partial(optimizer_class, **options)
