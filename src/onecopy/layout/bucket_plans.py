"""The ``bucket`` policy: parameters lie in flat buckets, and every bucket is divided among all ranks.

A rank owns one contiguous range of each bucket, so that a bucket's gradients can be reduce-scattered and its parameters
shared in place. If its parameters may be cut, the ranges are equally long. Otherwise every parameter has one owner, and
the parameters of the bucket are ordered by owner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onecopy.layout.policies import Splittable, by_cost, may_cut
from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

LAST_BYTES = 1 << 20
"""The least size of the last buckets. They are small because no computation is left to hide their reduction."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The parameters of one bucket with their offsets, and the range of the bucket that each rank owns.

    Attributes:
        params: indices of the parameters, in the order of their offsets.
        offsets: the offset of each parameter in the bucket, in elements.
        bounds: rank r owns ``[bounds[r], bounds[r + 1])``; the last bound is the bucket's size.
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The number of elements of the longest range."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    @property
    def numel(self) -> int:
        """The number of elements of the bucket, gaps between parameters included."""
        return self.bounds[-1]

    @property
    def equal(self) -> bool:
        """Whether all ranges are equally long once a few elements are added at the bucket's end."""
        ranks, longest = len(self.bounds) - 1, self.longest
        if longest * ranks - self.numel >= CUT_MULTIPLE * ranks:
            return False  # uneven by design: one rank may own everything
        return all(bound == min(rank * longest, self.numel) for rank, bound in enumerate(self.bounds))

    @property
    def padded_numel(self) -> int:
        """The number of elements to allocate, so that an equal plan can be cut into parts of the same length."""
        return self.longest * (len(self.bounds) - 1) if self.equal else self.numel

    @property
    def padded_parts(self) -> tuple[int, ...]:
        """The number of elements of each rank's part of the allocated bucket."""
        if self.equal:
            return (self.longest,) * (len(self.bounds) - 1)
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def range_of(self, group_rank: int) -> tuple[int, int]:
        """The start and the end of the range that one rank owns."""
        return self.bounds[group_rank], self.bounds[group_rank + 1]


def bucket_plans(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    world_size: int,
    splittable: Splittable,
    bucket_bytes: int,
    frozen: Collection[int] = (),
) -> tuple[BucketPlan, ...]:
    """Put parameters into buckets in the given order, and divide every bucket among the ranks.

    All parameters of a bucket have the same data type and device, all or none of them are frozen, and all or none may
    be cut. A bucket is closed at ``bucket_bytes``, the last ones earlier. A single parameter may be larger. The buckets
    are returned in the order in which their gradients are complete, those of frozen parameters last.
    """
    kinds = [[index for index in order if (index in frozen) is is_frozen] for is_frozen in (False, True)]
    whole = {spec.index for spec in specs if not may_cut(splittable, spec)}
    members = [params for kind in kinds for params in _fill(specs, kind, bucket_bytes, whole)]
    owners = _whole_owners([specs[index] for index in sorted(whole)], world_size, frozen)
    return tuple(
        _whole_plan(specs, params, owners, world_size) if params[0] in whole else _even_plan(specs, params, world_size)
        for params in members
    )


def plan_buckets(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    world_size: int,
    splittable: Splittable,
    bucket_bytes: int,
    frozen: Collection[int] = (),
) -> tuple[Layout, tuple[BucketPlan, ...]]:
    """Return the buckets of :func:`bucket_plans`, and with them the layout, which lists the shards of every rank."""
    plans = bucket_plans(specs, order, world_size, splittable, bucket_bytes, frozen)
    shards = [shard for plan in plans for shard in _shards(specs, plan, world_size)]
    return Layout(tuple(specs), tuple(sorted(shards, key=lambda shard: (shard.param, shard.start))), world_size), plans


def restricted(plan: BucketPlan, specs: Sequence[ParamSpec], chosen: Collection[int]) -> BucketPlan:
    """The plan of a bucket with only the chosen parameters. Each rank owns the same range of each of them."""
    kept = [(index, offset) for index, offset in zip(plan.params, plan.offsets, strict=True) if index in chosen]
    params = [index for index, _ in kept]
    offsets, end = _lay_out(specs, params)

    def moved(bound: int) -> int:
        for (index, old), new in zip(kept, offsets, strict=True):
            if old + specs[index].numel > bound:
                return new + max(bound - old, 0)
        return end

    return BucketPlan(tuple(params), tuple(offsets), (0, *map(moved, plan.bounds[1:])))


