"""The bytes that each rank owns, computed for thousands of ranks without a layout that lists every shard."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onecopy.layout import CUT_MULTIPLE, ParamSpec, ShardBy, extend
from onecopy.layout.policies import SLACK


def owned_bytes(
    specs: Sequence[ParamSpec], parts: Sequence[Sequence[int]], ranks: int, shard_by: ShardBy, splittable: bool
) -> Tensor:
    """Return the bytes that each rank owns of each part of a model: one row per part, one column per rank.

    Args:
        specs: all parameters of one optimizer.
        parts: indices of the parameters of each part, such as a DDP bucket.
        ranks: the number of ranks.
        shard_by: how parameters are divided, as in ``ZeroRedundancyOptimizer``.
        splittable: whether a parameter may be cut.
    """
    part_of = {index: part for part, params in enumerate(parts) for index in params}
    table = torch.zeros(len(parts), ranks, dtype=torch.int64)
    if shard_by == "element" and splittable:
        for index, lengths in _element_lengths(specs, ranks):
            if index in part_of:
                table[part_of[index]] += lengths * specs[index].dtype.itemsize
        return table
    shards = [shard for shard in extend(None, specs, ranks, shard_by, splittable).shards if shard.param in part_of]
    position = torch.tensor([part_of[shard.param] * ranks + shard.owner for shard in shards], dtype=torch.int64)
    nbytes = torch.tensor([shard.numel * specs[shard.param].dtype.itemsize for shard in shards], dtype=torch.int64)
    table.view(-1).index_add_(0, position, nbytes)
    return table


def _element_lengths(specs: Sequence[ParamSpec], ranks: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter with the number of its elements on every rank, as the policy ``element`` deals them.

    The policy deals the groups one after the other, and the tiny parameters of a group after its other ones.
    """
    loads = torch.zeros(ranks, dtype=torch.int64)
    for group in dict.fromkeys(spec.group for spec in specs):
        members = [spec for spec in specs if spec.group == group]
        dealt = int(loads.sum())
        for spec in members:
            if spec.numel > SLACK:
                lengths = even_lengths(spec.numel, ranks, dealt)
                dealt += spec.numel
                loads += lengths
                yield spec.index, lengths
        heap = [(load, group_rank) for group_rank, load in enumerate(loads.tolist())]
        heapq.heapify(heap)
        for spec in sorted((spec for spec in members if spec.numel <= SLACK), key=lambda spec: -spec.numel):
            load, group_rank = heap[0]
            heapq.heapreplace(heap, (load + spec.numel, group_rank))
            lengths = torch.zeros(ranks, dtype=torch.int64)
            lengths[group_rank] = spec.numel
            loads += lengths
            yield spec.index, lengths


def even_lengths(numel: int, ranks: int, dealt: int) -> Tensor:
    """Return the lengths of all ranks' ranges of :func:`onecopy.layout.even_range`, for a parameter with elements."""
    units = -(-numel // CUT_MULTIPLE)
    base, extra = divmod(units, ranks)
    by_turn = torch.full((ranks,), base * CUT_MULTIPLE, dtype=torch.int64)
    by_turn[ranks - extra :] += CUT_MULTIPLE
    by_turn[-1] -= units * CUT_MULTIPLE - numel  # the last unit may be short
    return by_turn.roll((dealt // CUT_MULTIPLE + units) % ranks)
