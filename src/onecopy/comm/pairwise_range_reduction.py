"""The reduce-scatter of ranges of a buffer between pairs of ranks, large ranges in place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.pairwise_exchange import PairwiseExchange, message_length, message_lengths, sum_into
from onecopy.comm.range_reduction import FinishReduction, GradientRange


class PairwiseRangeReduction:
    """Messages that bring the ranges of a buffer to their owners, who sum them in rank order.

    Args:
        collectives: the ranks.
        ranges: the ranges, in the order of the buffer.
        dtype: the type of the buffer.
        reduce_dtype: the type in which gradients are sent.
        pool: gives buffers for small ranges and for received ones.
    """

    def __init__(
        self,
        collectives: Collectives,
        ranges: Sequence[GradientRange],
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        pool: BufferPool,
    ) -> None:
        self._collectives, self._reduce_dtype, self._pool = collectives, reduce_dtype, pool
        self._owned = [each for each in ranges if each.owner == collectives.group_rank]
        scale = 1.0 / collectives.world_size
        # A sum of many ranks could overflow fp16, so every rank scales its gradients before it sends them.
        scales_first = reduce_dtype is torch.float16
        self._send_scale, self._sum_scale = (scale, 1.0) if scales_first else (1.0, scale)
        # Gradients that are cast or scaled first are never sent in place.
        unchanged = reduce_dtype is dtype and not scales_first
        in_place_numel = limits.DIRECT_GRADIENT_BYTES // dtype.itemsize if unchanged else sys.maxsize
        slices = [_joined([each for each in ranges if each.owner == owner]) for owner in range(collectives.world_size)]
        self._in_place = [[each for each in owned if each.stop - each.start >= in_place_numel] for owned in slices]
        self._packed = [[each for each in owned if each.stop - each.start < in_place_numel] for owned in slices]

    def start(self, buffer: Tensor, tag: int, is_last: bool) -> FinishReduction:
        """Start to send each owner its ranges of a buffer, and return the function that finishes the reduction."""
        world_size, here = self._collectives.world_size, self._collectives.group_rank
        messages, packed_buffers = [], []
        for owner in range(world_size):
            views = [] if owner == here else [buffer[each] for each in self._packed[owner]]
            packed = self._pool.take(sum(view.numel() for view in views), self._reduce_dtype, buffer.device)
            _pack(views, self._send_scale, packed)
            packed_buffers.append(packed)
            in_place = [buffer[each] for each in self._in_place[owner]]
            messages.append(self._split_messages([*in_place, packed]))
        own_sizes = [each.stop - each.start for each in self._in_place[here]]
        own_sizes.append(sum(each.stop - each.start for each in self._packed[here]))
        lengths = message_lengths(own_sizes, world_size, self._reduce_dtype.itemsize)
        # All ranks wait for the last bucket at once, so that it may be received in turns.
        exchange = PairwiseExchange(
            self._collectives, messages, lengths, self._reduce_dtype, buffer.device, self._pool, tag, in_turns=is_last
        )
        return partial(self._finish, buffer, exchange, packed_buffers)

    def _finish(
        self, buffer: Tensor, exchange: PairwiseExchange, packed_buffers: Sequence[Tensor]
    ) -> list[tuple[int, Tensor]]:
        """Replace the gradients that this rank owns by the mean over all ranks, message by message."""
        here = self._collectives.group_rank
        in_place = [buffer[each] for each in self._in_place[here]]
        small = [buffer[each] for each in self._packed[here]]
        if self._send_scale != 1.0:  # the other ranks have scaled their gradients before sending
            for view in small:
                view.mul_(self._send_scale)
        packed = torch.cat(small) if small else buffer[:0]
        for own, received in zip(self._split_messages([*in_place, packed]), exchange.arrivals(), strict=True):
            # The sum is in rank order and overwrites `own`, which is needed later if two other ranks come before it.
            own_values = own.clone() if here > 1 else own
            sum_into(own, [*received[:here], own_values, *received[here:]], self._sum_scale)
        exchange.end()
        if small:
            torch._foreach_copy_(small, list(packed.split([view.numel() for view in small])))
        self._pool.give_back(*packed_buffers)
        return [(each.optimizer, buffer[each.start : each.stop]) for each in self._owned]

    def _split_messages(self, ranges: Sequence[Tensor]) -> list[Tensor]:
        """Split ranges into messages of the length at which the type of the sum is sent."""
        length = message_length(self._collectives.world_size, self._reduce_dtype.itemsize)
        return [part for each in ranges if each.numel() for part in each.split(length)]


def _joined(ranges: Sequence[GradientRange]) -> list[slice]:
    """The ranges of one owner as slices; neighbouring ranges are one slice."""
    slices: list[slice] = []
    for each in ranges:
        start = slices.pop().start if slices and slices[-1].stop == each.start else each.start
        slices.append(slice(start, each.stop))
    return slices


def _pack(sources: Sequence[Tensor], scale: float, out: Tensor) -> None:
    """Write the concatenation of tensors, times ``scale``, into ``out``, which may have another data type."""
    if len(sources) * limits.GATHERED_COPY_BYTES <= out.numel() * out.element_size():
        for source, target in zip(sources, out.split([source.numel() for source in sources]), strict=True):
            torch.mul(source, scale, out=target) if scale != 1.0 else target.copy_(source)
    elif sources:
        # For many small tensors one concatenation and one pass for the scale are faster than a call for each.
        concatenated = torch.cat(list(sources))
        out.copy_(concatenated.mul_(scale) if scale != 1.0 else concatenated)
