"""DDP's gradient buckets, seen through layouts: which range of a bucket belongs to which rank.

DDP decides what is in a bucket and regroups as it likes; ownership never follows from that, only the schedule does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.layout import Layout, Shard


class GradBucket(Protocol):
    """What DDP hands to a communication hook."""

    def index(self) -> int:
        """Its number in this backward pass, from 0."""

    def is_last(self) -> bool:
        """Whether no other bucket follows in this backward pass."""

    def buffer(self) -> Tensor:
        """Its gradients, flat."""

    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients it holds, in order."""


@dataclass(frozen=True, slots=True)
class BucketSegment:
    """A stretch of a bucket's buffer: a shard of one of several layouts, or (without a shard) nobody's."""

    numel: int
    source: int
    shard: Shard | None


class DDPBucketAssignment:
    """One bucket as segments in the order of its buffer, and ready-made ways to pick some of them out of it.

    Attributes:
        sizes_per_owner: elements that each rank owns.
        large: by rank, the stretches that it owns and that are long enough to be sent from where they are.
        small: by rank, the other ones.
        starts_of_others: by layout, where segments begin that this rank does not own.
    """

    def __init__(self, segments: Sequence[BucketSegment], world_size: int, group_rank: int, direct: int) -> None:
        self.segments = tuple(segments)
        self._sizes = [segment.numel for segment in segments]
        owned = [(segment.shard.owner, position) for position, segment in enumerate(segments) if segment.shard]
        self._by_owner = sorted(owned)
        self._mine = [position for owner, position in owned if owner == group_rank]
        self._foreign = [position for position, segment in enumerate(segments) if segment.shard is None]
        self.sizes_per_owner = [0] * world_size
        for owner, position in owned:
            self.sizes_per_owner[owner] += segments[position].numel
        self.starts_of_others: dict[int, list[int]] = {}
        stretches: list[list[slice]] = [[] for _ in range(world_size)]
        offset = 0
        for segment in segments:
            end = offset + segment.numel
            if segment.shard is not None and segment.numel:
                known = stretches[segment.shard.owner]
                start = known.pop().start if known and known[-1].stop == offset else offset
                known.append(slice(start, end))
                if segment.shard.owner != group_rank:
                    self.starts_of_others.setdefault(segment.source, []).append(offset)
            offset = end
        self.large = [[each for each in known if each.stop - each.start >= direct] for known in stretches]
        self.small = [[each for each in known if each.stop - each.start < direct] for known in stretches]

    def in_order_of_owners(self, buffer: Tensor) -> list[Tensor]:
        """Views of all owned segments, rank after rank."""
        views = buffer.split(self._sizes)
        return [views[place] for _, place in self._by_owner]

    def mine(self, buffer: Tensor) -> list[tuple[BucketSegment, Tensor]]:
        """This rank's segments, each with its view of the buffer."""
        views = buffer.split(self._sizes)
        return [(self.segments[position], views[position]) for position in self._mine]

    def foreign(self, buffer: Tensor) -> list[Tensor]:
        """Views of what belongs to no optimizer."""
        if not self._foreign:
            return []
        views = buffer.split(self._sizes)
        return [views[position] for position in self._foreign]


def pack(sources: Sequence[Tensor], scale: float, out: Tensor) -> None:
    """Copy tensors one after the other, times ``scale``, into ``out``, which may be of another type."""
    if len(sources) * limits.GATHERED_COPY_BYTES <= out.numel() * out.element_size():
        for source, target in zip(sources, out.split([source.numel() for source in sources]), strict=True):
            torch.mul(source, scale, out=target) if scale != 1.0 else target.copy_(source)
    elif sources:
        # Many small ones: one call that copies them all, and another pass to scale them.
        together = torch.cat(list(sources))
        out.copy_(together.mul_(scale) if scale != 1.0 else together)


class DDPBucketAssignments:
    """Maps of the buckets seen so far; one that DDP has regrouped is mapped anew."""

    def __init__(
        self, layouts: Sequence[Layout], params: Sequence[Sequence[Tensor]], world_size: int, group_rank: int
    ) -> None:
        self.layouts = list(layouts)
        self._world_size = world_size
        self._group_rank = group_rank
        self._known: dict[int, tuple[list[int], int, DDPBucketAssignment]] = {}
        self._shards: dict[int, list[BucketSegment]] = {}
        for source, (layout, tensors) in enumerate(zip(layouts, params, strict=True)):
            for shard in layout.shards:
                segment = BucketSegment(shard.numel, source, shard)
                self._shards.setdefault(id(tensors[shard.param]), []).append(segment)

    def find(self, number: int, members: Sequence[Tensor], direct: int = sys.maxsize) -> DDPBucketAssignment:
        """The map of bucket ``number``: the gradients of ``members`` one after the other, each in storage order.

        Stretches of at least ``direct`` elements are its large ones.
        """
        identities = list(map(id, members))
        known = self._known.get(number)
        if known is None or known[:2] != (identities, direct):
            segments = [
                segment
                for member in members
                for segment in self._shards.get(id(member), [BucketSegment(member.numel(), -1, None)])
            ]
            known = (identities, direct, DDPBucketAssignment(segments, self._world_size, self._group_rank, direct))
            self._known[number] = known
        return known[2]
