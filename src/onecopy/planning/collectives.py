"""The collectives of one training step, computed from the plan of each way of training, for any number of ranks.

One call of ``torch.distributed`` with parts of different lengths is several operations, as NCCL runs it: a broadcast or
a reduce for each rank that owns a part, in one group.

Not counted: the broadcast of buffers, clipping, and everything that happens outside of a usual step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.agreement import VOTE_BYTES
from onecopy.layout import CUT_MULTIPLE, ParamSpec, bucket_plans, default_shard_by, extend
from onecopy.layout.policies import SLACK, by_parameter
from onecopy.planning.models import Model

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 1 << 20, 25 << 20
"""The sizes at which DDP closes its first bucket and the other ones."""

VOTE_BYTES_PER_PARAM = 16
"""The bytes per parameter in the vote at the end of a backward pass of ``ShardedDataParallel``."""


class Way(Enum):
    """A way of training: which wrapper and which optimizer class a script uses."""

    DDP = "DDP"
    LEVEL_1 = "level 1"
    OVERLAP = "overlap hooks"
    LEVEL_2 = "level 2"
    LEVEL_3 = "level 3"


class Kind(Enum):
    """A kind of collective."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    VOTE = "vote"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call."""

    kind: Kind
    nbytes: int  # the bytes of all parts together, padding included
    ranks: int  # the number of ranks that take part
    operations: int = 1  # the number of operations as the backend runs them

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends, on average over the ranks, in an algorithm that sends no more than it must."""
        once = self.nbytes * (self.ranks - 1) / self.ranks
        return 2 * once if self.kind is Kind.ALL_REDUCE else once


def collectives_of(way: Way, model: Model, ranks: int) -> tuple[Collective, ...]:
    """Return the collectives of one step on one rank."""
    if ranks < 1:
        raise ValueError(f"there must be at least one rank, got {ranks}")
    found = _of_level_3(model, ranks) if way is Way.LEVEL_3 else _with_ddp(way, model, ranks)
    return tuple(each for each in found if each.nbytes)


def _of_level_3(model: Model, ranks: int) -> Iterator[Collective]:
    """Yield the collectives of ``ShardedDataParallel``, which has buckets of its own."""
    bucket_bytes = model.bucket_bytes or limits.bucket_bytes(ranks, pairwise=False)
    shared = []
    for bucket in bucket_plans(model.specs, model.order, ranks, model.splittable, bucket_bytes):
        operations = 1 if bucket.equal else sum(start < stop for start, stop in pairwise(bucket.bounds))
        nbytes = bucket.padded_numel * model.specs[bucket.params[0]].dtype.itemsize
        yield Collective(Kind.REDUCE_SCATTER, nbytes, ranks, operations)
        shared.append(Collective(Kind.ALL_GATHER, nbytes, ranks, operations))
    yield Collective(Kind.VOTE, VOTE_BYTES + VOTE_BYTES_PER_PARAM * len(model.specs), ranks)
    yield Collective(Kind.VOTE, VOTE_BYTES, ranks)
    yield from reversed(shared)


def _with_ddp(way: Way, model: Model, ranks: int) -> Iterator[Collective]:
    """Yield the collectives of a way of training in which DDP owns the buckets of gradients."""
    buckets = ddp_buckets(model.specs, model.order)
    owned = owned_bytes(model, buckets, ranks) if way in (Way.OVERLAP, Way.LEVEL_2) else torch.empty(len(buckets), 0)
    for params, parts in zip(buckets, owned, strict=True):
        if way is Way.LEVEL_2:
            yield Collective(Kind.REDUCE_SCATTER, *_packed(parts))
            continue
        yield Collective(Kind.ALL_REDUCE, sum(model.specs[index].nbytes for index in params), ranks)
        if way is Way.OVERLAP:
            yield from _shared(model, parts)
    if way is Way.DDP:
        return
    yield Collective(Kind.VOTE, VOTE_BYTES, ranks)
    if way is not Way.OVERLAP:
        devices: dict[int, list[int]] = {}
        for spec in model.specs:
            devices.setdefault(spec.device_ordinal, []).append(spec.index)
        for parts in owned_bytes(model, list(devices.values()), ranks):
            yield from _shared(model, parts)


def _packed(owned: Tensor) -> tuple[int, int, int]:
    """Return the bytes, the ranks and the operations of one collective for the parts of all ranks."""
    if is_padded(owned):
        return len(owned) * int(owned.max()), len(owned), 1
    return int(owned.sum()), len(owned), int((owned > 0).sum())


def _shared(model: Model, owned: Tensor) -> Iterator[Collective]:
    """Yield the all-gathers that share packed parameters."""
    most_bytes = model.bucket_bytes or limits.bucket_bytes(len(owned), pairwise=False)
    for nbytes, operations in sharing_rounds(owned, most_bytes):
        yield Collective(Kind.ALL_GATHER, nbytes, len(owned), operations)


def ddp_buckets(specs: Sequence[ParamSpec], order: Sequence[int]) -> list[list[int]]:
    """Return the parameters of each of DDP's buckets, after DDP has rebuilt them in the order of the gradients."""
    full: list[list[int]] = []
    open_: dict[tuple[torch.dtype, int], list[int]] = {}
    started: set[tuple[torch.dtype, int]] = set()
    for index in order:
        kind = (specs[index].dtype, specs[index].device_ordinal)
        bucket = open_.setdefault(kind, [])
        bucket.append(index)
        limit = DDP_BUCKET_BYTES if kind in started else DDP_FIRST_BUCKET_BYTES
        if sum(specs[each].nbytes for each in bucket) >= limit:
            full.append(open_.pop(kind))
            started.add(kind)
    return full + list(open_.values())


