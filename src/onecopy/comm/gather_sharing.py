"""Sharing by the backend's all-gather: every rank packs its updated parameters, and all ranks unpack the others'.

Owners usually have almost equally much memory. Then the memory of each owner, one range behind the other, is cut into
equal pieces, and round j is one all-gather of piece j of all owners, padded by a few elements. A layout that is uneven
by design is not padded: the memory of all owners, one owner behind the other, is cut into rounds, and a round gathers
parts of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import InFlight
from onecopy.comm.parameter_sharing import OwnedMemory, PackBuffers
from onecopy.comm.work import Work

PIECE_MULTIPLE = 64
"""Pieces are multiples of this many elements, for vectorised copies."""


def padded_part(sizes: Sequence[int], itemsize: int) -> int | None:
    """The length to which one part per rank is padded to be equally long; None if that would add too much.

    Args:
        sizes: the number of elements of each rank's part.
        itemsize: the bytes of an element.
    """
    longest = max(sizes)
    return longest if limits.allows_padding(longest * itemsize, sum(sizes) * itemsize, len(sizes)) else None


@dataclass(frozen=True, slots=True)
class _Views:
    """A round's parts of one buffer, and the memory ranges that are copied to and from them.

    Attributes:
        gathered: the whole buffer, as bytes: a backend need not know 16-bit integers.
        parts: the part of each rank, as bytes.
        mine: views of this rank's part, one for each of its memory ranges.
        theirs: views of the other ranks' parts, one for each of their memory ranges.
        targets: the memory ranges of the other ranks' parameters.
    """

    gathered: Tensor
    parts: tuple[Tensor, ...]
    mine: list[Tensor]
    theirs: list[Tensor]
    targets: list[Tensor]


@dataclass(slots=True)
class _Round:
    """One all-gather.

    Attributes:
        memories: by owner, the memory ranges that it sends.
        params: the parameters in the round.
        sizes: by owner, the number of elements.
        part: the length of each owner's part of the buffer; None if the parts have different lengths.
    """

    memories: list[list[Tensor]]
    params: set[int] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)
    part: int | None = None
    views: dict[int, _Views] = field(default_factory=dict)  # by address of the buffer

    def close(self) -> None:
        """Compute the sizes, when all memory ranges are known."""
        self.sizes = [sum(memory.numel() for memory in memories) for memories in self.memories]
        self.part = padded_part(self.sizes, self.like.element_size())

    @property
    def like(self) -> Tensor:
        """A tensor with the device and the type of the round."""
        return next(memory for memories in self.memories for memory in memories)

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""
        numel = sum(self.sizes) if self.part is None else self.part * len(self.sizes)
        return numel * self.like.element_size()

    def views_of(self, buffer: Tensor, group_rank: int) -> _Views:
        """The parts of a buffer; computed once for each buffer."""
        if buffer.data_ptr() not in self.views:
            if len(self.views) > limits.COLLECTIVES_IN_FLIGHT:
                self.views.clear()  # of buffers that larger ones have replaced, and whose memory the views would keep
            gathered = buffer[: self.nbytes]
            lengths = self.sizes if self.part is None else [self.part] * len(self.sizes)
            parts = gathered.view(self.like.dtype).split(lengths)
            ranges = [
                list(part[:size].split([memory.numel() for memory in memories]))
                for part, size, memories in zip(parts, self.sizes, self.memories, strict=True)
            ]
            theirs = [view for owner, views in enumerate(ranges) if owner != group_rank for view in views]
            targets = [each for owner, memories in enumerate(self.memories) if owner != group_rank for each in memories]
            self.views[buffer.data_ptr()] = _Views(
                gathered, tuple(part.view(torch.uint8) for part in parts), ranges[group_rank], theirs, targets
            )
        return self.views[buffer.data_ptr()]


class GatherSharing:
    """The all-gathers that make all replicas equal, planned in the constructor.

    Args:
        collectives: the ranks.
        ranges: the memory that each owner sends.
        round_bytes: the most bytes that all ranks together gather in one round.
        buffers: the buffers of the rounds, which may be shared with other instances.
    """

    def __init__(
        self, collectives: Collectives, ranges: Sequence[OwnedMemory], round_bytes: int, buffers: PackBuffers
    ) -> None:
        self._collectives = collectives
        by_type: dict[tuple[torch.device, torch.dtype], list[tuple[OwnedMemory, Tensor]]] = {}
        for each in ranges:
            if each.memory.numel():
                elements = each.memory.view(_INTEGERS.get(each.itemsize, torch.int64))
                by_type.setdefault((elements.device, elements.dtype), []).append((each, elements))
        self._rounds = [
            each for group in by_type.values() for each in _plan_rounds(group, collectives.world_size, round_bytes)
        ]
        self._buffers = buffers
        self._buffers.reserve([(each.like.device, each.nbytes) for each in self._rounds], limits.COLLECTIVES_IN_FLIGHT)

    def start(self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None) -> InFlight:
        """Start sending the parameters of all owners to all ranks, and return the messages in flight.

        The values that arrive are written when a message is waited for.
        """
        in_flight = in_flight or InFlight()
        here = self._collectives.group_rank
        for each in self._rounds:
            if changed is not None and not any(changed[index] for index in each.params):
                continue
            buffer = self._buffers.next(each.like.device)
            views = each.views_of(buffer, here)
            if views.mine:
                torch._foreach_copy_(views.mine, each.memories[here])
            then = partial(torch._foreach_copy_, views.targets, views.theirs) if views.theirs else None
            in_flight.add(self._gather(each, views), buffer, True, then, limits.COLLECTIVES_IN_FLIGHT)
        return in_flight

    def _gather(self, each: _Round, views: _Views) -> Work:
        if each.part is None:
            return self._collectives.all_gather_parts(views.parts)
        return self._collectives.all_gather_single(views.gathered, views.parts[self._collectives.group_rank])

    @property
    def messages(self) -> int:
        """The number of all-gathers of a full ``start``."""
        return len(self._rounds)

    @property
    def staging_bytes(self) -> int:
        """The memory of the buffers."""
        return self._buffers.nbytes


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types in which memory is copied, by size of an element: bytes would be copied more slowly."""


def _plan_rounds(group: Sequence[tuple[OwnedMemory, Tensor]], world_size: int, round_bytes: int) -> list[_Round]:
    """Cut the memory of the owners into rounds of at most ``round_bytes``."""
    itemsize = group[0][1].element_size()
    totals = [0] * world_size
    for owned, elements in group:
        totals[owned.owner] += elements.numel()
    parts = 1 if padded_part(totals, itemsize) is None else world_size
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
            each.memories[owned.owner].append(elements[start : start + length])
            each.params.update(owned.params)
            ends[owned.owner] += length
            start += length
    for each in rounds.values():
        each.close()
    return [each for _, each in sorted(rounds.items())]
