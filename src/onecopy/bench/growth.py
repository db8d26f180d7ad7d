"""How costs grow: planning with parameters and ranks, the Python of a step with parameters. Beside torch's class."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import AdamW

from onecopy.bench.variants import LR
from onecopy.comm import limits
from onecopy.layout import ParamSpec, extend, plan_buckets
from onecopy.optimizer import ZeroRedundancyOptimizer

PARAMETERS = (10, 100, 1000, 10_000, 100_000)
RANKS = (1, 16, 256, 4096, 16_384)
MOST_SHARDS = 2_000_000
"""Layouts of more shards than this are not planned: every rank has a shard of every parameter."""
TENSORS = (10, 100, 1000, 5000)
ALONE = "AdamW by itself, a half of them"
PEER = "torch's class, bucket views"
SWEPT_BYTES = 64 << 20
"""Written before each step, so that caches are as cold as after a backward pass, whoever had the turn before."""


def specs_of(count: int) -> list[ParamSpec]:
    """As in a transformer: a few large matrices among many vectors."""
    shapes = ((4096, 1024), (1024,), (1024, 1024), (1024,), (4096,))
    return [
        ParamSpec(index, f"p{index}", shape, (shape[-1], 1) if len(shape) == 2 else (1,), torch.float32)
        for index, shape in ((index, shapes[index % len(shapes)]) for index in range(count))
    ]


def planning() -> list[dict[str, Any]]:
    """Seconds that each policy takes to plan a layout; no processes."""
    rows = []
    for count in PARAMETERS:
        specs = specs_of(count)
        order = list(reversed(range(count)))
        for ranks in RANKS:
            plans: dict[str, Callable[[], object]] = {
                "parameter": lambda specs=specs, ranks=ranks: extend(None, specs, ranks, "parameter", True),  # type: ignore[misc]
                "element": lambda specs=specs, ranks=ranks: extend(None, specs, ranks, "element", True),  # type: ignore[misc]
                "bucket": lambda specs=specs, order=order, ranks=ranks: plan_buckets(  # type: ignore[misc]
                    specs, order, ranks, True, limits.BUCKET_BYTES
                ),
            }
            for policy, plan in plans.items():
                if policy != "parameter" and count * ranks > MOST_SHARDS:
                    continue
                start = time.perf_counter()
                plan()
                seconds = time.perf_counter() - start
                rows.append(
                    {"kind": "planning", "policy": policy, "parameters": count, "ranks": ranks, "seconds": seconds}
                )
    return rows


class Stopwatch:
    """The processor time of this thread inside a function: waiting is not in it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure a block."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - start

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, measured."""

        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            with self.running():
                return function(*arguments, **options)

        return measured


def step_overhead(rounds: int) -> list[dict[str, Any]]:
    """Processor time of ``step()`` in whole and beside AdamW's own, for many small parameters, on two ranks.

    And what AdamW takes by itself for what one rank owns, a half of them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    rows = []
    swept = torch.zeros(SWEPT_BYTES // 4)
    inner = Stopwatch()
    # Before the first instance, which wraps it: whoever calls it, with however many tensors, it is measured.
    AdamW.step = inner.around(AdamW.step)  # type: ignore[method-assign]
    for count in TENSORS:
        contenders = {
            ALONE: _contender(AdamW, count // 2, inner),
            "torch's class": _contender(TorchZero, count, inner, bucket_view=False),
            PEER: _contender(TorchZero, count, inner, bucket_view=True),
            "onecopy": _contender(ZeroRedundancyOptimizer, count, inner, bucket_view=False),
            "onecopy, bucket views": _contender(ZeroRedundancyOptimizer, count, inner, bucket_view=True),
        }
        for _ in range(2):
            for step in contenders.values():
                step()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, step in contenders.items():
                # The one before has left free memory in disorder; in training everyone comes after itself.
                step()
                swept.add_(1.0)
                found[name].append(step())
        rows += [
            {
                "kind": "alone" if name == ALONE else "overhead",
                "variant": name,
                "tensors": count,
                "seconds": statistics.median(beside for beside, _ in steps),
                "whole": statistics.median(whole for _, whole in steps),
            }
            for name, steps in found.items()
        ]
    return rows


def _contender(
    cls: Any, count: int, inner: Stopwatch, bucket_view: bool | None = None
) -> Callable[[], tuple[float, float]]:
    """A function that makes one step and returns what it took beside AdamW's own ``step``, and in whole."""
    params = [torch.nn.Parameter(torch.full((64,), float(index))) for index in range(count)]
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
