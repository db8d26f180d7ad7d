"""The reduce-scatter of ranges of a buffer by the backend: one copy into a packed buffer, one collective, one copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.gather_sharing import padded_part
from onecopy.comm.range_reduction import FinishReduction, GradientRange
from onecopy.comm.work import Work
from onecopy.common.torch_private import zero_each


class CollectiveRangeReduction:
    """One reduce-scatter of the ranges of a buffer, which are packed by owner, and for each owner by optimizer.

    The parts of the owners are padded to equal lengths where that adds little.

    Args:
        collectives: the ranks.
        ranges: the ranges, in the order of the buffer.
        dtype: the type in which gradients are sent and summed.
        pool: gives the packed and the received buffer, which are reused when a reduction has been finished.
    """

    def __init__(
        self, collectives: Collectives, ranges: Sequence[GradientRange], dtype: torch.dtype, pool: BufferPool
    ) -> None:
        self._collectives, self._dtype, self._pool = collectives, dtype, pool
        ranks, here = collectives.world_size, collectives.group_rank
        self._by_owner: list[list[GradientRange]] = [[] for _ in range(ranks)]
        for each in sorted(ranges, key=lambda each: each.optimizer):
            self._by_owner[each.owner].append(each)
        self._sizes = [sum(each.numel for each in owned) for owned in self._by_owner]
        self._part = padded_part(self._sizes, dtype.itemsize)
        self._lengths = self._sizes if self._part is None else [self._part] * ranks
        # The reduced gradients of one optimizer lie together.
        self._optimizers = sorted({each.optimizer for each in self._by_owner[here]})
        self._optimizer_sizes = [
            sum(each.numel for each in self._by_owner[here] if each.optimizer == optimizer)
            for optimizer in self._optimizers
        ]
        # A sum of many ranks could overflow fp16, so its gradients are scaled before. A backend's average does that.
        scale, self._averages = 1.0 / ranks, collectives.averages
        self._scale_before = scale if dtype is torch.float16 and not self._averages else 1.0
        self._scale_after = 1.0 if dtype is torch.float16 or self._averages else scale

    def start(self, buffer: Tensor, tag: int, is_last: bool) -> FinishReduction:
        """Pack the ranges of a buffer and start the reduce-scatter; return the function that finishes it."""
        del tag, is_last
        if not any(self._sizes):
            return list
        packed = self._pool.take(sum(self._lengths), self._dtype, buffer.device)
        received = self._pool.take(self._lengths[self._collectives.group_rank], self._dtype, buffer.device)
        parts = packed.split(self._lengths)
        sources, targets, paddings = [], [], []
        for part, size, owned in zip(parts, self._sizes, self._by_owner, strict=True):
            sources += [buffer[each.start : each.stop] for each in owned]
            targets += part[:size].split([each.numel for each in owned])
            if size < part.numel():
                paddings.append(part[size:])
        torch._foreach_copy_(targets, sources)
        if paddings:
            zero_each(paddings)  # tools that look for NaN look at the whole message
        if self._scale_before != 1.0:
            packed.mul_(self._scale_before)
        if self._part is None:
            work = self._collectives.reduce_scatter_parts(received, parts, self._averages)
        else:
            work = self._collectives.reduce_scatter_single(received, packed, self._averages)
        return partial(self._finish, buffer, work, packed, received)

    def _finish(self, buffer: Tensor, work: Work, packed: Tensor, received: Tensor) -> list[tuple[int, Tensor]]:
        """Copy the reduced gradients of this rank into the buffer, and return them by optimizer."""
        work.wait()
        here = self._collectives.group_rank
        owned, reduced = self._by_owner[here], received[: self._sizes[here]]
        if owned:
            if self._scale_after != 1.0:
                reduced.mul_(self._scale_after)
            targets = [buffer[each.start : each.stop] for each in owned]
            torch._foreach_copy_(targets, list(reduced.split([each.numel for each in owned])))
        self._pool.give_back(packed, received)
        return list(zip(self._optimizers, reduced.split(self._optimizer_sizes), strict=True))
