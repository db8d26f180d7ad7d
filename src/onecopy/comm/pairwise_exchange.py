"""A reduce-scatter between pairs of ranks: every rank sends each owner its range, and the owner sums them.

Gradients are sent in place. They are received in a buffer that is reused while later messages arrive, so that a large
gradient needs no buffer of its own size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.work import Work, WorkGroup


def message_length(ranks: int, itemsize: int) -> int:
    """The most elements of one message: the staging buffer holds two messages of every other rank."""
    fitting = limits.STAGED_BYTES // (2 * max(1, ranks - 1))
    return min(max(fitting, limits.MIN_REDUCE_MESSAGE_BYTES), limits.MAX_REDUCE_MESSAGE_BYTES) // itemsize


def message_lengths(sizes: Iterable[int], ranks: int, itemsize: int) -> list[int]:
    """The lengths of the messages for ranges of these sizes."""
    step = message_length(ranks, itemsize)
    return [min(step, size - start) for size in sizes for start in range(0, size, step)]


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """Where a message is received, and the last earlier message that must have been summed before (-1: none)."""

    offset: int
    after: int


@lru_cache(maxsize=1024)
def staging_slots(sizes: tuple[int, ...], room: int) -> tuple[StagingSlot, ...]:
    """Places in a ring buffer for messages that are received and summed in order.

    Args:
        sizes: the number of elements of each message.
        room: the number of elements of the ring buffer; two of the largest message always fit.
    """
    room = max(room, 2 * max(sizes, default=0))
    slots, occupied, end, after = [], deque[tuple[int, int, int]](), 0, -1
    for number, size in enumerate(sizes):
        if end + size > room:
            while occupied and occupied[0][0] >= end:
                occupied.popleft()
            end = 0
        while occupied and occupied[0][0] < end + size and end < occupied[0][1]:
            after = occupied.popleft()[2]
        slots.append(StagingSlot(end, after))
        if size:
            occupied.append((end, end + size, number))
        end += size
    return tuple(slots)


class PairwiseExchange:
    """Messages between all pairs of ranks, in flight from construction on: the first half of a reduce-scatter.

    Args:
        collectives: the ranks.
        outgoing: the messages for each rank, contiguous memory. All ranks send an owner messages of equal lengths.
        lengths: the lengths of the messages that this rank owns.
        dtype: the type of all messages.
        device: where messages are received.
        pool: gives the staging buffer.
        tag: a tag that no other exchange in flight has.
        in_place: for each message that this rank owns, memory into which one other rank's values may be received.
        in_turns: receive only as many messages as the staging buffer holds. Then a rank's messages leave only while
            their owners sum. Where a rank may wait for something else first, this must be False.
    """

    def __init__(
        self,
        collectives: Collectives,
        outgoing: Sequence[Sequence[Tensor]],
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pool: BufferPool,
        tag: int,
        in_place: Sequence[Tensor] = (),
        in_turns: bool = False,
    ) -> None:
        self._collectives, self._pool, self._tag = collectives, pool, tag
        self._lengths, self._in_place = lengths, in_place
        ranks, here = collectives.world_size, collectives.group_rank
        self._staged_ranks = max(0, ranks - 1 - bool(in_place))
        sizes = tuple(self._staged_ranks * length for length in lengths)
        self._slots = staging_slots(sizes, limits.STAGED_BYTES // dtype.itemsize if in_turns else sum(sizes))
        ends = [slot.offset + size for slot, size in zip(self._slots, sizes, strict=True)]
        self._staging = pool.take(max(ends, default=0), dtype, device)
        self._arriving: deque[tuple[list[Tensor], Work]] = deque()
        self._next = 0
        self._receive(summed=0)
        # Every rank sends to another rank first.
        order = [(here + turn) % ranks for turn in range(1, ranks)]
        sends = [collectives.send(part, other, tag) for other in order for part in outgoing[other]]
        self._sends = WorkGroup(tuple(sends))

    def _receive(self, summed: int) -> None:
        """Start receiving all messages for which there is room once ``summed`` messages have been summed."""
        here, ranks = self._collectives.group_rank, self._collectives.world_size
        order = [(here - turn) % ranks for turn in range(1, ranks)]
        while self._next < len(self._lengths) and self._slots[self._next].after < summed:
            start, length = self._slots[self._next].offset, self._lengths[self._next]
            rows = [self._staging[start + row * length :][:length] for row in range(self._staged_ranks)]
            if self._staged_ranks < ranks - 1:
                rows.insert(0, self._in_place[self._next])
            works = [self._collectives.receive(rows[other - (other > here)], other, self._tag) for other in order]
            self._arriving.append((rows, WorkGroup(tuple(works))))
            self._next += 1

    def arrivals(self) -> Iterator[list[Tensor]]:
        """The values of all other ranks in rank order, message by message. To be called once.

        The tensors are valid until the next message is asked for.
        """
        for number in range(len(self._lengths)):
            rows, work = self._arriving.popleft()
            work.wait()
            yield rows
            self._receive(summed=number + 1)

    def end(self) -> None:
        """After all arrivals: wait until this rank's messages have left, and give the staging buffer back."""
        self._sends.wait()
        self._pool.give_back(self._staging)


def sum_into(target: Tensor, rows: Sequence[Tensor], scale: float, keep: bool = False) -> None:
    """Write the sum of ``rows`` in rank order, times ``scale``, into ``target``; with ``keep``, add it.

    The order is fixed, so that the result depends neither on the owner nor on the limits of buckets. For two ranks,
    scaling the sum is bitwise the sum of the scaled rows, except for denormal numbers.
    """
    first, *others = rows
    total = torch.empty_like(target) if keep else target
    if others:
        # In the type of the sum: a narrower type would round partial sums.
        torch.add(first.to(total.dtype), others[0].to(total.dtype), out=total)
        for other in others[1:]:
            total.add_(other)
        if scale != 1.0:
            total.mul_(scale)
    else:
        torch.mul(first, scale, out=total)
    if keep:
        target.add_(total)
