"""Gradients to their owners: what the reduce-scatter hook does with each bucket that DDP hands it.

The exchange of a bucket starts when DDP calls, in the same order on all ranks. Its end (adding up, writing the owned
ranges back into the bucket) comes at a later call, for all that are left at the last one, on the thread that runs the
backward pass: no other thread touches anything, few buckets are under way at a time, and everything that a GradScaler
or a clipping function may look at is there when backward returns.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from onecopy.comm import limits
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.pairwise_exchange import PairwiseExchange, message_length, message_lengths, sum_into
from onecopy.comm.side_stream import SideStream
from onecopy.comm.work import Work
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignments, GradBucket, pack
from onecopy.step.engine import Engine


@dataclass(frozen=True, slots=True)
class _PendingBucket:
    """A bucket under way. ``memories`` are what its transfers read and write: kept until they have ended.

    The last of them is what the sum arrives in, if a backend adds up.
    """

    map: DDPBucketAssignment
    buffer: Tensor
    work: PairwiseExchange | Work
    foreign: tuple[Work, Tensor] | None
    memories: tuple[Tensor, ...]


class GradientReducer:
    """Reduces DDP's buckets so that each rank receives what it owns; the rest of ``param.grad`` stays unreduced."""

    def __init__(self, engines: Sequence[Engine], reduce_dtype: torch.dtype | None) -> None:
        self._engines = list(engines)
        self._collectives = engines[0].collectives
        self._reduce_dtype = reduce_dtype
        self._scale = 1.0 / self._collectives.world_size
        self._here = self._collectives.group_rank
        self._pending: deque[_PendingBucket] = deque()
        self._done: list[tuple[DDPBucketAssignment, Tensor, Future[Tensor]]] = []
        self._extremes: list[list[Tensor]] = [[] for _ in engines]
        self._pool = BufferPool()
        self._tags = self._collectives.reserve_tags()
        self._passes = 0
        self._side_streams: dict[torch.device, SideStream] = {}
        self._assignments = self._make_assignments()
        self._guarded: set[int] = set()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start reducing one bucket; the future gives its buffer with the owned ranges reduced."""
        if bucket.index() == 0:
            self._begin()
        buffer = bucket.buffer()
        side_stream = self._side_streams.setdefault(buffer.device, SideStream(buffer.device))
        future = side_stream.future()
        with side_stream.use():
            while len(self._pending) >= limits.DDP_BUCKETS_IN_FLIGHT:
                self._finish(self._pending.popleft())
            assignment = self._assignments.find(bucket.index(), bucket.parameters(), self._direct(buffer))
            tag = (
                self._tags + self._passes * limits.DDP_BUCKETS_WITH_TAGS + bucket.index() % limits.DDP_BUCKETS_WITH_TAGS
            )
            self._pending.append(self._start(assignment, buffer, tag, bucket.is_last()))
            self._done.append((assignment, buffer, future))
            if bucket.is_last():
                self._finish_all()
        return future

    def _make_assignments(self) -> DDPBucketAssignments:
        return DDPBucketAssignments(
            [engine.layout for engine in self._engines],
            [engine.params for engine in self._engines],
            self._collectives.world_size,
            self._here,
        )

    def _direct(self, buffer: Tensor) -> int:
        """From how many elements on a stretch is sent from where it is: never if it is converted or scaled for it."""
        as_it_is = self._reduce_dtype in (None, buffer.dtype) and buffer.dtype is not torch.float16
        return limits.DIRECT_GRADIENT_BYTES // buffer.element_size() if as_it_is else sys.maxsize

    def _begin(self) -> None:
        if any(
            engine.layout is not known for engine, known in zip(self._engines, self._assignments.layouts, strict=True)
        ):
            self._assignments = self._make_assignments()
        for engine in self._engines:
            _guard_accumulation(engine, self._guarded)
        self._passes = (self._passes + 1) % (limits.TAGS // limits.DDP_BUCKETS_WITH_TAGS)
        # What an interrupted backward pass left behind is not waited for, and its memory not used again.
        if self._pending:
            self._pool = BufferPool()
        self._pending.clear()
        self._done.clear()
        self._extremes = [[] for _ in self._engines]
        for engine in self._engines:
            engine.reduced_shards.clear()

    def _start(self, assignment: DDPBucketAssignment, buffer: Tensor, tag: int, is_last: bool) -> _PendingBucket:
        dtype, collectives = self._reduce_dtype or buffer.dtype, self._collectives
        work: PairwiseExchange | Work
        if collectives.uses_pairwise(buffer.device):
            before = self._scale if dtype is torch.float16 else 1.0  # a sum of many could leave its narrow range
            parts, packs = [], []
            for owner in range(collectives.world_size):
                loose = [] if owner == self._here else [buffer[each] for each in assignment.small[owner]]
                packs.append(self._pool.take(sum(view.numel() for view in loose), dtype, buffer.device))
                pack(loose, before, packs[-1])
                parts.append(self._messages([*(buffer[each] for each in assignment.large[owner]), packs[-1]], dtype))
            mine = [each.stop - each.start for each in assignment.large[self._here]]
            mine.append(assignment.sizes_per_owner[self._here] - sum(mine))
            lengths = message_lengths(mine, collectives.world_size, dtype.itemsize)
            # The last one is waited for at once, on all ranks.
            work = PairwiseExchange(
                collectives, parts, lengths, dtype, buffer.device, self._pool, tag, in_turns=is_last
            )
            memories = tuple(packs)
        else:
            packed = self._pool.take(sum(assignment.sizes_per_owner), dtype, buffer.device)
            received = self._pool.take(max(assignment.sizes_per_owner), dtype, buffer.device)
            pack(assignment.in_order_of_owners(buffer), self._scale, packed)
            work = collectives.reduce_scatter(packed, assignment.sizes_per_owner, received)
            memories = (packed, received)
        rest = assignment.foreign(buffer)
        foreign = None
        if rest:
            together = torch.cat(rest).mul_(self._scale)
            foreign = (self._collectives.all_reduce(together), together)
        return _PendingBucket(assignment, buffer, work, foreign, memories)

    def _messages(self, stretches: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The parts in which something travels as ``dtype``."""
        length = message_length(self._collectives.world_size, dtype.itemsize)
        return [part for stretch in stretches if stretch.numel() for part in stretch.split(length)]

    def _finish_all(self) -> None:
        while self._pending:
            self._finish(self._pending.popleft())
        self._spread_non_finite()
        for engine in self._engines:
            engine.note_reduce_scattered()
        for _, buffer, future in self._done:
            future.set_result(buffer)
        self._done.clear()

    def _finish(self, pending: _PendingBucket) -> None:
        mine = pending.map.mine(pending.buffer)
        if isinstance(pending.work, PairwiseExchange):
            self._add_up(pending, pending.work)
        else:
            pending.work.wait()
            _write(pending.memories[-1], [view for _, view in mine])
        for segment, view in mine:
            assert segment.shard is not None
            if segment.numel:
                # Infinities and NaNs survive in the extremes, so one pass that writes nothing tells of them.
                real = torch.view_as_real(view) if view.is_complex() else view
                self._extremes[segment.source] += torch.aminmax(real)
            self._engines[segment.source].reduced_shards[segment.shard.param] = view
        if pending.foreign is not None:
            work, together = pending.foreign
            work.wait()
            rest = pending.map.foreign(pending.buffer)
            torch._foreach_copy_(rest, list(together.split([view.numel() for view in rest])))
        self._pool.give_back(*pending.memories)

    def _add_up(self, pending: _PendingBucket, work: PairwiseExchange) -> None:
        """Make this rank's own values the mean over all ranks: large stretches as they come, then the small ones."""
        assignment, buffer = pending.map, pending.buffer
        large, small = ([buffer[each] for each in kind[self._here]] for kind in (assignment.large, assignment.small))
        dtype, scale = self._reduce_dtype or buffer.dtype, self._scale
        if dtype is torch.float16:  # the others have scaled theirs
            scale = 1.0
            for view in small:
                view.mul_(self._scale)
        together = torch.cat(small) if small else buffer[:0]
        for own, others in zip(self._messages([*large, together], dtype), work.arrivals(), strict=True):
            self._sum(own, others, scale)
        work.end()
        _write(together, small)

    def _sum(self, own: Tensor, others: Sequence[Tensor], scale: float) -> None:
        """In rank order, in place; where others come before this rank's turn, its own values are set aside first."""
        mine = own.clone() if self._here > 1 else own
        sum_into(own, [*others[: self._here], mine, *others[self._here :]], scale)

    def _spread_non_finite(self) -> None:
        """If any rank's reduced range is not finite, show it in what every rank does not own, for each optimizer.

        A GradScaler looks at its own rank's ``param.grad`` only; this way all ranks skip the same steps. Owned ranges
        are left as they are, so that without a scaler training goes on as it would have.
        """
        control = self._collectives.control_device
        flags = torch.zeros(len(self._engines), dtype=torch.int64, device=control)
        for source, values in enumerate(self._extremes):
            if values:
                together = torch.stack([value.to(control, torch.float64) for value in values])
                flags[source] = ~torch.isfinite(together).all()
        self._collectives.all_reduce(flags, largest=True).wait()
        if control.type == "cpu" and not flags.any():
            return
        for assignment, buffer, _ in self._done:
            for source, starts in assignment.starts_of_others.items():
                index = torch.tensor(starts, device=buffer.device)
                shown = torch.where(flags[source].to(buffer.device) > 0, math.inf, buffer[index])
                buffer.index_copy_(0, index, shown.to(buffer.dtype))


