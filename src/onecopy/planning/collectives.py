"""The collectives of one training step, computed from the plan of each way of training, for any number of ranks.

One call of ``torch.distributed`` with parts of different lengths is several operations, as NCCL runs it: a broadcast or
a reduce for each rank that owns a part, in one group. With messages between pairs of ranks, an operation is a message
that one rank sends.

Not counted: the broadcast of buffers, clipping, and everything that happens outside of a usual step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.agreement import VOTE_BYTES
from onecopy.layout import ParamSpec, bucket_sizes, default_shard_by
from onecopy.planning.model_shapes import Model
from onecopy.planning.ownership import owned_bytes

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 1 << 20, 25 << 20
"""The sizes at which DDP closes its first bucket and the other ones."""

VOTE_BYTES_PER_PARAM = 16
"""The bytes per parameter in the vote at the end of a backward pass of ``ShardedDataParallel``."""


class Way(Enum):
    """A way of training: which wrapper and which optimizer class a script uses."""

    DDP = "DDP"
    TORCH = "torch's class"
    LEVEL_ONE = "onecopy"
    OVERLAP = "onecopy, overlap hooks"
    REDUCE_SCATTER = "onecopy, reduce-scatter hook"
    SHARDED = "onecopy, ShardedDataParallel"
    SHARDED_OVERLAP = "onecopy, ShardedDataParallel, overlap_forward"

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only the gradients that it owns."""
        return self in (Way.SHARDED, Way.SHARDED_OVERLAP)


class Kind(Enum):
    """A kind of collective."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"
    FLAGS = "flags"

    @property
    def reduces_gradients(self) -> bool:
        """Whether gradients are sent."""
        return self in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)

    @property
    def shares_parameters(self) -> bool:
        """Whether updated parameters are sent."""
        return self in (Kind.ALL_GATHER, Kind.BROADCAST)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call.

    Attributes:
        kind: its kind.
        nbytes: the bytes of all parts together, padding included.
        ranks: the number of ranks that take part.
        operations: the number of operations as the backend runs them.
    """

    kind: Kind
    nbytes: int
    ranks: int
    operations: int = 1

    @property
    def sent_bytes(self) -> float:
        """The bytes that a rank sends, on average over the ranks, in an algorithm that sends no more than it must."""
        once = self.nbytes * (self.ranks - 1) / self.ranks
        return 2 * once if self.kind is Kind.ALL_REDUCE else once


def collectives_of(
    way: Way, model: Model, ranks: int, pairwise: bool = False, replicas: int = 1
) -> tuple[Collective, ...]:
    """Return the collectives of one step on one rank.

    Args:
        way: the way of training.
        model: the parameters, and how they may be divided.
        ranks: the number of ranks that divide the state; with a mesh, the ranks of one replica.
        pairwise: whether messages between pairs of ranks are used, instead of the backend's collectives.
        replicas: the number of replicas of a mesh; more than one only with ``ShardedDataParallel``.
    """
    if ranks < 1 or replicas < 1:
        raise ValueError(f"there must be at least one rank and one replica, got {ranks} and {replicas}")
    if replicas > 1 and not way.shards_gradients:
        raise ValueError(f"replicas={replicas}: only ShardedDataParallel takes a mesh, not {way.value!r}")
    plan = _Planner(model, ranks, pairwise, replicas)
    found = plan.sharded() if way.shards_gradients else plan.with_ddp(way)
    return tuple(each for each in found if each.nbytes)


def summary(collectives: Sequence[Collective]) -> dict[Kind, tuple[int, int, float]]:
    """Return the calls, the operations and the bytes that a rank sends, by kind."""
    found: dict[Kind, tuple[int, int, float]] = {}
    for each in collectives:
        calls, operations, sent = found.get(each.kind, (0, 0, 0.0))
        found[each.kind] = (calls + 1, operations + each.operations, sent + each.sent_bytes)
    return found


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

    Args:
        owned: the bytes that each rank owns.
        most_bytes: the most bytes of all ranks together in one round.
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


