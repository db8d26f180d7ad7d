"""Partition policies compute shards from parameter specs and a number of ranks.

Every policy assigns new parameters and takes into account how many elements each rank owns already. A group that is
added later moves no shard. Ties go to the lowest rank, and parameters of equal size keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby

from onecopy.layout.costs import owners_by_cost
from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

OwnerFunction = Callable[[Sequence[ParamSpec], int], Iterable["int | Sequence[Shard]"]]
"""A function of specs and world size that returns for each parameter its owner's group rank, or its shards."""

ShardBy = str | OwnerFunction

Splittable = bool | Sequence[bool]
"""Whether parameters may be cut: for each parameter group, or for all of them."""

SLACK = 1000
"""The number of elements up to which a parameter is not cut, so that small models are not."""


def default_shard_by(splittable: bool) -> str:
    """The policy of optimizers that name none: even cuts where the class works element by element, else no cut.

    Even cuts make every bucket of DDP one reduce-scatter of equal parts, however DDP has made its buckets.
    """
    return "element" if splittable else "parameter"


def extend(
    layout: Layout | None,
    specs: Sequence[ParamSpec],
    world_size: int,
    shard_by: ShardBy | None,
    splittable: Splittable,
) -> Layout:
    """Return a layout with the shards of ``layout`` and with shards for the new parameters of ``specs``.

    The indices of ``specs`` follow those of the layout. Without ``shard_by`` each group has its default policy. All
    parameters that stay whole are assigned together, before parameters are cut.
    """
    loads = list(layout.elements_per_rank) if layout is not None else [0] * world_size
    shards: list[Shard] = []
    if callable(shard_by):
        shards += _by_function(shard_by, specs, world_size, splittable)
    else:
        if shard_by not in (None, "parameter", "element"):
            raise ValueError(f"shard_by must be 'parameter', 'element' or a function, got {shard_by!r}")
        whole, groups = list[ParamSpec](), list[list[ParamSpec]]()
        for _, group in groupby(specs, key=lambda spec: spec.group):
            members = list(group)
            policy = shard_by or default_shard_by(may_cut(splittable, members[0]))
            if policy == "parameter":
                whole += members
            elif may_cut(splittable, members[0]):
                groups.append(members)
            else:
                raise ValueError(
                    f"shard_by='element' cuts parameters, but the optimizer class of parameter group "
                    f"{members[0].group} (with {members[0].name!r}) is not known to work element by element; pass "
                    "elementwise=True if it does, or use shard_by='parameter'"
                )
        costs = [0.0] * world_size
        if layout is not None:
            for shard in filter(layout.is_whole, layout.shards):
                costs[shard.owner] += layout.params[shard.param].cost
        for placed in chain([by_cost(whole, loads, costs)], (by_element(members, loads) for members in groups)):
            for shard in placed:
                loads[shard.owner] += shard.numel
            shards += placed
    shards.sort(key=lambda shard: (shard.param, shard.start))
    if layout is None:
        return Layout(tuple(specs), tuple(shards), world_size)
    return Layout((*layout.params, *specs), (*layout.shards, *shards), world_size)


def may_cut(splittable: Splittable, spec: ParamSpec) -> bool:
    """Whether a parameter may be cut."""
    return splittable if isinstance(splittable, bool) else splittable[spec.group]


def by_cost(specs: Sequence[ParamSpec], loads: Sequence[int], costs: Sequence[float]) -> list[Shard]:
    """Assign whole parameters so that the costs are balanced, or the elements if the costs are elements.

    ``loads`` and ``costs`` are the elements and the costs that each rank has already.
    """
    if all(spec.cost == spec.numel for spec in specs):
        return by_parameter(specs, loads)
    owners = owners_by_cost(specs, costs, loads)
    return [Shard(spec.index, 0, spec.numel, owners[spec.index]) for spec in specs]


def by_parameter(specs: Sequence[ParamSpec], loads: Sequence[int]) -> list[Shard]:
    """Assign whole parameters, the largest first, each to the least-loaded rank."""
    heap = [(load, group_rank) for group_rank, load in enumerate(loads)]
    heapq.heapify(heap)
    shards = []
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        load, group_rank = heap[0]
        heapq.heapreplace(heap, (load + spec.numel, group_rank))
        shards.append(Shard(spec.index, 0, spec.numel, group_rank))
    return shards


def by_element(specs: Sequence[ParamSpec], loads: Sequence[int]) -> list[Shard]:
    """Cut every parameter into even ranges, one per rank, and assign tiny ones whole to the least-loaded rank."""
    world_size = len(loads)
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
    return shards + by_parameter(tiny, after)


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


def _by_function(
    function: OwnerFunction, specs: Sequence[ParamSpec], world_size: int, splittable: Splittable
) -> list[Shard]:
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
        if len(pieces) > 1 and not may_cut(splittable, spec):
            raise ValueError(
                f"the shard_by function cuts parameter {spec.name!r}, but the optimizer class is not known to work "
                "element by element; pass elementwise=True if it does"
            )
        shards += pieces
    return shards
