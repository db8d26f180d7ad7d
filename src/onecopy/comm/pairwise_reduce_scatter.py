"""A bucket's reduce-scatter between pairs of ranks: large gradients are sent from autograd's own memory.

Small gradients that lie beside each other in the bucket are packed into one buffer, a *span*. Every rank sends each
owner its part of each span, and the owner adds the parts up while later ones arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.bucket_reduce_scatter import BucketGradients, InFlightReduction, across_replicas
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.pairwise_exchange import PairwiseExchange, message_length, sum_into
from onecopy.common.flat_views import flat_view
from onecopy.common.profiler_ranges import profile_range


@dataclass(slots=True)
class GradientSpan:
    """Adjacent parameters of a bucket whose gradients are sent from one buffer: one large or several small ones.

    Attributes:
        start: the first element of the span in the bucket.
        numel: the number of elements, with the gaps between parameters.
        is_single: whether the span is one parameter. Then the parameter's gradient itself can be the buffer.
        positions: the positions of the parameters in the bucket.
        gradients: the buffer, between the launch of the bucket and the end of its reduction.
    """

    start: int
    numel: int
    is_single: bool
    positions: list[int]
    gradients: Tensor | None = None


@dataclass(frozen=True, slots=True)
class OwnerMessage:
    """A part of a span that one rank owns: all ranks send it to the owner, and the owner adds it up.

    Attributes:
        span: the span.
        span_slice: the elements of the span.
        owner_slice: the same elements in the owner's shard of the bucket.
    """

    span: GradientSpan
    span_slice: slice
    owner_slice: slice

    @property
    def values(self) -> Tensor:
        """This rank's gradients for the message."""
        assert self.span.gradients is not None
        return self.span.gradients[self.span_slice]

    @property
    def numel(self) -> int:
        """The number of elements."""
        length: int = self.owner_slice.stop - self.owner_slice.start
        return length


