"""Maps of DDP's gradient buckets to owners: which range of a bucket belongs to which rank.

DDP decides which parameters are in a bucket, and may rebuild its buckets. The layout alone decides ownership.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor

from onecopy.comm.reduce_scatter import Piece
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
class ParamInBucket:
    """A parameter of a bucket that belongs to an optimizer."""

    param: Tensor
    layout_index: int  # the position of its layout among the layouts
    index: int  # the position of the parameter in the layout
    shard: Shard | None  # this rank's shard of it, or None
    start: int  # the position of the shard's gradient in the buffer

    def owned_view(self, buffer: Tensor) -> Tensor:
        """Return the view of the buffer that is this rank's part of the gradient."""
        return buffer[self.start : self.start + (0 if self.shard is None else self.shard.numel)]


class DDPBucketAssignment:
    """Divides one DDP bucket into ranges that one rank each owns."""

    def __init__(
        self,
        params: Sequence[Tensor],
        shards_of: Mapping[int, tuple[int, Sequence[Shard]]],
        group_rank: int,
    ) -> None:
        self.plans: dict[object, Any] = {}  # what a hook has planned for the bucket
        self._sizes = [param.numel() for param in params]
        self._without_optimizer: list[int] = []
        self.params: list[ParamInBucket] = []  # that belong to an optimizer
        ranges: list[tuple[int, int, int]] = []  # owner, start, stop
        for position, (param, start) in enumerate(zip(params, [0, *accumulate(self._sizes)], strict=False)):
            if id(param) not in shards_of:
                self._without_optimizer.append(position)
                continue
            layout_index, shards = shards_of[id(param)]
            mine = next((shard for shard in shards if shard.owner == group_rank), None)
            own_start = start if mine is None else start + mine.start
            self.params.append(ParamInBucket(param, layout_index, shards[0].param, mine, own_start))
            for shard in shards:
                first, stop = start + shard.start, start + shard.stop
                if ranges and (ranges[-1][0], ranges[-1][2]) == (shard.owner, first):
                    first = ranges.pop()[1]
                if first < stop:
                    ranges.append((shard.owner, first, stop))
        ends: dict[int, int] = {}
        self.pieces: list[Piece] = []  # with an owner. Neighbours with one owner are one piece
        for owner, start, stop in sorted(ranges):
            self.pieces.append(Piece(0, start, stop, owner, ends.get(owner, 0)))
            ends[owner] = ends.get(owner, 0) + stop - start

    def views_without_optimizer(self, buffer: Tensor) -> list[Tensor]:
        """Return views of the gradients of parameters that belong to no optimizer."""
        views = buffer.split(self._sizes) if self._without_optimizer else ()
        return [views[position] for position in self._without_optimizer]


class DDPBucketAssignmentCache:
    """Keeps the assignment of each DDP bucket, and makes a new one when DDP has rebuilt the bucket."""

    def __init__(self, layouts: Sequence[Layout], params: Sequence[Sequence[Tensor]], group_rank: int) -> None:
        self.layouts = list(layouts)  # that decide ownership
        self._group_rank = group_rank
        self._cached: dict[int, tuple[list[int], DDPBucketAssignment]] = {}
        self._shards_of: dict[int, tuple[int, list[Shard]]] = {}  # by the identity of the parameter
        for layout_index, (layout, tensors) in enumerate(zip(layouts, params, strict=True)):
            for shard in layout.shards:
                self._shards_of.setdefault(id(tensors[shard.param]), (layout_index, []))[1].append(shard)

    def get(self, bucket_index: int, params: Sequence[Tensor]) -> DDPBucketAssignment:
        """Return the assignment of a bucket, which has the gradients of these parameters, each in storage order."""
        identities = list(map(id, params))
        cached = self._cached.get(bucket_index)
        if cached is None or cached[0] != identities:
            assignment = DDPBucketAssignment(params, self._shards_of, self._group_rank)
            cached = self._cached[bucket_index] = (identities, assignment)
        return cached[1]