def _whole_owners(specs: Sequence[ParamSpec], world_size: int, frozen: Collection[int] = ()) -> dict[int, int]:
    """Return the owner of each parameter if parameters may not be cut; trainable ones are balanced first."""
    owners: dict[int, int] = {}
    loads, costs = [0] * world_size, [0.0] * world_size
    for is_frozen in (False, True):
        members = [spec for spec in specs if (spec.index in frozen) is is_frozen]
        cost = {spec.index: spec.cost for spec in members}
        for shard in by_cost(members, loads, costs):
            owners[shard.param] = shard.owner
            loads[shard.owner] += shard.numel
            costs[shard.owner] += cost[shard.param]
    return owners


def _part(end: int, world_size: int) -> int:
    """Return the size of a rank's range; only the last ranges may be shorter."""
    return -(-end // (CUT_MULTIPLE * world_size)) * CUT_MULTIPLE


def _fill(
    specs: Sequence[ParamSpec], order: Sequence[int], bucket_bytes: int, whole: Collection[int]
) -> list[list[int]]:
    """Return the parameters of each bucket; those in ``whole`` are in buckets of their own.

    A bucket is closed at ``bucket_bytes``, or at half of the bytes that are in no closed bucket yet if that is less. A
    parameter of that size gets its own bucket.
    """
    full: list[list[int]] = []
    open_: dict[tuple[object, int, bool], list[int]] = {}
    sizes: dict[tuple[object, int, bool], int] = {}
    left = sum(specs[index].nbytes for index in order)
    for index in order:
        spec = specs[index]
        kind = (spec.dtype, spec.device_ordinal, index in whole)
        enough = min(bucket_bytes, max(left // 2, LAST_BYTES))
        if spec.nbytes >= enough:
            full.append([index])
            left -= spec.nbytes
            continue
        open_.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + spec.nbytes
        if sizes[kind] >= enough:
            left -= sizes[kind]
            full.append(open_.pop(kind))
            sizes.pop(kind)
    # Small parameters are neighbours, because their ranges are packed into common messages.
    return [sorted(params, key=lambda index: -specs[index].numel) for params in full + list(open_.values())]


def _even_plan(specs: Sequence[ParamSpec], params: Sequence[int], world_size: int) -> BucketPlan:
    """Plan a bucket that is divided into equally long ranges."""
    offsets, end = _lay_out(specs, params)
    part = _part(end, world_size)
    bounds = [min(rank * part, end) for rank in range(world_size + 1)]
    return BucketPlan(tuple(params), tuple(offsets), tuple(bounds))


def _whole_plan(
    specs: Sequence[ParamSpec], params: Sequence[int], owners: dict[int, int], world_size: int
) -> BucketPlan:
    """Plan a bucket whose parameters each have one owner."""
    ordered = sorted(params, key=lambda index: owners[index])
    offsets, end = _lay_out(specs, ordered)
    bounds = [
        (*offsets, end)[bisect_left(ordered, rank, key=lambda index: owners[index])] for rank in range(world_size)
    ]
    bounds[0] = 0
    return BucketPlan(tuple(ordered), tuple(offsets), (*bounds, end))


def _lay_out(specs: Sequence[ParamSpec], params: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of each parameter, a multiple of ``CUT_MULTIPLE``, and the end of the last parameter."""
    offsets, end = [], 0
    for index in params:
        start = -(-end // CUT_MULTIPLE) * CUT_MULTIPLE
        offsets.append(start)
        end = start + specs[index].numel
    return offsets, end


def _shards(specs: Sequence[ParamSpec], plan: BucketPlan, world_size: int) -> list[Shard]:
    """Return the shards of all parameters of a bucket."""
    shards = []
    for index, offset in zip(plan.params, plan.offsets, strict=True):
        numel = specs[index].numel
        found = []
        for owner in range(world_size):
            start, stop = plan.range_of(owner)
            start, stop = max(start - offset, 0), min(stop - offset, numel)
            if start < stop:
                found.append(Shard(index, start, stop, owner))
        shards += found or [Shard(index, 0, 0, 0)]
    return shards