class PairwiseReduceScatter:
    """Reduces one bucket between pairs of ranks.

    Args:
        collectives: the ranks among which the bucket is sharded.
        bucket: the gradients of the bucket.

    Attributes:
        messages: for each owner, the messages that it gets from every other rank.
    """

    def __init__(self, collectives: Collectives, bucket: BucketGradients) -> None:
        self._collectives, self._bucket = collectives, bucket
        self._local_grads: list[Tensor | None] = [None] * len(bucket.params)  # of the current pass, flat
        self._pool_buffers: list[Tensor] = []  # buffers of the pool among the local gradients and in the spans
        self._zero = torch.zeros(1, dtype=bucket.dtype, device=bucket.device)
        self._spans = _make_spans(bucket)
        self._single_positions = {span.positions[0] for span in self._spans if span.is_single}
        self.messages = [self._messages_for(owner) for owner in range(collectives.world_size)]

    def _messages_for(self, owner: int) -> list[OwnerMessage]:
        start, stop = self._bucket.plan.range_of(owner)
        length = message_length(self._collectives.world_size, self._bucket.dtype.itemsize)
        messages = []
        for span in self._spans:
            low, high = max(span.start, start), min(span.start + span.numel, stop)
            for first in range(low, high, length):
                last = min(first + length, high)
                span_slice = slice(first - span.start, last - span.start)
                messages.append(OwnerMessage(span, span_slice, slice(first - start, last - start)))
        return messages

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in a gradient: as it is if it can be sent from its own memory, else as a copy."""
        param = self._bucket.params[position]
        if self._can_send_in_place(gradient, param):
            self._local_grads[position] = gradient if gradient.dim() == 1 else flat_view(gradient)
            return
        if position in self._single_positions:
            memory = self._take_buffer(param.numel(), pool)
        else:
            memory = torch.empty(param.numel(), dtype=self._bucket.dtype, device=self._bucket.device)
        memory.as_strided(param.shape, param.stride(), memory.storage_offset()).copy_(gradient)
        self._local_grads[position] = memory

    def _can_send_in_place(self, gradient: Tensor, param: Tensor) -> bool:
        # Gradients that are scaled before they are sent must be copied, because they are only read.
        if gradient.dtype != self._bucket.dtype or self._bucket.scales_before or gradient.stride() != param.stride():
            return False
        return not gradient.is_conj() and not gradient.is_neg()

    def start(self, pool: BufferPool, tag: int, is_last: bool, shard: Tensor | None) -> InFlightReduction:
        """Pack small gradients and start the messages."""
        self.pack(pool)
        # All ranks go from the launch of the last bucket to the end of the pass without waiting for anything else.
        reduction = PairwiseReduction(
            self._collectives, self.messages, self._bucket, pool, tag, None if self._bucket.replicas else shard, is_last
        )
        return across_replicas(reduction, self._bucket.replicas)

    def pack(self, pool: BufferPool) -> None:
        """Fill the buffer of each span: with the gradient itself, or with packed small gradients and zeros."""
        for span in self._spans:
            gradient = self._local_grads[span.positions[0]]
            if span.is_single and gradient is not None and gradient.numel() == span.numel:
                span.gradients = gradient
            else:
                span.gradients = self._take_buffer(span.numel, pool)
                torch.cat(self._parts_of(span), out=span.gradients)
            if self._bucket.scales_before:
                span.gradients.mul_(self._bucket.scale)

    def _take_buffer(self, numel: int, pool: BufferPool) -> Tensor:
        """A buffer of the pool, until :meth:`release`."""
        self._pool_buffers.append(pool.take(numel, self._bucket.dtype, self._bucket.device))
        return self._pool_buffers[-1]

    def _parts_of(self, span: GradientSpan) -> list[Tensor]:
        """The gradients of a span, with zeros in the gaps and for missing gradients."""
        parts, end = [], span.start
        for position in span.positions:
            offset, numel = self._bucket.plan.offsets[position], self._bucket.params[position].numel()
            if end < offset:
                parts.append(self._zero.expand(offset - end))
            gradient = self._local_grads[position]
            parts.append(self._zero.expand(numel) if gradient is None else gradient)
            end = offset + numel
        if end < span.start + span.numel:
            parts.append(self._zero.expand(span.start + span.numel - end))
        return parts

    def release(self, pool: BufferPool) -> None:
        """Release the local gradients of the pass."""
        pool.give_back(*self._pool_buffers)
        self._pool_buffers.clear()
        self._local_grads = [None] * len(self._local_grads)
        for span in self._spans:
            span.gradients = None


def _make_spans(bucket: BucketGradients) -> list[GradientSpan]:
    """Divide a bucket into spans: large parameters alone, small ones together with their neighbours."""
    spans: list[GradientSpan] = []
    for position, (param, offset) in enumerate(zip(bucket.params, bucket.plan.offsets, strict=True)):
        is_large = param.numel() * bucket.dtype.itemsize >= limits.DIRECT_GRADIENT_BYTES
        if is_large or not spans or spans[-1].is_single:
            spans.append(GradientSpan(offset, param.numel(), is_large or len(bucket.params) == 1, [position]))
        else:
            spans[-1].numel = offset + param.numel() - spans[-1].start
            spans[-1].positions.append(position)
    return spans


class PairwiseReduction:
    """The messages of one bucket in one backward pass.

    Args:
        collectives: the ranks.
        messages: the messages for each owner, by group rank.
        bucket: the gradients of the bucket.
        pool: the pool that gives the staging buffer.
        tag: a tag that no other reduction in flight has.
        shard: memory for the sum, into which one other rank's values may be received; None if it must not be written.
        in_turns: receive only as many messages as the staging buffer holds.
    """

    def __init__(
        self,
        collectives: Collectives,
        messages: Sequence[Sequence[OwnerMessage]],
        bucket: BucketGradients,
        pool: BufferPool,
        tag: int,
        shard: Tensor | None,
        in_turns: bool,
    ) -> None:
        self._group_rank = collectives.group_rank
        self._owned = messages[self._group_rank]
        self._scale = 1.0 if bucket.scales_before else bucket.scale
        self._exchange = PairwiseExchange(
            collectives,
            [
                [] if owner == self._group_rank else [message.values for message in owned]
                for owner, owned in enumerate(messages)
            ],
            [message.numel for message in self._owned],
            bucket.dtype,
            bucket.device,
            pool,
            tag,
            () if shard is None else [shard[message.owner_slice] for message in self._owned],
            in_turns,
        )

    def add_up(self, target: Tensor, keep: bool) -> None:
        """Add up message by message, while later messages arrive."""
        for message, rows in zip(self._owned, self._exchange.arrivals(), strict=True):
            with profile_range("onecopy.add"):
                rows.insert(self._group_rank, message.values)
                sum_into(target[message.owner_slice], rows, self._scale, keep)

    def end(self) -> None:
        """Wait until this rank's messages have left, and release the staging buffer."""
        self._exchange.end()
