"""Gradients to their owners: what the reduce-scatter hook does with each bucket that DDP hands it.

The exchange of a bucket starts when DDP calls, in the same order on all ranks. Its end (adding up, writing the owned
ranges back into the bucket) comes at the last call, on the thread that runs the backward pass: no other thread touches
anything, and everything that a GradScaler or a clipping function may look at is there when backward returns.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from onecopy.engine.bucketing import BucketMap, BucketMaps, GradBucket
from onecopy.engine.collectives import Reduction, Work
from onecopy.engine.core import Engine
from onecopy.engine.lanes import Lane


@dataclass(frozen=True, slots=True)
class _Pending:
    """A bucket under way. What the transfers read and write must live until they have ended."""

    map: BucketMap
    buffer: Tensor
    reduction: Reduction
    foreign: tuple[Work, Tensor] | None
    future: Future[Tensor]


class GradientReducer:
    """Reduces DDP's buckets so that each rank receives what it owns; the rest of ``param.grad`` stays unreduced."""

    def __init__(self, engines: Sequence[Engine], reduce_dtype: torch.dtype | None) -> None:
        self._engines = list(engines)
        self._collectives = engines[0].collectives
        self._reduce_dtype = reduce_dtype
        self._scale = 1.0 / self._collectives.world_size
        self._pending: list[_Pending] = []
        self._sums: list[Tensor] = []
        self._lanes: dict[torch.device, Lane] = {}
        self._maps = self._make_maps()
        for engine in engines:
            _guard_accumulation(engine)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start reducing one bucket; the future gives its buffer with the owned ranges reduced."""
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer()
        lane = self._lanes.setdefault(buffer.device, Lane(buffer.device))
        future = lane.future()
        with lane.entered():
            self._pending.append(self._start(self._maps.find(bucket.index(), bucket.parameters()), buffer, future))
            if bucket.is_last():
                self._finish_all()
        return future

    def _make_maps(self) -> BucketMaps:
        return BucketMaps(
            [engine.layout for engine in self._engines],
            [engine.params for engine in self._engines],
            self._collectives.world_size,
            self._collectives.group_rank,
        )

    def _begin(self) -> None:
        if any(engine.layout is not known for engine, known in zip(self._engines, self._maps.layouts, strict=True)):
            self._maps = self._make_maps()
        # What an interrupted backward pass left behind is not waited for.
        self._pending.clear()
        self._sums.clear()
        for engine in self._engines:
            engine.reduced.clear()

    def _start(self, map_: BucketMap, buffer: Tensor, future: Future[Tensor]) -> _Pending:
        packed = map_.packed_by_owner(buffer)
        if self._reduce_dtype is not None:
            packed = packed.to(self._reduce_dtype)
        reduction = self._collectives.reduce_to_owners(packed, map_.sizes_per_owner)
        rest = map_.foreign(buffer)
        foreign = None
        if rest:
            together = torch.cat(rest).mul_(self._scale)
            foreign = (self._collectives.all_reduce(together), together)
        return _Pending(map_, buffer, reduction, foreign, future)

    def _finish_all(self) -> None:
        for pending in self._pending:
            self._finish(pending)
        self._spread_non_finite()
        for engine in self._engines:
            engine.gradients_reduced = True
        for pending in self._pending:
            pending.future.set_result(pending.buffer)
        self._pending.clear()

    def _finish(self, pending: _Pending) -> None:
        mine = pending.map.mine(pending.buffer)
        reduced = pending.reduction.wait(self._scale)
        if mine:
            views = [view for _, view in mine]
            torch._foreach_copy_(views, list(reduced.split([view.numel() for view in views])))
            # Infinities and NaNs survive a sum, so one pass that writes nothing tells whether there are any.
            self._sums.append(reduced.sum(dtype=torch.float32 if reduced.dtype.itemsize < 4 else None).abs())
        for segment, view in mine:
            assert segment.shard is not None
            self._engines[segment.source].reduced[segment.shard.param] = view
        if pending.foreign is not None:
            work, together = pending.foreign
            work.wait()
            rest = pending.map.foreign(pending.buffer)
            torch._foreach_copy_(rest, list(together.split([view.numel() for view in rest])))

    def _spread_non_finite(self) -> None:
        """If any rank's reduced range is not finite, show it in what every rank does not own.

        A GradScaler looks at its own rank's ``param.grad`` only; this way all ranks skip the same steps. Owned ranges
        are left as they are, so that without a scaler training goes on as it would have.
        """
        control = self._collectives.control_device
        flag = torch.zeros(1, dtype=torch.int64, device=control)
        if self._sums:
            total = torch.stack([value.to(control, torch.float64) for value in self._sums]).sum()
            flag[0] = ~torch.isfinite(total)
        self._collectives.all_reduce(flag, largest=True).wait()
        if control.type == "cpu" and not flag.item():
            return
        for pending in self._pending:
            if pending.map.starts_of_others:
                buffer = pending.buffer
                index = torch.tensor(pending.map.starts_of_others, device=buffer.device)
                shown = torch.where(flag.to(buffer.device) > 0, math.inf, buffer[index])
                buffer.index_copy_(0, index, shown.to(buffer.dtype))


def _guard_accumulation(engine: Engine) -> None:
    """Make a backward pass that would add to reduced gradients raise.

    Reducing the sum again would count reduced ranges twice. A hook on a leaf runs before its gradient is accumulated,
    so it sees whether what is there was left by an earlier pass; after ``step()`` or ``zero_grad()`` it sees nothing.
    """
    reference = weakref.ref(engine)

    def guard(param: Tensor) -> Callable[[Tensor], None]:
        weak_param = weakref.ref(param)

        def check(_gradient: Tensor) -> None:
            live, leaf = reference(), weak_param()
            if live is None or leaf is None or not live.gradients_reduced or leaf.grad is None:
                return
            if torch.count_nonzero(leaf.grad):
                raise RuntimeError(
                    "a second backward pass would add to gradients that the reduce-scatter hook has already reduced; "
                    "accumulate inside ddp.no_sync() and leave it for the last backward pass before step()"
                )

        return check

    for param in engine.params:
        if param.requires_grad:
            param.register_hook(guard(param))
