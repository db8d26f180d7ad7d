"""Measure the processor time of ``step()`` on the host with the tensors of real models, beside torch's class."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import AdamW

from onecopy.bench.models import PARAMETER_SHAPES, Shape
from onecopy.bench.variants import LR
from onecopy.optimizer import ZeroRedundancyOptimizer

ALONE = "AdamW by itself, half of the tensors"
PEER = "torch's class, bucket views"
DIVISOR = 16
"""Every dimension of at least this size is divided by it before ``step()`` is measured."""
SWEPT_BYTES = 64 << 20
"""Bytes that are written before each measured step, so that caches are as cold as after a backward pass."""


class Stopwatch:
    """Adds up the processor time of this thread inside some functions; waiting does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure a ``with`` block."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - start

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is measured."""

        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            with self.running():
                return function(*arguments, **options)

        return measured


def _narrow(shape: Shape) -> Shape:
    """Return a shape with every large dimension divided by ``DIVISOR``."""
    return tuple(size // DIVISOR if size >= DIVISOR else size for size in shape)


def host_time(rounds: int) -> list[dict[str, Any]]:
    """Measure the processor time of ``step()`` on two ranks, whole and beside AdamW's own ``step()``.

    There are as many tensors as in real models, but each is narrow. With the real shapes, AdamW's arithmetic and the
    copies of the messages would hide the host time that is measured here. A consequence is that nearly all tensors are
    small enough to be packed into common messages.

    Every figure is the least of all rounds, because noise only ever adds to processor time.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    rows = []
    swept = torch.zeros(SWEPT_BYTES // 4)
    inner = Stopwatch()
    # Before the first instance, whose constructor wraps it, so that every call is measured.
    AdamW.step = inner.around(AdamW.step)  # type: ignore[method-assign]
    for model, real_shapes in PARAMETER_SHAPES.items():
        shapes = [_narrow(shape) for shape in real_shapes]
        contenders = {
            ALONE: _contender(AdamW, shapes[::2], inner),
            "torch's class": _contender(TorchZero, shapes, inner, bucket_view=False),
            PEER: _contender(TorchZero, shapes, inner, bucket_view=True),
            "onecopy": _contender(ZeroRedundancyOptimizer, shapes, inner, bucket_view=False),
            "onecopy, bucket views": _contender(ZeroRedundancyOptimizer, shapes, inner, bucket_view=True),
        }
        for _ in range(2):
            for step in contenders.values():
                step()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in contenders.items():
                # The first step restores the state of the memory allocator, which the contender before has changed.
                step()
                swept.add_(1.0)
                found[name].append(step())
        rows += [
            {
                "kind": "alone" if name == ALONE else "overhead",
                "variant": name,
                "model": model,
                "tensors": len(shapes),
                "seconds": min(beside for beside, _ in steps),
                "whole": min(whole for _, whole in steps),
            }
            for name, steps in found.items()
        ]
    return rows


def _contender(
    cls: Any, shapes: Sequence[Shape], inner: Stopwatch, bucket_view: bool | None = None
) -> Callable[[], tuple[float, float]]:
    """Return a function that makes one step and returns its seconds beside AdamW's ``step()``, and all its seconds."""
    params = [torch.nn.Parameter(torch.full(shape, float(index))) for index, shape in enumerate(shapes)]
    sharded = {} if bucket_view is None else {"optimizer_class": AdamW, "parameters_as_bucket_view": bucket_view}
    optimizer = cls(params, lr=LR, fused=True, **sharded)
    for param in params:
        param.grad = torch.ones_like(param)

    def step() -> tuple[float, float]:
        inner.seconds = 0.0
        whole = Stopwatch()
        with whole.running():
            optimizer.step()
        return whole.seconds - inner.seconds, whole.seconds

    return step
