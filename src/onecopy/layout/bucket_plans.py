"""The ``bucket`` policy: parameters lie in flat buckets, and every bucket is divided among all ranks.

A rank's part of a bucket is one contiguous range, so that gradients are reduced from it and parameters shared into it
where they are. If parameters may be cut, the ranges are equal; otherwise parameters are whole, and lie in the order of
their owners.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from onecopy.layout.policies import by_parameter
from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

LAST_BYTES = 1 << 20
"""The last buckets get smaller, down to this: their gradients come last, with no computation left to hide behind."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: its parameters in the order in which they lie, and which range of it belongs to which rank.

    Attributes:
        params: indices of the parameters.
        offsets: where each begins, in elements.
        bounds: rank r owns ``[bounds[r], bounds[r + 1])``; the last one is the bucket's size.
    """

    params: tuple[int, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The size of the largest range."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    @property
    def numel(self) -> int:
        """How many elements it has, gaps between parameters included."""
        return self.bounds[-1]

    @property
    def equal(self) -> bool:
        """Whether the ranges, the last ones padded, are equally long: what a backend's reduce-scatter takes."""
        return all(bound == min(rank * self.longest, self.numel) for rank, bound in enumerate(self.bounds))

    def range_of(self, group_rank: int) -> tuple[int, int]:
        """What one rank owns."""
        return self.bounds[group_rank], self.bounds[group_rank + 1]


def plan_buckets(
    specs: Sequence[ParamSpec],
    order: Sequence[int],
    world_size: int,
    splittable: bool,
    bucket_bytes: int,
    apart: Collection[int] = (),
) -> tuple[Layout, tuple[BucketPlan, ...]]:
    """Fill buckets with parameters of one kind in the given order, and divide them.

    Args:
        specs: all parameters of one optimizer.
        order: their indices, those whose gradients come first in front.
        world_size: the number of ranks.
        splittable: whether a parameter may be cut.
        bucket_bytes: a bucket is closed with this size, the last ones earlier; one parameter alone may be larger.
        apart: indices of parameters that get a bucket of their own whatever their size.

    Returns:
        The layout, and the buckets in the order in which they are full.
    """
    members = _fill(specs, order, bucket_bytes, apart)
    owners = {}
    if not splittable:
        owners = {shard.param: shard.owner for shard in by_parameter(specs, [0] * world_size, splittable=False)}
    plans, shards = [], []
    for params in members:
        plan = _even_plan(specs, params, world_size) if splittable else _whole_plan(specs, params, owners, world_size)
        plans.append(plan)
        shards += _shards(specs, plan, world_size)
    shards.sort(key=lambda shard: (shard.param, shard.start))
    return Layout(tuple(specs), tuple(shards), world_size), tuple(plans)


def _part(end: int, world_size: int) -> int:
    """The size of every rank's range but the last ones'."""
    return -(-end // (CUT_MULTIPLE * world_size)) * CUT_MULTIPLE


def _fill(
    specs: Sequence[ParamSpec], order: Sequence[int], bucket_bytes: int, apart: Collection[int] = ()
) -> list[list[int]]:
    """Which parameters share a bucket. A parameter that is large enough has one of its own, and so has one ``apart``.

    A bucket is large enough with half of all that is not in one yet, if that is less than ``bucket_bytes``.
    """
    full: list[list[int]] = []
    open_: dict[tuple[object, int], list[int]] = {}
    sizes: dict[tuple[object, int], int] = {}
    left = sum(specs[index].nbytes for index in order if index not in apart)
    for index in order:
        spec = specs[index]
        if index in apart:
            full.append([index])
            continue
        kind = (spec.dtype, spec.device_ordinal)
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
    # Those that are small lie together, because they travel together.
    return [sorted(params, key=lambda index: -specs[index].numel) for params in full + list(open_.values())]


def _even_plan(specs: Sequence[ParamSpec], params: Sequence[int], world_size: int) -> BucketPlan:
    offsets, end = _lay_out(specs, params)
    part = _part(end, world_size)
    bounds = [min(rank * part, end) for rank in range(world_size + 1)]
    return BucketPlan(tuple(params), tuple(offsets), tuple(bounds))


def _whole_plan(
    specs: Sequence[ParamSpec], params: Sequence[int], owners: dict[int, int], world_size: int
) -> BucketPlan:
    ordered = sorted(params, key=lambda index: owners[index])
    offsets, end = _lay_out(specs, ordered)
    bounds = [
        next((offset for offset, index in zip(offsets, ordered, strict=True) if owners[index] >= rank), end)
        for rank in range(world_size)
    ]
    bounds[0] = 0
    return BucketPlan(tuple(ordered), tuple(offsets), (*bounds, end))


def _lay_out(specs: Sequence[ParamSpec], params: Sequence[int]) -> tuple[list[int], int]:
    """Where each parameter begins, on multiples of ``CUT_MULTIPLE``, and where the last one ends."""
    offsets, end = [], 0
    for index in params:
        start = -(-end // CUT_MULTIPLE) * CUT_MULTIPLE
        offsets.append(start)
        end = start + specs[index].numel
    return offsets, end


def _shards(specs: Sequence[ParamSpec], plan: BucketPlan, world_size: int) -> list[Shard]:
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
