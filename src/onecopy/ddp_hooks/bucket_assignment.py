"""Maps of DDP's gradient buckets to owners: which range of a bucket belongs to which rank.

DDP decides which parameters are in a bucket, and may rebuild its buckets. The layout alone decides ownership.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from onecopy.comm.range_reduction import GradientRange
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
        ranges: the ranges of the buffer that have an owner. Neighbours with one owner and layout are one range.
        owned_params: the parameters that belong to an optimizer, each with this rank's shard, or None if it has none.
    """

    def __init__(
        self, segments: Sequence[BucketSegment], owned_params: Sequence[tuple[Tensor, Shard | None]], group_rank: int
    ) -> None:
        self.segments = tuple(segments)
        self.owned_params = tuple(owned_params)
        self._sizes = [segment.numel for segment in segments]
        self._owned_here = [
            position
            for position, each in enumerate(segments)
            if each.shard is not None and each.shard.owner == group_rank
        ]
        self._without_optimizer = [position for position, segment in enumerate(segments) if segment.shard is None]
        self.ranges: list[GradientRange] = []
        for segment, start in zip(segments, self._starts(), strict=True):
            if segment.shard is not None and segment.numel:
                made = GradientRange(start, start + segment.numel, segment.shard.owner, segment.layout_index)
                last = self.ranges[-1] if self.ranges else None
                if last is not None and (last.stop, last.owner, last.optimizer) == (start, made.owner, made.optimizer):
                    made = replace(self.ranges.pop(), stop=made.stop)
                self.ranges.append(made)

    def _starts(self) -> list[int]:
        """Return the start of each segment in the buffer."""
        return [0, *accumulate(self._sizes)][:-1]

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


class DDPBucketAssignmentCache:
    """Keeps the assignment of each DDP bucket, and makes a new one when DDP has rebuilt the bucket.

    Attributes:
        layouts: the layouts that decide ownership.
    """

    def __init__(self, layouts: Sequence[Layout], params: Sequence[Sequence[Tensor]], group_rank: int) -> None:
        self.layouts = list(layouts)
        self._group_rank = group_rank
        self._cached: dict[int, tuple[list[int], DDPBucketAssignment]] = {}
        self._segments_of: dict[int, list[BucketSegment]] = {}  # by the identity of the parameter
        for layout_index, (layout, tensors) in enumerate(zip(layouts, params, strict=True)):
            for shard in layout.shards:
                segment = BucketSegment(shard.numel, layout_index, shard)
                self._segments_of.setdefault(id(tensors[shard.param]), []).append(segment)

    def get(self, bucket_index: int, params: Sequence[Tensor]) -> DDPBucketAssignment:
        """Return the assignment of a bucket.

        Args:
            bucket_index: the index of the bucket.
            params: its parameters. The buffer holds their gradients one after the other, each in storage order.
        """
        identities = list(map(id, params))
        cached = self._cached.get(bucket_index)
        if cached is None or cached[0] != identities:
            segments, owned_params = [], []
            for param in params:
                found = self._segments_of.get(id(param))
                segments += found or [BucketSegment(param.numel(), -1, None)]
                if found:
                    shards = [each.shard for each in found if each.shard is not None]
                    owned_params.append((param, next((s for s in shards if s.owner == self._group_rank), None)))
            cached = (identities, DDPBucketAssignment(segments, owned_params, self._group_rank))
            self._cached[bucket_index] = cached
        return cached[1]
