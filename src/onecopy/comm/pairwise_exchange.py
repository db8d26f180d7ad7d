"""Every rank's values to the rank that adds them up: messages between all pairs of ranks.

What a rank sends is read where it lies. What it receives can go through a little memory that is used again while later
messages arrive, so that what is large needs no more of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives, Work, WorkGroup

DIRECT_BYTES = 1 << 18
"""Gradients from this size on are sent from where autograd has put them: a message costs less than a copy."""

STAGED_BYTES = 16 << 20
"""Room in which what other ranks send is received, if it cannot be received where it is wanted."""

SHORTEST_BYTES, LONGEST_BYTES = 1 << 18, 4 << 20
"""How long messages may be at most: the more ranks send them at a time, the shorter."""


def message_length(ranks: int, itemsize: int) -> int:
    """How many elements a message may have: as many as let those of all other ranks be received twice at a time."""
    fitting = STAGED_BYTES // (2 * max(1, ranks - 1))
    return min(max(fitting, SHORTEST_BYTES), LONGEST_BYTES) // itemsize


def message_lengths(sizes: Iterable[int], ranks: int, itemsize: int) -> list[int]:
    """The lengths of the messages in which stretches of these sizes travel."""
    step = message_length(ranks, itemsize)
    return [min(step, size - start) for size in sizes for start in range(0, size, step)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is put, and the number of the last one before it that must have been used then (-1: none)."""

    offset: int
    after: int


@lru_cache(maxsize=1024)
def places(sizes: tuple[int, ...], room: int) -> tuple[Place, ...]:
    """Put things of some sizes one behind the other and, where ``room`` ends, again at its start.

    They are used in the same order. There is room for two of the largest in any case.
    """
    room = max(room, 2 * max(sizes, default=0))
    found, held, end, after = [], deque[tuple[int, int, int]](), 0, -1
    for number, size in enumerate(sizes):
        if end + size > room:
            while held and held[0][0] >= end:
                held.popleft()
            end = 0
        while held and held[0][0] < end + size and end < held[0][1]:
            after = held.popleft()[2]
        found.append(Place(end, after))
        if size:
            held.append((end, end + size, number))
        end += size
    return tuple(found)


class PairwiseExchange:
    """Messages between all pairs of ranks, under way from the beginning. It is the first half of a reduce-scatter.

    Args:
        collectives: the ranks.
        outgoing: by rank, the messages for it, each contiguous memory. All send a rank messages of the same lengths.
        lengths: of this rank's own messages.
        dtype: the type of all of them.
        device: where they are received.
        pool: lends the memory for it.
        tag: what no other exchange has that may be under way at the same time.
        homes: for each of this rank's messages, memory into which one other rank's may be received; or nothing.
        in_turns: whether there is room for a part of them at a time only. Then nobody's messages have all gone before
            their receivers use what has arrived; where other ranks may be waiting for something else instead, all
            must have room at once.
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
        homes: Sequence[Tensor] = (),
        in_turns: bool = False,
    ) -> None:
        self._collectives, self._pool, self._tag = collectives, pool, tag
        self._lengths, self._homes = lengths, homes
        ranks, here = collectives.world_size, collectives.group_rank
        self._staged = max(0, ranks - 1 - bool(homes))
        sizes = tuple(self._staged * length for length in lengths)
        self._places = places(sizes, STAGED_BYTES // dtype.itemsize if in_turns else sum(sizes))
        ends = [place.offset + size for place, size in zip(self._places, sizes, strict=True)]
        self._memory = pool.take(max(ends, default=0), dtype, device)
        self._arriving: deque[tuple[list[Tensor], Work]] = deque()
        self._next = 0
        self._receive(used=0)
        # Every rank begins with another one.
        order = [(here + turn) % ranks for turn in range(1, ranks)]
        sends = [collectives.send(part, rank, tag) for rank in order for part in outgoing[rank]]
        self._departures = WorkGroup(tuple(sends))

    def _receive(self, used: int) -> None:
        """Start receiving all messages for which there is room after ``used`` of them have been used."""
        here, ranks = self._collectives.group_rank, self._collectives.world_size
        order = [(here - turn) % ranks for turn in range(1, ranks)]
        while self._next < len(self._lengths) and self._places[self._next].after < used:
            start, length = self._places[self._next].offset, self._lengths[self._next]
            rows = [self._memory[start + row * length :][:length] for row in range(self._staged)]
            if self._staged < ranks - 1:
                rows.insert(0, self._homes[self._next])
            works = [self._collectives.receive(rows[rank - (rank > here)], rank, self._tag) for rank in order]
            self._arriving.append((rows, WorkGroup(tuple(works))))
            self._next += 1

    def arrivals(self) -> Iterator[list[Tensor]]:
        """Message by message, all other ranks' in rank order, as they arrive. To be called once.

        What is returned is valid until the next is asked for.
        """
        for number in range(len(self._lengths)):
            rows, work = self._arriving.popleft()
            work.wait()
            yield rows
            self._receive(used=number + 1)

    def end(self) -> None:
        """After all arrivals: wait until what this rank sends has gone, and let others use the memory."""
        self._departures.wait()
        self._pool.give_back(self._memory)


def sum_into(target: Tensor, rows: Sequence[Tensor], scale: float, keep: bool = False) -> None:
    """Write (or, with ``keep``, add) the sum of ``rows`` in rank order, times ``scale``, into ``target``.

    The order is fixed, so that the result depends neither on who owns what nor on where buckets end. Scaling the sum
    of two is bit by bit the sum of two scaled, short of the smallest numbers.
    """
    first, *others = rows
    total = torch.empty_like(target) if keep else target
    if others:
        # In the type of the sum: a narrower one would round what others have not been added to yet.
        torch.add(first.to(total.dtype), others[0].to(total.dtype), out=total)
        for other in others[1:]:
            total.add_(other)
        if scale != 1.0:
            total.mul_(scale)
    else:
        torch.mul(first, scale, out=total)
    if keep:
        target.add_(total)
