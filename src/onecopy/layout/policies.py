"""Partition policies: from parameter specs and a number of ranks to shards.

Every policy places the new parameters of one group given what the ranks already hold, so that a group added later
moves nothing. Ties go to the lowest rank, and parameters of equal size keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

OwnerFunction = Callable[[Sequence[ParamSpec], int], Iterable["int | Sequence[Shard]"]]
"""From specs and world size to one entry per parameter: its owner's group rank, or the shards it is cut into."""

ShardBy = str | OwnerFunction

TOLERANCE = 0.01
"""A rank may hold this much more than the mean before a parameter is cut."""

SLACK = 1000
"""... and never less than this many elements, so that small models stay whole."""


def extend(
    layout: Layout | None, specs: Sequence[ParamSpec], world_size: int, shard_by: ShardBy, splittable: bool
) -> Layout:
    """Return ``layout`` with ``specs`` placed too; what it already places stays where it is.

    Args:
        layout: what is placed already, or None.
        specs: the new parameters, in order, with indices that follow the layout's.
        world_size: the number of ranks.
        shard_by: ``"parameter"``, ``"element"`` or a function.
        splittable: whether the optimizer works element by element, so that a parameter may be cut.
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
    """Largest first to the least-loaded rank; cut only what fits nowhere.

    A parameter that would push even the least-loaded rank over the cap is set aside and then poured, range by range,
    into the room that is left. What is at most ``SLACK`` elements always fits, so only large parameters are cut.
    """
    cap = _cap(specs, loads)
    heap = [(load, group_rank) for group_rank, load in enumerate(loads)]
    heapq.heapify(heap)
    shards, aside = [], []
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        load, group_rank = heap[0]
        if splittable and load + spec.numel > cap and spec.numel > CUT_MULTIPLE and len(loads) > 1:
            aside.append(spec)
            continue
        heapq.heapreplace(heap, (load + spec.numel, group_rank))
        shards.append(Shard(spec.index, 0, spec.numel, group_rank))
    return shards + _pour(aside, sorted(heap, key=lambda entry: entry[1]))


def by_element(specs: Sequence[ParamSpec], loads: Sequence[int], splittable: bool) -> list[Shard]:
    """Cut every parameter into even ranges, one per rank; tiny ones go whole to the least-loaded rank."""
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
    """One rank's range when ``numel`` elements are cut evenly, in closed form.

    Units of ``CUT_MULTIPLE`` elements are dealt to the ranks in turn, beginning where the ``dealt`` elements of earlier
    parameters left off. A rank that got a parameter's short last unit is the next one's first, so that neither the
    units left over nor the short ones collect on one rank. Ranges lie in turn order, with the short unit at the end.
    """
    units = -(-numel // CUT_MULTIPLE)
    base, extra = divmod(units, world_size)
    turn = (group_rank - dealt // CUT_MULTIPLE - units) % world_size
    longer_before = max(0, turn - (world_size - extra))
    start = turn * base + longer_before
    stop = start + base + (turn >= world_size - extra)
    return min(start * CUT_MULTIPLE, numel), min(stop * CUT_MULTIPLE, numel)


def _cap(specs: Sequence[ParamSpec], loads: Sequence[int]) -> float:
    mean = (sum(loads) + sum(spec.numel for spec in specs)) / len(loads)
    return mean + max(mean * TOLERANCE, SLACK)


def _pour(specs: Sequence[ParamSpec], loads: Sequence[tuple[int, int]]) -> list[Shard]:
    """Cut ``specs`` into the ranks' free room, filled up to one common level."""
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
            # A parameter's last piece may be shorter than a unit; the room it leaves is given up, not split.
            free -= _round_up(stop - start)
            start = stop
    return shards


def _level(volume: int, loads: Sequence[int]) -> int:
    """How high the ranks stand once ``volume`` has been poured over ``loads`` (ascending)."""
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