@dataclass(frozen=True, slots=True)
class _Planner:
    """Computes the collectives of one model on one number of ranks."""

    model: Model
    ranks: int
    pairwise: bool
    replicas: int

    @property
    def bucket_bytes(self) -> int:
        return self.model.bucket_bytes or limits.bucket_bytes(self.ranks, self.pairwise)

    def sharded(self) -> Iterator[Collective]:
        """Yield the collectives of ``ShardedDataParallel``."""
        model, ranks = self.model, self.ranks
        sizes = bucket_sizes(model.specs, model.order, ranks, model.splittable, self.bucket_bytes)
        shared = []
        for bucket in sizes:
            itemsize = model.specs[bucket.params[0]].dtype.itemsize
            nbytes = bucket.numel * itemsize
            reduced_by = shared_by = bucket.owners
            if self.pairwise:
                length = -(-bucket.numel // max(1, bucket.owners))
                reduced_by = self._messages(length * itemsize, self._reduce_message_bytes(), bucket.owners)
                shared_by = self._messages(length * itemsize, self._broadcast_chunk_bytes(), bucket.owners)
            elif model.splittable:
                nbytes = ranks * bucket.longest * itemsize
                reduced_by = shared_by = 1
            yield Collective(Kind.REDUCE_SCATTER, nbytes, ranks, reduced_by)
            if self.replicas > 1:
                yield Collective(Kind.ALL_REDUCE, -(-nbytes // ranks), self.replicas)
            shared.append(Collective(Kind.ALL_GATHER, nbytes, ranks, shared_by))
        yield from self._flags(VOTE_BYTES + VOTE_BYTES_PER_PARAM * len(model.specs))
        yield from self._flags(VOTE_BYTES)
        yield from reversed(shared)

    def with_ddp(self, way: Way) -> Iterator[Collective]:
        """Yield the collectives of a way of training in which DDP owns the buckets of gradients."""
        model, ranks = self.model, self.ranks
        buckets = ddp_buckets(model.specs, model.order)
        owned = self._owned(buckets) if way in (Way.OVERLAP, Way.REDUCE_SCATTER) else None
        for position, params in enumerate(buckets):
            nbytes = sum(model.specs[index].nbytes for index in params)
            if way is Way.REDUCE_SCATTER:
                assert owned is not None
                yield self._reduce_scatter(owned[position])
                continue
            # gloo's all-reduce is a ring: every rank sends each part twice.
            operations = 2 * (ranks - 1) if self.pairwise else 1
            yield Collective(Kind.ALL_REDUCE, nbytes, ranks, max(1, operations))
            if way is Way.OVERLAP:
                assert owned is not None
                yield from self._share(owned[position])
        if way is Way.DDP:
            return
        if way is Way.TORCH:
            messages = max(1, ranks - 1) if self.pairwise else 1
            yield from (Collective(Kind.BROADCAST, spec.nbytes, ranks, messages) for spec in model.specs)
            return
        yield from self._flags(VOTE_BYTES)
        if way is not Way.OVERLAP:
            yield from self._share_all()

    def _owned(self, parts: Sequence[Sequence[int]]) -> Tensor:
        model = self.model
        shard_by = default_shard_by(model.splittable) if model.shard_by is None else model.shard_by
        return owned_bytes(model.specs, parts, self.ranks, shard_by, model.splittable)

    def _flags(self, nbytes: int) -> Iterator[Collective]:
        """Yield one exchange of flags; with a mesh the replicas exchange them, too."""
        yield Collective(Kind.FLAGS, nbytes, self.ranks, max(1, self.ranks - 1) if self.pairwise else 1)
        if self.replicas > 1:
            yield Collective(Kind.FLAGS, nbytes, self.replicas)

    def _reduce_scatter(self, owned: Tensor) -> Collective:
        """Return the reduce-scatter of one of DDP's buckets."""
        if self.pairwise:
            operations = self._messages_of(owned, self._reduce_message_bytes())
            return Collective(Kind.REDUCE_SCATTER, int(owned.sum()), self.ranks, operations)
        if is_padded(owned):
            return Collective(Kind.REDUCE_SCATTER, self.ranks * int(owned.max()), self.ranks)
        return Collective(Kind.REDUCE_SCATTER, int(owned.sum()), self.ranks, int((owned > 0).sum()))

    def _share_all(self) -> Iterator[Collective]:
        """Yield the collectives that share all parameters after an update, device by device."""
        devices: dict[int, list[int]] = {}
        for spec in self.model.specs:
            devices.setdefault(spec.device_ordinal, []).append(spec.index)
        for owned in self._owned(list(devices.values())):
            yield from self._share(owned)

    def _share(self, owned: Tensor) -> Iterator[Collective]:
        """Yield the collectives that share packed memory ranges."""
        if not self.pairwise:
            for nbytes, operations in sharing_rounds(owned, self.bucket_bytes):
                yield Collective(Kind.ALL_GATHER, nbytes, self.ranks, operations)
            return
        operations = self._messages_of(owned, min(limits.PACK_BYTES, self._broadcast_chunk_bytes()))
        yield Collective(Kind.BROADCAST, int(owned.sum()), self.ranks, operations)

    # Messages between pairs of ranks: how many of them a rank sends on average, at least.

    def _reduce_message_bytes(self) -> int:
        return limits.REDUCE_MESSAGE_BYTES

    def _broadcast_chunk_bytes(self) -> int:
        return limits.CHUNK_BYTES * max(1, self.ranks - 1)

    def _messages(self, part_bytes: int, message_bytes: int, parts: int) -> int:
        return max(1, ceil(parts * -(-part_bytes // message_bytes) * (self.ranks - 1) / self.ranks))

    def _messages_of(self, owned: Tensor, message_bytes: int) -> int:
        messages = int((-(-owned // message_bytes)).sum())
        return max(1, ceil(messages * (self.ranks - 1) / self.ranks))
