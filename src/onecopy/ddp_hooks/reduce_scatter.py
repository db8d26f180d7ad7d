"""The reduce-scatter of DDP's gradient buckets: each rank receives the sum of the gradients that it owns.

1. DDP calls the hook for a bucket, in the same order on all ranks. The exchange of the bucket starts.
2. A later call waits for the exchange, sums the gradients and writes the owned ranges back into the bucket. The call
   for the last bucket does this for all buckets that are still in flight.
3. That call also tells all ranks whether all gradients are finite.

Everything runs on the thread of the backward pass. So few buckets are in flight at a time, and all gradients are in
place for a GradScaler or a clipping function when ``backward()`` returns.
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
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignmentCache, GradBucket, pack
from onecopy.step.engine import Engine


@dataclass(frozen=True, slots=True)
class _DDPBucketInFlight:
    """A bucket whose exchange has started.

    Attributes:
        assignment: which rank owns which range of the bucket.
        buffer: the bucket's gradients.
        work: the exchange: messages between pairs of ranks, or the backend's reduce-scatter.
        all_reduce: the all-reduce of the gradients that belong to no optimizer, and its buffer.
        staging: the buffers that the exchange reads and writes. They must live until the exchange has ended. The
            last one receives the result of the backend's reduce-scatter.
    """

    assignment: DDPBucketAssignment
    buffer: Tensor
    work: PairwiseExchange | Work
    all_reduce: tuple[Work, Tensor] | None
    staging: tuple[Tensor, ...]


class GradientReducer:
    """Reduce-scatters DDP's buckets to the owners of the gradients.

    After that, ``param.grad`` is reduced in the range that this rank owns, and unreduced elsewhere.
    """

    def __init__(self, engines: Sequence[Engine], reduce_dtype: torch.dtype | None) -> None:
        self._engines = list(engines)
        self._collectives = engines[0].collectives
        self._reduce_dtype = reduce_dtype
        self._scale = 1.0 / self._collectives.world_size
        self._group_rank = self._collectives.group_rank
        self._in_flight: deque[_DDPBucketInFlight] = deque()
        self._futures: list[tuple[DDPBucketAssignment, Tensor, Future[Tensor]]] = []  # one for each bucket of the pass
        self._min_max_values: list[list[Tensor]] = [[] for _ in engines]
        self._pool = BufferPool()
        self._first_tag = self._collectives.reserve_tags()
        self._pass_number = 0
        self._side_streams: dict[torch.device, SideStream] = {}
        self._assignments = self._make_assignments()
        self._guarded: set[int] = set()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the reduce-scatter of one bucket; the future gives the buffer with this rank's ranges reduced."""
        if bucket.index() == 0:
            self._begin_pass()
        buffer = bucket.buffer()
        side_stream = self._side_streams.setdefault(buffer.device, SideStream(buffer.device))
        future = side_stream.future()
        with side_stream.use():
            while len(self._in_flight) >= limits.DDP_BUCKETS_IN_FLIGHT:
                self._finish_bucket(self._in_flight.popleft())
            assignment = self._assignments.get(bucket.index(), bucket.parameters(), self._in_place_numel(buffer))
            self._in_flight.append(self._start_bucket(assignment, buffer, self._tag(bucket.index()), bucket.is_last()))
            self._futures.append((assignment, buffer, future))
            if bucket.is_last():
                self._finish_pass()
        return future

    def _make_assignments(self) -> DDPBucketAssignmentCache:
        """Return an empty cache of assignments for the current layouts."""
        return DDPBucketAssignmentCache(
            [engine.layout for engine in self._engines],
            [engine.params for engine in self._engines],
            self._collectives.world_size,
            self._group_rank,
        )

    def _in_place_numel(self, buffer: Tensor) -> int:
        """Return the length from which ranges are sent in place; gradients that are cast or scaled first never are."""
        unchanged = self._reduce_dtype in (None, buffer.dtype) and buffer.dtype is not torch.float16
        return limits.DIRECT_GRADIENT_BYTES // buffer.element_size() if unchanged else sys.maxsize

    def _tag(self, bucket_index: int) -> int:
        """Return the message tag of a bucket, which no bucket of this pass or the pass before has."""
        first_tag_of_pass = self._first_tag + self._pass_number * limits.DDP_BUCKETS_WITH_TAGS
        return first_tag_of_pass + bucket_index % limits.DDP_BUCKETS_WITH_TAGS

    def _begin_pass(self) -> None:
        """Prepare for the first bucket of a backward pass."""
        layouts = zip(self._engines, self._assignments.layouts, strict=True)
        if any(engine.layout is not layout for engine, layout in layouts):
            self._assignments = self._make_assignments()
        for engine in self._engines:
            _guard_accumulation(engine, self._guarded)
        self._pass_number = (self._pass_number + 1) % (limits.TAGS // limits.DDP_BUCKETS_WITH_TAGS)
        if self._in_flight:
            # An interrupted pass has left messages in flight. They are not waited for, so their buffers are not reused.
            self._pool = BufferPool()
        self._in_flight.clear()
        self._futures.clear()
        self._min_max_values = [[] for _ in self._engines]
        for engine in self._engines:
            engine.reduced_shards.clear()

    def _start_bucket(
        self, assignment: DDPBucketAssignment, buffer: Tensor, tag: int, is_last: bool
    ) -> _DDPBucketInFlight:
        """Start the exchange of one bucket."""
        work: PairwiseExchange | Work
        if self._collectives.uses_pairwise(buffer.device):
            work, staging = self._start_pairwise(assignment, buffer, tag, is_last)
        else:
            dtype = self._reduce_dtype or buffer.dtype
            packed = self._pool.take(sum(assignment.sizes_per_owner), dtype, buffer.device)
            received = self._pool.take(max(assignment.sizes_per_owner), dtype, buffer.device)
            pack(assignment.views_by_owner(buffer), self._scale, packed)
            work = self._collectives.reduce_scatter(packed, assignment.sizes_per_owner, received)
            staging = (packed, received)
        views = assignment.views_without_optimizer(buffer)
        all_reduce = None
        if views:
            packed_views = torch.cat(views).mul_(self._scale)
            all_reduce = (self._collectives.all_reduce(packed_views), packed_views)
        return _DDPBucketInFlight(assignment, buffer, work, all_reduce, staging)

    def _start_pairwise(
        self, assignment: DDPBucketAssignment, buffer: Tensor, tag: int, is_last: bool
    ) -> tuple[PairwiseExchange, tuple[Tensor, ...]]:
        """Start the exchange of one bucket by messages between pairs of ranks; return it and its packed buffers."""
        dtype, world_size = self._reduce_dtype or buffer.dtype, self._collectives.world_size
        # A sum of many ranks could overflow fp16, so every rank scales its gradients before it sends them.
        send_scale = self._scale if dtype is torch.float16 else 1.0
        messages, packed_buffers = [], []
        for owner in range(world_size):
            ranges = [] if owner == self._group_rank else assignment.packed_ranges[owner]
            views = [buffer[each] for each in ranges]
            packed = self._pool.take(sum(view.numel() for view in views), dtype, buffer.device)
            pack(views, send_scale, packed)
            packed_buffers.append(packed)
            in_place = [buffer[each] for each in assignment.in_place_ranges[owner]]
            messages.append(self._split_messages([*in_place, packed], dtype))
        own_sizes = [each.stop - each.start for each in assignment.in_place_ranges[self._group_rank]]
        own_sizes.append(assignment.sizes_per_owner[self._group_rank] - sum(own_sizes))
        lengths = message_lengths(own_sizes, world_size, dtype.itemsize)
        # All ranks wait for the last bucket at once, so that it may be received in turns.
        exchange = PairwiseExchange(
            self._collectives, messages, lengths, dtype, buffer.device, self._pool, tag, in_turns=is_last
        )
        return exchange, tuple(packed_buffers)

    def _split_messages(self, ranges: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Split ranges into messages of the length at which ``dtype`` is sent."""
        length = message_length(self._collectives.world_size, dtype.itemsize)
        return [part for each in ranges if each.numel() for part in each.split(length)]

    def _finish_pass(self) -> None:
        """Finish all buckets in flight, exchange whether gradients are finite, and complete the futures."""
        while self._in_flight:
            self._finish_bucket(self._in_flight.popleft())
        self._write_inf_on_all_ranks()
        for engine in self._engines:
            engine.note_reduce_scattered()
        for _, buffer, future in self._futures:
            future.set_result(buffer)
        self._futures.clear()

    def _finish_bucket(self, bucket: _DDPBucketInFlight) -> None:
        """Wait for the exchange of a bucket and write the reduced gradients into its buffer."""
        owned = bucket.assignment.owned_views(bucket.buffer)
        if isinstance(bucket.work, PairwiseExchange):
            self._sum_received(bucket, bucket.work)
        else:
            bucket.work.wait()
            _unpack(bucket.staging[-1], [view for _, view in owned])
        for segment, view in owned:
            assert segment.shard is not None
            if segment.numel:
                # A NaN or an infinity shows in the minimum or maximum, which one read of the gradients computes.
                real = torch.view_as_real(view) if view.is_complex() else view
                self._min_max_values[segment.layout_index] += torch.aminmax(real)
            self._engines[segment.layout_index].reduced_shards[segment.shard.param] = view
        if bucket.all_reduce is not None:
            work, reduced = bucket.all_reduce
            work.wait()
            _unpack(reduced, bucket.assignment.views_without_optimizer(bucket.buffer))
        self._pool.give_back(*bucket.staging)

    def _sum_received(self, bucket: _DDPBucketInFlight, exchange: PairwiseExchange) -> None:
        """Replace the gradients that this rank owns by the mean over all ranks, message by message."""
        assignment, buffer = bucket.assignment, bucket.buffer
        in_place = [buffer[each] for each in assignment.in_place_ranges[self._group_rank]]
        small = [buffer[each] for each in assignment.packed_ranges[self._group_rank]]
        dtype, scale = self._reduce_dtype or buffer.dtype, self._scale
        if dtype is torch.float16:  # the other ranks have scaled their gradients before sending
            scale = 1.0
            for view in small:
                view.mul_(self._scale)
        packed = torch.cat(small) if small else buffer[:0]
        own_messages = self._split_messages([*in_place, packed], dtype)
        for own, received in zip(own_messages, exchange.arrivals(), strict=True):
            # The sum is in rank order and overwrites `own`, which is needed later if two other ranks come before it.
            own_values = own.clone() if self._group_rank > 1 else own
            rows = [*received[: self._group_rank], own_values, *received[self._group_rank :]]
            sum_into(own, rows, scale)
        exchange.end()
        _unpack(packed, small)

    def _write_inf_on_all_ranks(self) -> None:
        """If one rank's reduced gradients are not finite, write infinities into ranges that other ranks own.

        A GradScaler reads its own rank's ``param.grad`` only. The infinities make it skip the same steps on all ranks.
        The owned ranges are not changed, so that training without a GradScaler gives the same result as plain DDP.
        """
        control_device = self._collectives.control_device
        not_finite = torch.zeros(len(self._engines), dtype=torch.int64, device=control_device)
        for layout_index, extremes in enumerate(self._min_max_values):
            if extremes:
                values = torch.stack([value.to(control_device, torch.float64) for value in extremes])
                not_finite[layout_index] = ~torch.isfinite(values).all()
        self._collectives.all_reduce(not_finite, largest=True).wait()
        if control_device.type == "cpu" and not not_finite.any():
            return
        for assignment, buffer, _ in self._futures:
            for layout_index, starts in assignment.starts_not_owned.items():
                index = torch.tensor(starts, device=buffer.device)
                flag = not_finite[layout_index].to(buffer.device)
                values = torch.where(flag > 0, math.inf, buffer[index])
                buffer.index_copy_(0, index, values.to(buffer.dtype))


def _unpack(packed: Tensor, views: Sequence[Tensor]) -> None:
    """Copy a packed buffer, which may end in padding, into ``views``, one after the other."""
    sizes = [view.numel() for view in views]
    if sizes:
        torch._foreach_copy_(list(views), list(packed[: sum(sizes)].split(sizes)))


def _guard_accumulation(engine: Engine, guarded: set[int]) -> None:
    """Register hooks on the parameters that raise if a backward pass would add to reduced gradients.

    A second reduction of the sum would count the reduced ranges twice. A hook on a leaf runs before its gradient is
    accumulated, so that it finds the gradient of an earlier pass in ``param.grad``, unless it was zeroed.

    Args:
        engine: its parameters are guarded.
        guarded: the identities of parameters that have such a hook already; extended here.
    """
    engine_reference = weakref.ref(engine)

    def make_guard(param: Tensor, name: str) -> Callable[[Tensor], None]:
        param_reference = weakref.ref(param)

        def guard(_gradient: Tensor) -> None:
            live_engine, leaf = engine_reference(), param_reference()
            if live_engine is None or leaf is None or id(leaf) not in live_engine.params_with_reduced_grad:
                return
            if leaf.grad is None or not torch.count_nonzero(leaf.grad):
                live_engine.params_with_reduced_grad.discard(id(leaf))
                return
            raise RuntimeError(
                f"a second backward pass would add to the gradient of parameter {name!r} that the reduce-scatter hook "
                "has already reduced; run all backward passes before step() except the last one inside ddp.no_sync(), "
                "and zero the gradients after step()"
            )

        return guard

    for param, spec in zip(engine.params, engine.layout.params, strict=True):
        if param.requires_grad and id(param) not in guarded:
            param.register_hook(make_guard(param, spec.name))
            guarded.add(id(param))
