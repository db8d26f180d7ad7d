"""Partition policies compute shards from parameter specs and a number of ranks.

Every policy assigns the new parameters of one group and takes into account how many elements each rank owns already. A
group that is added later moves no shard. Ties go to the lowest rank, and parameters of equal size keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

OwnerFunction = Callable[[Sequence[ParamSpec], int], Iterable["int | Sequence[Shard]"]]
"""A function of specs and world size that returns for each parameter its owner's group rank, or its shards."""

ShardBy = str | OwnerFunction

TOLERANCE = 0.01
"""The part of the mean by which a rank may own more than the mean before a parameter is cut."""

SLACK = 1000
"""The number of elements by which a rank may always own more than the mean, so that small models are not cut."""


def default_shard_by(splittable: bool) -> str:
    """The policy of optimizers that name none: even cuts where the class works element by element, else no cut.

    Even cuts make every bucket of DDP one reduce-scatter of equal parts, however DDP has made its buckets.
    """
    return "element" if splittable else "parameter"


def extend(
    layout: Layout | None, specs: Sequence[ParamSpec], world_size: int, shard_by: ShardBy, splittable: bool
) -> Layout:
    """Return a layout with the shards of ``layout`` and with shards for the new parameters of ``specs``.

    The indices of ``specs`` follow those of the layout. Parameters may be cut if the optimizer is ``splittable``.
    """
    loads = list(layout.elements_per_rank) if layout is not None else [0] * world_size
    shards: list[Shard] = []
    if callable(shard_by):
        shards += _by_function(shard_by, specs, world_size, splittable)
    else:
        place = {"parameter": by_parameter, "element": by_element}.get(shard_by)
        if place is None:
            raise ValueError(f"shard_by must be 'parameter', 'element' or a function, got {shard_by!r}")
        for _, group in groupby(specs, key=lambda spec: spec.group):
            placed = place(list(group), loads, splittable)
            for shard in placed:
                loads[shard.owner] += shard.numel
            shards += placed
    shards.sort(key=lambda shard: (shard.param, shard.start))
    if layout is None:
        return Layout(tuple(specs), tuple(shards), world_size)
    return Layout((*layout.params, *specs), (*layout.shards, *shards), world_size)


def by_parameter(specs: Sequence[ParamSpec], loads: Sequence[int], splittable: bool) -> list[Shard]:
    """Assign the largest parameter first, each to the least-loaded rank, and cut parameters that fit on no rank.

    A parameter that would bring even the least-loaded rank over the limit is cut at the end, and its ranges fill the
    ranks up to a common level. A parameter of at most ``SLACK`` elements always fits, so only large ones are cut.
    """
    limit = _limit(specs, loads)
    heap = [(load, group_rank) for group_rank, load in enumerate(loads)]
    heapq.heapify(heap)
    shards, to_cut = [], []
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        load, group_rank = heap[0]
        if splittable and load + spec.numel > limit and spec.numel > CUT_MULTIPLE and len(loads) > 1:
            to_cut.append(spec)
            continue
        heapq.heapreplace(heap, (load + spec.numel, group_rank))
        shards.append(Shard(spec.index, 0, spec.numel, group_rank))
    return shards + _cut_to_fill(to_cut, sorted(heap, key=lambda entry: entry[1]))


def by_element(specs: Sequence[ParamSpec], loads: Sequence[int], splittable: bool) -> list[Shard]:
    """Cut every parameter into even ranges, one per rank, and assign tiny ones whole to the least-loaded rank."""
    world_size = len(loads)
    if not splittable:
        raise ValueError(
            "shard_by='element' cuts parameters, but the optimizer class is not known to work element by element; "
            "pass elementwise=True if it does, or use shard_by='parameter'"
        )
    shards, tiny, after = [], [], list(loads)
    dealt = sum(loads)
    for spec in specs:
        if spec.numel <= SLACK:
            tiny.append(spec)
            continue
        for group_rank in range(world_size):
            start, stop = even_range(spec.numel, world_size, dealt, group_rank)
            if start < stop:
                shards.append(Shard(spec.index, start, stop, group_rank))
                after[group_rank] += stop - start
        dealt += spec.numel
    heap = [(load, group_rank) for group_rank, load in enumerate(after)]
    heapq.heapify(heap)
    for spec in sorted(tiny, key=lambda spec: -spec.numel):
        load, group_rank = heap[0]
        heapq.heapreplace(heap, (load + spec.numel, group_rank))
        shards.append(Shard(spec.index, 0, spec.numel, group_rank))
    return shards


