"""The reduce-scatter of DDP's gradient buckets: each rank receives the sum of the gradients that it owns.

1. DDP calls the hook for a bucket, in the same order on all ranks. The reduction of the bucket starts.
2. A later call finishes it: the owned ranges of the bucket are the mean of all ranks then. The call for the last bucket
   does this for all buckets that are still in flight.
3. That call also tells all ranks whether all gradients are finite.

Everything is issued from the thread of the backward pass. So few buckets are in flight at a time, and all gradients are
in place for a GradScaler or a clipping function when ``backward()`` returns. On an accelerator all of this is enqueued
on a side stream: a packed buffer is used again when its reduction has ended, and the backward pass does not wait for
that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

from onecopy.comm import limits
from onecopy.comm.buffers import BufferPool
from onecopy.comm.reduce_scatter import CALL, ReduceScatterPlan, Reduction
from onecopy.comm.status_flags import flags_on
from onecopy.comm.streams import SideStream
from onecopy.comm.work import Work
from onecopy.ddp_hooks.accumulation_guard import AccumulationGuard
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignmentCache, GradBucket
from onecopy.step.engine import Engine


@dataclass(frozen=True, slots=True)
class _BucketPlan:
    """The plan for one DDP bucket, which is used until DDP rebuilds the bucket.

    Attributes:
        assignment: which rank owns which range of the bucket.
        dtype: the type of the bucket.
        reduce_scatter: reduces it.
        starts_not_owned: the start of each segment that another rank owns, on the device of the bucket.
        optimizers: the position of the optimizer of each of these segments.
    """

    assignment: DDPBucketAssignment
    dtype: torch.dtype
    reduce_scatter: ReduceScatterPlan
    starts_not_owned: Tensor
    optimizers: Tensor


@dataclass(frozen=True, slots=True)
class _BucketInFlight:
    """A bucket whose reduction has started.

    Attributes:
        plan: its plan.
        buffer: the bucket's gradients.
        reduction: its reduction.
        all_reduce: the all-reduce of the gradients that belong to no optimizer, and its buffer.
    """

    plan: _BucketPlan
    buffer: Tensor
    reduction: Reduction
    all_reduce: tuple[Work, Tensor] | None


class GradientReducer:
    """Reduce-scatters DDP's buckets to the owners of the gradients.

    After that, ``param.grad`` is reduced in the range that this rank owns, and unreduced elsewhere.
    """

    def __init__(self, engines: Sequence[Engine], reduce_dtype: torch.dtype | None) -> None:
        self._engines = list(engines)
        self._collectives = engines[0].collectives
        self._reduce_dtype = reduce_dtype
        self._in_flight: deque[_BucketInFlight] = deque()
        self._reduced: list[tuple[_BucketPlan, Tensor, Future[Tensor]]] = []  # one for each bucket of the pass
        self._extremes: list[list[Tensor]] = [[] for _ in engines]  # of the reduced gradients, by optimizer
        self._first_tag = self._collectives.reserve_tags()
        self._pass_number = 0
        self._side_streams: dict[torch.device, SideStream] = {}
        self._guards = [AccumulationGuard(engine) for engine in engines]
        self._forget_plans()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the reduction of one bucket, and return the future that DDP waits for.

        DDP calls this for every bucket of a synchronising backward pass, in order.
        """
        if bucket.index() == 0:
            self._begin_pass()
        buffer = bucket.buffer()
        side_stream = self._side_streams.setdefault(buffer.device, SideStream(buffer.device))
        future = side_stream.future()
        with side_stream.use():
            while len(self._in_flight) >= limits.DDP_BUCKETS_IN_FLIGHT:
                self._finish_bucket(self._in_flight.popleft())
            plan = self._plan_of(bucket, buffer)
            self._in_flight.append(self._start_bucket(plan, buffer, self._tag(bucket.index())))
            self._reduced.append((plan, buffer, future))
            if bucket.is_last():
                self._finish_pass()
        return future

    def _forget_plans(self) -> None:
        """Forget the plans of all buckets and their buffers."""
        self._pool = BufferPool()
        self._plans: dict[int, _BucketPlan] = {}
        self._assignments = DDPBucketAssignmentCache(
            [engine.layout for engine in self._engines],
            [engine.params for engine in self._engines],
            self._collectives.group_rank,
        )

    def _plan_of(self, bucket: GradBucket, buffer: Tensor) -> _BucketPlan:
        """Return the plan of a bucket; a bucket that DDP has rebuilt gets a new one."""
        assignment = self._assignments.get(bucket.index(), bucket.parameters())
        plan = self._plans.get(bucket.index())
        if plan is None or plan.assignment is not assignment or plan.dtype is not buffer.dtype:
            reduce_scatter = ReduceScatterPlan(
                self._collectives,
                assignment.pieces,
                buffer.dtype,
                self._reduce_dtype or buffer.dtype,
                buffer.device,
            )
            starts = assignment.starts_not_owned()
            plan = self._plans[bucket.index()] = _BucketPlan(
                assignment,
                buffer.dtype,
                reduce_scatter,
                flags_on(buffer.device, [start for start, _ in starts]),
                flags_on(buffer.device, [optimizer for _, optimizer in starts]),
            )
        return plan

    def _tag(self, bucket_index: int) -> int:
        """Return the message tag of a bucket, which no bucket of this pass or the pass before has."""
        first_tag_of_pass = self._first_tag + self._pass_number * limits.DDP_BUCKETS_WITH_TAGS
        return first_tag_of_pass + bucket_index % limits.DDP_BUCKETS_WITH_TAGS

    def _begin_pass(self) -> None:
        """Prepare for the first bucket of a backward pass."""
        layouts = zip(self._engines, self._assignments.layouts, strict=True)
        # An interrupted pass has left messages in flight. They are not waited for, so their buffers are not reused.
        if self._in_flight or any(engine.layout is not layout for engine, layout in layouts):
            self._forget_plans()
        for guard in self._guards:
            guard.begin_pass()
        self._pass_number = (self._pass_number + 1) % (limits.TAGS // limits.DDP_BUCKETS_WITH_TAGS)
        self._in_flight.clear()
        self._reduced.clear()
        self._extremes = [[] for _ in self._engines]
        for engine in self._engines:
            engine.reduced_shards.clear()

    def _start_bucket(self, plan: _BucketPlan, buffer: Tensor, tag: int) -> _BucketInFlight:
        """Start the reduction of one bucket."""
        reduction = plan.reduce_scatter.start([buffer], self._pool, tag, None)
        views = plan.assignment.views_without_optimizer(buffer)
        all_reduce = None
        if views:
            packed_views = torch.cat(views).mul_(1.0 / self._collectives.world_size)
            all_reduce = (self._collectives.all_reduce(packed_views, CALL), packed_views)
        return _BucketInFlight(plan, buffer, reduction, all_reduce)

    def _finish_pass(self) -> None:
        """Finish all buckets in flight, exchange whether gradients are finite, and complete the futures."""
        while self._in_flight:
            self._finish_bucket(self._in_flight.popleft())
        self._write_inf_on_all_ranks()
        for engine, guard in zip(self._engines, self._guards, strict=True):
            engine.note_reduce_scattered()
            guard.end_pass()
        for _, buffer, future in self._reduced:
            future.set_result(buffer)
        self._reduced.clear()

    def _finish_bucket(self, bucket: _BucketInFlight) -> None:
        """Finish the reduction of a bucket and note its reduced gradients."""
        for optimizer, values in bucket.reduction.wait():
            # A NaN or an infinity shows in the minimum or maximum, which one read of the gradients computes. A value
            # may become an infinity only in the bucket's own type.
            real = torch.view_as_real(values) if values.is_complex() else values
            self._extremes[optimizer].append(torch.stack(torch.aminmax(real)).to(bucket.plan.dtype.to_real()))
        for segment, view in bucket.plan.assignment.owned_views(bucket.buffer):
            assert segment.shard is not None
            self._engines[segment.layout_index].reduced_shards[segment.shard.param] = view
        if bucket.all_reduce is not None:
            work, reduced = bucket.all_reduce
            work.wait()
            views = bucket.plan.assignment.views_without_optimizer(bucket.buffer)
            torch._foreach_copy_(views, list(reduced.split([view.numel() for view in views])))

    def _write_inf_on_all_ranks(self) -> None:
        """If one rank's reduced gradients are not finite, write infinities into ranges that other ranks own.

        A GradScaler reads its own rank's ``param.grad`` only. The infinities make it skip the same steps on all ranks.
        The owned ranges are not changed, so that training without a GradScaler gives the same result as plain DDP.
        """
        device = self._collectives.control_device
        not_finite = torch.stack(
            [
                torch.cat([each.to(device) for each in extremes]).isfinite().logical_not().any()
                if extremes
                else torch.zeros((), dtype=torch.bool, device=device)
                for extremes in self._extremes
            ]
        ).to(torch.int64)
        self._collectives.all_reduce(not_finite, CALL, largest=True).wait()
        if not self._collectives.defers_host_reads and not not_finite.any():
            return
        # Infinity or zero, by optimizer, added without asking on the host which of them it is.
        added = torch.where(not_finite > 0, math.inf, 0.0)
        for plan, buffer, _ in self._reduced:
            if plan.starts_not_owned.numel():
                values = added.to(buffer.device, buffer.dtype).index_select(0, plan.optimizers)
                buffer.index_add_(0, plan.starts_not_owned, values)
