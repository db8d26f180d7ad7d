"""Maps of DDP's gradient buckets to owners: which range of a bucket belongs to which rank.

DDP decides which parameters are in a bucket, and may rebuild its buckets. The layout alone decides ownership.
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
    """The bucket of gradients that DDP gives to a communication hook."""

    def index(self) -> int:
        """Return the position of this bucket in the backward pass, from 0."""

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward pass."""

    def buffer(self) -> Tensor:
        """Return the flat gradients of this bucket."""

    def parameters(self) -> list[Tensor]:
        """Return the parameters of this bucket, in the order of their gradients in the buffer."""


@dataclass(frozen=True, slots=True)
class BucketSegment:
    """A range of a bucket's buffer that holds the gradient of one shard.

    Attributes:
        numel: the length of the range.
        layout_index: the position of the shard's layout among the layouts; -1 without a shard.
        shard: the shard, or None if the parameter belongs to no optimizer.
    """

    numel: int
    layout_index: int
    shard: Shard | None


class DDPBucketAssignment:
    """Divides one DDP bucket into segments, each owned by one rank.

    Attributes:
        segments: all segments, in the order of the buffer.
        sizes_per_owner: by rank, how many elements of the bucket it owns.
        in_place_ranges: by rank, the owned ranges that are long enough to be sent without a copy.
        packed_ranges: by rank, the other owned ranges.
        starts_not_owned: by layout, the start of each segment that another rank owns.
    """

    def __init__(
        self, segments: Sequence[BucketSegment], world_size: int, group_rank: int, in_place_numel: int
    ) -> None:
        self.segments = tuple(segments)
        self._sizes = [segment.numel for segment in segments]
        owners = [(segment.shard.owner, position) for position, segment in enumerate(segments) if segment.shard]
        self._by_owner = sorted(owners)
        self._owned_here = [position for owner, position in owners if owner == group_rank]
        self._without_optimizer = [position for position, segment in enumerate(segments) if segment.shard is None]
        self.sizes_per_owner = [0] * world_size
        for owner, position in owners:
            self.sizes_per_owner[owner] += segments[position].numel
        self.starts_not_owned: dict[int, list[int]] = {}
        ranges_per_owner: list[list[slice]] = [[] for _ in range(world_size)]
        start = 0
        for segment in segments:
            stop = start + segment.numel
            if segment.shard is not None and segment.numel:
                ranges = ranges_per_owner[segment.shard.owner]
                # Neighbouring segments of one owner are one range.
                range_start = ranges.pop().start if ranges and ranges[-1].stop == start else start
                ranges.append(slice(range_start, stop))
                if segment.shard.owner != group_rank:
                    self.starts_not_owned.setdefault(segment.layout_index, []).append(start)
            start = stop
        self.in_place_ranges = [
            [each for each in ranges if each.stop - each.start >= in_place_numel] for ranges in ranges_per_owner
        ]
        self.packed_ranges = [
            [each for each in ranges if each.stop - each.start < in_place_numel] for ranges in ranges_per_owner
        ]

    def views_by_owner(self, buffer: Tensor) -> list[Tensor]:
        """Return views of all segments that have an owner, sorted by owner."""
        views = buffer.split(self._sizes)
        return [views[position] for _, position in self._by_owner]

    def owned_views(self, buffer: Tensor) -> list[tuple[BucketSegment, Tensor]]:
        """Return the segments that this rank owns, each with its view of the buffer."""
        views = buffer.split(self._sizes)
        return [(self.segments[position], views[position]) for position in self._owned_here]

    def views_without_optimizer(self, buffer: Tensor) -> list[Tensor]:
        """Return views of the gradients of parameters that belong to no optimizer."""
        if not self._without_optimizer:
            return []
        views = buffer.split(self._sizes)
        return [views[position] for position in self._without_optimizer]


def pack(sources: Sequence[Tensor], scale: float, out: Tensor) -> None:
    """Write the concatenation of tensors, times ``scale``, into ``out``, which may have another data type."""
    if len(sources) * limits.GATHERED_COPY_BYTES <= out.numel() * out.element_size():
        for source, target in zip(sources, out.split([source.numel() for source in sources]), strict=True):
            torch.mul(source, scale, out=target) if scale != 1.0 else target.copy_(source)
    elif sources:
        # For many small tensors one concatenation and one pass for the scale are faster than a call for each.
        concatenated = torch.cat(list(sources))
        out.copy_(concatenated.mul_(scale) if scale != 1.0 else concatenated)


class DDPBucketAssignmentCache:
    """Keeps the assignment of each DDP bucket, and makes a new one when DDP has rebuilt the bucket.

    Attributes:
        layouts: the layouts that decide ownership.
    """

    def __init__(
        self, layouts: Sequence[Layout], params: Sequence[Sequence[Tensor]], world_size: int, group_rank: int
    ) -> None:
        self.layouts = list(layouts)
        self._world_size = world_size
        self._group_rank = group_rank
        self._cached: dict[int, tuple[list[int], int, DDPBucketAssignment]] = {}
        self._segments_of: dict[int, list[BucketSegment]] = {}  # by the identity of the parameter
        for layout_index, (layout, tensors) in enumerate(zip(layouts, params, strict=True)):
            for shard in layout.shards:
                segment = BucketSegment(shard.numel, layout_index, shard)
                self._segments_of.setdefault(id(tensors[shard.param]), []).append(segment)

    def get(
        self, bucket_index: int, params: Sequence[Tensor], in_place_numel: int = sys.maxsize
    ) -> DDPBucketAssignment:
        """Return the assignment of a bucket.

        Args:
            bucket_index: the index of the bucket.
            params: its parameters. The buffer holds their gradients one after the other, each in storage order.
            in_place_numel: ranges of at least this many elements are sent in place.
        """
        identities = list(map(id, params))
        cached = self._cached.get(bucket_index)
        if cached is None or cached[:2] != (identities, in_place_numel):
            segments = [
                segment
                for param in params
                for segment in self._segments_of.get(id(param), [BucketSegment(param.numel(), -1, None)])
            ]
            assignment = DDPBucketAssignment(segments, self._world_size, self._group_rank, in_place_numel)
            cached = self._cached[bucket_index] = (identities, in_place_numel, assignment)
        return cached[2]