def even_range(numel: int, world_size: int, dealt: int, group_rank: int) -> tuple[int, int]:
    """Return one rank's range of a parameter with ``numel`` elements that is cut evenly.

    Units of ``CUT_MULTIPLE`` elements are dealt to the ranks in turn. The first turn follows from ``dealt``, the number
    of elements of all earlier parameters: the rank that got the short last unit of one parameter comes first for the
    next parameter. So neither extra units nor short units collect on one rank. Ranges lie in the order of the turns,
    with the short unit at the end.
    """
    units = -(-numel // CUT_MULTIPLE)
    base, extra = divmod(units, world_size)
    turn = (group_rank - dealt // CUT_MULTIPLE - units) % world_size
    longer_before = max(0, turn - (world_size - extra))
    start = turn * base + longer_before
    stop = start + base + (turn >= world_size - extra)
    return min(start * CUT_MULTIPLE, numel), min(stop * CUT_MULTIPLE, numel)


def _limit(specs: Sequence[ParamSpec], loads: Sequence[int]) -> float:
    """Return the number of elements above which a rank owns too many."""
    mean = (sum(loads) + sum(spec.numel for spec in specs)) / len(loads)
    return mean + max(mean * TOLERANCE, SLACK)


def _cut_to_fill(specs: Sequence[ParamSpec], loads: Sequence[tuple[int, int]]) -> list[Shard]:
    """Cut parameters so that their ranges fill the ranks up to one common number of elements."""
    if not specs:
        return []
    level = _level(sum(_round_up(spec.numel) for spec in specs), sorted(load for load, _ in loads))
    room = [(group_rank, _round_up(level - load)) for load, group_rank in loads if load < level]
    shards: list[Shard] = []
    group_rank, free = room.pop(0)
    for spec in specs:
        start = 0
        while start < spec.numel:
            if free == 0:
                group_rank, free = room.pop(0)
            stop = min(start + free, spec.numel)
            shards.append(Shard(spec.index, start, stop, group_rank))
            # A parameter's last range may be shorter than a unit. The rest of that unit stays empty.
            free -= _round_up(stop - start)
            start = stop
    return shards


def _level(volume: int, loads: Sequence[int]) -> int:
    """Return the common level of the ranks that get ``volume`` further elements; ``loads`` are ascending."""
    below = 0
    for count, load in enumerate(loads, start=1):
        below += load
        level = -(-(volume + below) // count)
        if count == len(loads) or level <= loads[count]:
            return level
    raise AssertionError("unreachable: the last rank always returns")


def _round_up(numel: int) -> int:
    return -(-numel // CUT_MULTIPLE) * CUT_MULTIPLE


def _by_function(function: OwnerFunction, specs: Sequence[ParamSpec], world_size: int, splittable: bool) -> list[Shard]:
    """Return the shards that a user's function assigns, after checking its answer."""
    answer = function(specs, world_size)
    if not isinstance(answer, Iterable):
        raise ValueError(f"the shard_by function must return one owner per parameter, got {answer!r}")
    owners = list(answer)
    if len(owners) != len(specs):
        raise ValueError(f"the shard_by function returned {len(owners)} owners for {len(specs)} parameters")
    shards: list[Shard] = []
    for spec, owner in zip(specs, owners, strict=True):
        if isinstance(owner, int):
            shards.append(Shard(spec.index, 0, spec.numel, owner))
            continue
        pieces = list(owner) if isinstance(owner, Iterable) else [owner]
        if not all(isinstance(piece, Shard) and piece.param == spec.index for piece in pieces):
            raise ValueError(
                f"the shard_by function must return a group rank or shards of that parameter for {spec.name!r}, "
                f"got {owner!r}"
            )
        if len(pieces) > 1 and not splittable:
            raise ValueError(
                f"the shard_by function cuts parameter {spec.name!r}, but the optimizer class is not known to work "
                "element by element; pass elementwise=True if it does"
            )
        shards += pieces
    return shards
