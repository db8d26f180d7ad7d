"""Sharing parameters: an all-gather of the memory ranges that the ranks own, after an update.

The ranges of all owners are divided into *rounds*. A round is one all-gather of one part from each owner:

- In a flat bucket whose ranges lie one behind the other, the parts are the ranges themselves. Nothing is copied.
- Other ranges are packed: every rank copies its ranges into a buffer, and copies the other ranks' out of it. Between
  pairs of ranks (gloo) only small ranges are; a large one is a round of its own, in place.

Owners usually have almost equally much memory. Then the memory of each owner, one range behind the other, is cut into
equal pieces, and round j has piece j of all owners, padded by a few elements. A layout that is uneven by design is not
padded: the memory of all owners, one owner behind the other, is cut into rounds, whose parts have different lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, zip_longest

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffers import BufferPool, pack
from onecopy.comm.collectives import Collectives
from onecopy.comm.work import InFlight, Work

PIECE_MULTIPLE = 64
"""Pieces are multiples of this many elements, for vectorised copies."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types in which memory is copied, by size of an element: bytes would be copied more slowly."""


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """Contiguous memory, as bytes, of parameters that one rank owns."""

    owner: int  # the group rank of the owner
    params: tuple[int, ...]  # the indices of the parameters
    memory: Tensor  # the bytes
    itemsize: int  # the bytes of one element; the memory is aligned to it


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A flat bucket of parameters that is sharded among all ranks."""

    memory: Tensor  # the ranges of all owners, one behind the other
    lengths: tuple[int, ...]  # by owner, the number of elements of its range
    params: tuple[int, ...]  # the indices of the parameters


_Range = tuple[Tensor, tuple[int, ...]]
"""Memory, and the indices of its parameters."""


@dataclass(slots=True)
class _Round:
    """One all-gather of packed memory ranges."""

    memories: list[list[_Range]]  # by owner, the memory ranges that it sends
    lengths: list[int] = field(default_factory=list)  # by owner, of its part of the buffer, padding included
    # By address of the buffer: this rank's part without padding, and for each range of the others where it arrives.
    views: dict[int, tuple[Tensor, list[Tensor]]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """By owner, the number of elements that it sends."""
        return [sum(memory.numel() for memory, _ in owned) for owned in self.memories]

    @property
    def params(self) -> set[int]:
        """All parameters in the round."""
        return {index for owned in self.memories for _, params in owned for index in params}

    def without(self, group_rank: int) -> Iterator[_Range]:
        """The ranges of all owners but one."""
        return (each for owner, owned in enumerate(self.memories) if owner != group_rank for each in owned)

    def views_of(self, buffer: Tensor, group_rank: int) -> tuple[Tensor, list[Tensor]]:
        """The views of a buffer; made once for each buffer, because there may be many."""
        if buffer.data_ptr() not in self.views:
            if len(self.views) > limits.ROUNDS_IN_FLIGHT:
                self.views.clear()  # of buffers that the pool may have freed
            parts = buffer.split(self.lengths)
            mine = parts[group_rank][: self.sizes[group_rank]]
            others = [owner for owner in range(len(parts)) if owner != group_rank]
            theirs = [view for owner in others for view in _split(parts[owner], self.memories[owner])]
            self.views[buffer.data_ptr()] = mine, theirs
        return self.views[buffer.data_ptr()]


class Sharing:
    """The all-gathers that share some memory, planned once."""

    def __init__(
        self,
        collectives: Collectives,
        ranges: Sequence[OwnedMemory] = (),  # memory that lies anywhere
        buckets: Sequence[SharedBucket] = (),  # flat buckets
        pool: BufferPool | None = None,
    ) -> None:
        self._collectives, self._buckets, self._pool = collectives, list(buckets), pool or BufferPool()
        direct: list[list[OwnedMemory]] = [[] for _ in range(collectives.world_size)]
        packed: dict[tuple[torch.device, torch.dtype], list[tuple[OwnedMemory, Tensor]]] = {}
        for each in ranges:
            if each.memory.numel() >= limits.DIRECT_BYTES and collectives.sends_in_place(each.memory.device):
                direct[each.owner].append(each)
            elif each.memory.numel():
                elements = each.memory.view(_INTEGERS.get(each.itemsize, torch.int64))
                packed.setdefault((elements.device, elements.dtype), []).append((each, elements))
        # Owners alternate, so that all of them send at the same time.
        self._direct = [each for each in chain(*zip_longest(*direct)) if each is not None]
        self._rounds: list[_Round] = []
        for (device, dtype), group in packed.items():
            in_place = collectives.sends_in_place(device)  # then the parts need not be equally long
            for planned in _plan_rounds(group, collectives.world_size, collectives.bucket_bytes(device)):
                planned.lengths = planned.sizes if in_place else limits.padded(planned.sizes, dtype.itemsize)
                self._rounds.append(planned)

    def start(
        self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None, call: str = "step()"
    ) -> InFlight:
        """Start sending the parameters of all owners to all ranks; return the messages in flight, with those given.

        ``changed`` tells whether each parameter has changed, equally on all ranks. What has not is not written, because
        autograd may still need it. All-gathers without a changed parameter are left out. What arrives packed is written
        when it is waited for.
        """
        in_flight = in_flight or InFlight()
        for work in self.start_in_place(changed, call):
            in_flight.add(work)
        for each in self._rounds:
            if _has_changed(each.params, changed):
                self._start_round(each, call, changed, in_flight)
        return in_flight

    def start_in_place(self, changed: Sequence[bool] | None = None, call: str = "step()") -> list[Work]:
        """Start sending the memory that needs no copies: buckets, and large ranges between pairs of ranks."""
        works = [
            self._collectives.all_gather(each.memory, each.lengths, call)
            for each in self._buckets
            if _has_changed(each.params, changed)
        ]
        works += [
            self._collectives.broadcast(each.memory, each.owner, call)
            for each in self._direct
            if _has_changed(each.params, changed)
        ]
        return works

    def _start_round(self, each: _Round, call: str, changed: Sequence[bool] | None, in_flight: InFlight) -> None:
        here, like = self._collectives.group_rank, next(memory for owned in each.memories for memory, _ in owned)
        in_flight.leave(limits.ROUNDS_IN_FLIGHT)
        buffer = self._pool.take(sum(each.lengths), like.dtype, like.device)
        mine, theirs = each.views_of(buffer, here)
        pack(mine, _split(mine, each.memories[here]), [memory for memory, _ in each.memories[here]])
        arriving = [
            (memory, view)
            for (memory, params), view in zip(each.without(here), theirs, strict=True)
            if _has_changed(params, changed)
        ]
        # As bytes: a backend need not know 16-bit integers.
        lengths = [length * like.element_size() for length in each.lengths]
        work = self._collectives.all_gather(buffer.view(torch.uint8), lengths, call)
        in_flight.add(work, partial(self._end_round, buffer, arriving), staged=True)

    def _end_round(self, buffer: Tensor, arriving: list[tuple[Tensor, Tensor]]) -> None:
        """Write the values that have arrived."""
        if arriving:
            torch._foreach_copy_([memory for memory, _ in arriving], [view for _, view in arriving])
        self._pool.give_back(buffer)

    @property
    def messages(self) -> int:
        """The number of all-gathers of a full ``start``."""
        return len(self._buckets) + len(self._direct) + len(self._rounds)


def _has_changed(params: Iterable[int], changed: Sequence[bool] | None) -> bool:
    return changed is None or any(changed[index] for index in params)


def _split(part: Tensor, ranges: Sequence[_Range]) -> tuple[Tensor, ...]:
    """The views of a part, one for each memory range in it, without the padding."""
    sizes = [memory.numel() for memory, _ in ranges]
    views: tuple[Tensor, ...] = part[: sum(sizes)].split(sizes)
    return views if sizes else ()


def _plan_rounds(group: Sequence[tuple[OwnedMemory, Tensor]], world_size: int, round_bytes: int) -> list[_Round]:
    """Cut the memory of the owners into rounds of at most ``round_bytes``."""
    itemsize = group[0][1].element_size()
    totals = [0] * world_size
    for owned, elements in group:
        totals[owned.owner] += elements.numel()
    parts = world_size if len(set(limits.padded(totals, itemsize))) == 1 else 1
    piece = max(1, round_bytes // (parts * itemsize * PIECE_MULTIPLE)) * PIECE_MULTIPLE
    # Where each owner's memory begins: at the beginning of the first round, or behind the memory of the owners before.
    ends = [0] * world_size if parts > 1 else [0, *accumulate(totals)][:world_size]
    rounds: dict[int, _Round] = {}
    for owned, elements in group:
        start = 0
        while start < elements.numel():
            number, used = divmod(ends[owned.owner], piece)
            length = min(elements.numel() - start, piece - used)
            each = rounds.setdefault(number, _Round([[] for _ in range(world_size)]))
            each.memories[owned.owner].append((elements[start : start + length], owned.params))
            ends[owned.owner] += length
            start += length
    return [each for _, each in sorted(rounds.items())]