def sharing_rounds(owned: Tensor, most_bytes: int) -> list[tuple[int, int]]:
    """Return the bytes and the operations of each all-gather that shares packed parts of at most ``most_bytes``.

    Parts of nearly the same length are padded to the longest, and a round takes the same fraction of each. Otherwise
    the parts of all ranks lie one after the other, and a round takes the next ``most_bytes`` of them, so that most
    ranks send in one round only.
    """
    total, padded = int(owned.sum()), len(owned) * int(owned.max())
    if is_padded(owned):
        rounds = -(-padded // most_bytes)
        return [((number + 1) * padded // rounds - number * padded // rounds, 1) for number in range(rounds)]
    ends = owned[owned > 0].cumsum(0)
    starts = torch.arange(0, total, most_bytes)
    stops = (starts + most_bytes).clamp(max=total)
    first = torch.searchsorted(ends, starts, right=True)
    last = torch.searchsorted(ends, stops)
    return list(zip((stops - starts).tolist(), (last - first + 1).tolist(), strict=True))


def is_padded(owned: Tensor) -> bool:
    """Return whether parts of these lengths are padded to the longest and sent by one operation."""
    return limits.allows_padding(int(owned.max()), int(owned.sum()), len(owned))


# The bytes that each rank owns, for thousands of ranks, without a layout that lists every shard


def owned_bytes(model: Model, parts: Sequence[Sequence[int]], ranks: int) -> Tensor:
    """Return the bytes that each rank owns of each part of a model: a row per part, a column per rank."""
    shard_by = default_shard_by(model.splittable) if model.shard_by is None else model.shard_by
    part_of = {index: part for part, params in enumerate(parts) for index in params}
    table = torch.zeros(len(parts), ranks, dtype=torch.int64)
    if shard_by == "element":
        for index, lengths in _element_lengths(model.specs, ranks):
            if index in part_of:
                table[part_of[index]] += lengths * model.specs[index].dtype.itemsize
        return table
    for shard in extend(None, model.specs, ranks, shard_by, model.splittable).shards:
        if shard.param in part_of:
            table[part_of[shard.param], shard.owner] += shard.numel * model.specs[shard.param].dtype.itemsize
    return table


def _element_lengths(specs: Sequence[ParamSpec], ranks: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter with the number of its elements on every rank, as the policy ``element`` deals them."""
    loads = torch.zeros(ranks, dtype=torch.int64)
    for _, group in groupby(specs, key=lambda spec: spec.group):
        members, dealt = list(group), int(loads.sum())
        for spec in members:
            if spec.numel > SLACK:
                units = -(-spec.numel // CUT_MULTIPLE)
                base, extra = divmod(units, ranks)
                by_turn = torch.full((ranks,), base * CUT_MULTIPLE, dtype=torch.int64)
                by_turn[ranks - extra :] += CUT_MULTIPLE
                by_turn[-1] -= units * CUT_MULTIPLE - spec.numel  # the last unit may be short
                lengths = by_turn.roll((dealt // CUT_MULTIPLE + units) % ranks)
                dealt += spec.numel
                loads += lengths
                yield spec.index, lengths
        for shard in by_parameter([spec for spec in members if spec.numel <= SLACK], loads.tolist()):
            lengths = torch.zeros(ranks, dtype=torch.int64)
            lengths[shard.owner] = shard.numel
            loads += lengths
            yield shard.param, lengths
