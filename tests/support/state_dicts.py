"""Pairs of a sharded and a plain optimizer that train alike, and bitwise comparison of their state dicts."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.both import Both, as_the_parameter, tensors_of
from tests.support.models import values

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


class Pair(Both):
    """A plain optimizer and ours over equal named parameters with equal gradients."""

    def __init__(
        self,
        factory: Factory | None = None,
        names: Iterable[str] = SHAPES,
        group: dist.ProcessGroup | None = None,
        options: dict[str, Any] | None = None,
        **ours: Any,
    ) -> None:
        factory = factory or part(Adam, lr=0.1)
        defaults = {**factory.keywords, **(options or {})}
        super().__init__(lambda: make_params(names).items(), factory.func, defaults, process_group=group, **ours)
        self.grad_like = as_the_parameter  # the strides of a momentum are those of the first gradient
        self.params = dict(zip(names, tensors_of(self.ours), strict=True))

    def train(self, steps: int = 2) -> Pair:
        for _ in range(steps):
            self.step()
        expect_same(values(tensors_of(self.ours)), values(tensors_of(self.plain)))
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

    def restart(self, values: Iterable[Tensor], steps: int) -> Pair:
        """Take over these parameters, and go on after so many steps; the state is not changed."""
        with torch.no_grad():
            for optimizer in self.optimizers:
                for param, value in zip(tensors_of(optimizer), values, strict=True):
                    param.copy_(value)
        self.steps = steps
        return self


def gathered(optimizer: ZeroRedundancyOptimizer, to: int = 0) -> dict[str, Any]:
    """The consolidated state dict on every rank of the optimizer, as a file would have it."""
    optimizer.consolidate_state_dict(to=to)
    buffer = io.BytesIO()  # torch's pickling between ranks cannot read fp8 tensors, torch.save can
    if optimizer.rank == to:
        torch.save(optimizer.state_dict(), buffer)
    found = [buffer.getvalue()]
    dist.broadcast_object_list(found, dist.get_global_rank(optimizer.process_group, to), optimizer.process_group)
    result: dict[str, Any] = torch.load(io.BytesIO(found[0]), weights_only=True)
    return result


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
