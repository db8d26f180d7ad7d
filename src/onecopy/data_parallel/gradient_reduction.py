"""The reduction of one bucket's gradients to their owners, while it is in flight.

A bucket starts one of three reductions, and the backward pass treats them alike:

- :class:`PairwiseReduction`: messages between pairs of ranks, on gloo and the CPU.
- :class:`CollectiveReduction`: the backend's reduce-scatter, everywhere else.
- :class:`~onecopy.data_parallel.sparse_rows.RowReduction`: rows of an embedding, between pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.pairwise_exchange import PairwiseExchange, sum_into
from onecopy.common.profiler_ranges import profile_range


class InFlightReduction(Protocol):
    """A reduction that a bucket has started.

    Attributes:
        ends_with_pass: whether this rank's messages may stay in flight until the backward pass ends. If False,
            :meth:`end` is called right after :meth:`add_up`.
    """

    ends_with_pass: bool

    def add_up(self, target: Tensor, scale: float, keep: bool) -> None:
        """Write the sum over all ranks, times ``scale``, into ``target``; with ``keep``, add it to ``target``."""

    def end(self) -> None:
        """Wait until this rank's messages have left, and release the buffers."""


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


class PairwiseReduction:
    """A reduce-scatter between pairs of ranks.

    Args:
        collectives: the ranks.
        messages: the messages for each owner, by group rank.
        dtype: the type in which gradients are sent.
        device: the device of the gradients.
        pool: the pool that gives the staging buffer.
        tag: a tag that no other reduction in flight has.
        shard: memory for the sum, into which one other rank's values may be received; None if it must not be written.
        in_turns: receive only as many messages as the staging buffer holds.
    """

    ends_with_pass = False

    def __init__(
        self,
        collectives: Collectives,
        messages: Sequence[Sequence[OwnerMessage]],
        dtype: torch.dtype,
        device: torch.device,
        pool: BufferPool,
        tag: int,
        shard: Tensor | None,
        in_turns: bool,
    ) -> None:
        self._group_rank = collectives.group_rank
        self._owned = messages[self._group_rank]
        self._exchange = PairwiseExchange(
            collectives,
            [
                [] if owner == self._group_rank else [message.values for message in owned]
                for owner, owned in enumerate(messages)
            ],
            [message.numel for message in self._owned],
            dtype,
            device,
            pool,
            tag,
            () if shard is None else [shard[message.owner_slice] for message in self._owned],
            in_turns,
        )

    def add_up(self, target: Tensor, scale: float, keep: bool) -> None:
        """Add up message by message, while later messages arrive."""
        for message, rows in zip(self._owned, self._exchange.arrivals(), strict=True):
            with profile_range("onecopy.add"):
                rows.insert(self._group_rank, message.values)
                sum_into(target[message.owner_slice], rows, scale, keep)

    def end(self) -> None:
        """Wait until this rank's messages have left, and release the staging buffer."""
        self._exchange.end()


class CollectiveReduction:
    """The backend's reduce-scatter.

    Args:
        collectives: the ranks.
        gradients: this rank's gradients of the whole bucket.
        sizes: the number of elements of each rank's shard.
        pool: the pool that gives the buffer for the sum.
    """

    ends_with_pass = False

    def __init__(self, collectives: Collectives, gradients: Tensor, sizes: Sequence[int], pool: BufferPool) -> None:
        self._pool = pool
        self._sum = pool.take(max(sizes), gradients.dtype, gradients.device)
        self._work = collectives.reduce_scatter(gradients, sizes, self._sum)

    def add_up(self, target: Tensor, scale: float, keep: bool) -> None:
        """Scale the backend's sum."""
        self._work.wait()
        with profile_range("onecopy.add"):
            sum_into(target, [self._sum[: target.numel()]], scale, keep)

    def end(self) -> None:
        """Release the buffer of the sum."""
        self._pool.give_back(self._sum)