def _write(values: Tensor, views: Sequence[Tensor]) -> None:
    """Write values, which may be followed by padding, into ``views``, one after the other."""
    sizes = [view.numel() for view in views]
    if not sizes:
        return
    torch._foreach_copy_(list(views), list(values[: sum(sizes)].split(sizes)))


def _guard_accumulation(engine: Engine, guarded: set[int]) -> None:
    """Make a backward pass that would add to reduced gradients raise.

    Reducing the sum again would count reduced ranges twice. A hook on a leaf runs before its gradient is accumulated,
    so it sees whether what is there was left by an earlier pass; after ``zero_grad()``, anyone's, nothing is left.
    """
    reference = weakref.ref(engine)

    def guard(param: Tensor) -> Callable[[Tensor], None]:
        weak_param = weakref.ref(param)

        def check(_gradient: Tensor) -> None:
            live, leaf = reference(), weak_param()
            if live is None or leaf is None or id(leaf) not in live.params_with_reduced_grad:
                return
            if leaf.grad is None or not torch.count_nonzero(leaf.grad):
                live.params_with_reduced_grad.discard(id(leaf))
                return
            raise RuntimeError(
                "a second backward pass would add to gradients that the reduce-scatter hook has already reduced; "
                "accumulate inside ddp.no_sync(), leave it for the last backward pass before step(), and zero the "
                "gradients after step()"
            )

        return check

    for param in engine.params:
        if param.requires_grad and id(param) not in guarded:
            param.register_hook(guard(param))
            guarded.add(id(param))
