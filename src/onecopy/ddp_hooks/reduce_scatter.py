"""The reduce-scatter of DDP's gradient buckets: each rank receives the mean of the gradients that it owns.

1. DDP calls the hook for a bucket, in the same order on all ranks. The reduction of the bucket starts.
2. A later call finishes it: the owned ranges of the bucket are the mean of all ranks then. The call for the last bucket
   does this for all buckets that are still in flight.
3. DDP copies its buckets into ``param.grad``. After that, at the end of the backward pass, ``param.grad`` becomes the
   sharded gradient, which has the owned range only.

Everything is issued from the thread of the backward pass. So few buckets are in flight at a time, and all gradients are
in place for a GradScaler or a clipping function when ``backward()`` returns. On an accelerator all of this is enqueued
on a side stream: a packed buffer is used again when its reduction has ended, and the backward pass does not wait for
that.
"""

# No `from __future__ import annotations` here: DDP reads a hook's annotations and needs the real types.

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm import limits
from onecopy.comm.agreement import Fact, FailTogether
from onecopy.comm.buffers import BufferPool
from onecopy.comm.reduce_scatter import CALL, ReduceScatterPlan, Reduction
from onecopy.comm.streams import SideStream
from onecopy.comm.work import Work
from onecopy.common.flat_views import flat_like
from onecopy.common.torch_private import after_backward, in_backward, in_join_context
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignmentCache, GradBucket
from onecopy.ddp_hooks.checks import ShardedOptimizer, check_reduce_scatter, optimizer_facts
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.owned_state import engine_of, optimizer_list
from onecopy.step.sharded_gradient import GradientGroup, ShardGrad


class ReduceScatter:
    """The state of :func:`reduce_scatter_hook`: the optimizers that own the gradients, and the type to reduce in.

    All ranks construct it together, with the same arguments. If one rank refuses its arguments, all ranks raise.

    Args:
        optimizers: one optimizer, or several over disjoint parameters of one model.
        reduce_dtype: the data type in which gradients are sent and summed (default: their own).
        ddp: the model. It is required if the optimizers are on a subgroup of the ranks, to check that DDP is on the
            same ranks.
    """

    def __init__(
        self,
        optimizers: ShardedOptimizer | Sequence[ShardedOptimizer],
        reduce_dtype: torch.dtype | None = None,
        *,
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        given = optimizer_list(optimizers)
        with FailTogether(collectives_of(given), "constructing ReduceScatter") as together:
            engines = [engine_of(optimizer) for optimizer in given]
            check_reduce_scatter(given, engines, reduce_dtype, ddp)
            together.facts = [Fact("reduce_dtype", str(reduce_dtype)), *optimizer_facts(engines)]
        # The state of a hook must not keep its optimizers alive.
        references = [weakref.ref(optimizer) for optimizer in given]

        def in_join() -> bool:
            return any(in_join_context(each) for each in (reference() for reference in references) if each is not None)

        self.reducer = GradientReducer(engines, reduce_dtype, in_join)


_states: weakref.WeakKeyDictionary[Any, tuple[list[int], ReduceScatter]] = weakref.WeakKeyDictionary()
"""The hook states for optimizers that were registered without a ReduceScatter, by the first optimizer of the list."""


def reduce_scatter_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Reduce-scatter a DDP bucket, so that each rank receives only the gradients that it owns.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4)
        ddp.register_comm_hook(optimizer, reduce_scatter_hook)

    This sends half as much as an all-reduce. Together with the parameters that ``step()`` sends, the traffic is that of
    plain DDP. After ``backward()`` ``param.grad`` has only this rank's range of the mean gradient. Clipping with
    ``torch.nn.utils.clip_grad_norm_``, a GradScaler and ``step()`` work as usual, on all ranks together.

    All ranks register the hook with the same optimizers. The first ``backward()`` compares them before it sends any
    gradient.

    Args:
        state: an optimizer, a list of optimizers over one model, or a :class:`ReduceScatter`.
        bucket: the bucket of gradients, from DDP.
    """
    scatter = state if isinstance(state, ReduceScatter) else _state_for(optimizer_list(state))
    return scatter.reducer.reduce(bucket)


def _state_for(optimizers: list[Any]) -> ReduceScatter:
    """Return the hook state for a list of optimizers; the first call constructs it, on all ranks together."""
    identities = list(map(id, optimizers))
    cacheable = bool(optimizers) and isinstance(getattr(optimizers[0], "engine", None), Engine)
    cached = _states.get(optimizers[0]) if cacheable else None
    if cached is None or cached[0] != identities:
        cached = (identities, ReduceScatter(optimizers))
        _states[optimizers[0]] = cached
    return cached[1]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket of the current pass, whose reduction has started."""

    assignment: DDPBucketAssignment  # which rank owns which range of the bucket
    buffer: Tensor  # the bucket's gradients
    future: Future[Tensor]  # the future that DDP waits for
    reduction: Reduction
    # The all-reduce of the gradients that belong to no optimizer, and its buffer.
    all_reduce: tuple[Work, Tensor] | None

    def finish(self) -> None:
        """Wait until the reduced gradients are in the buffer."""
        self.reduction.wait()
        if self.all_reduce is not None:
            work, reduced = self.all_reduce
            work.wait()
            views = self.assignment.views_without_optimizer(self.buffer)
            torch._foreach_copy_(views, list(reduced.split([view.numel() for view in views])))


class GradientReducer:
    """Reduce-scatters DDP's buckets to the owners of the gradients, which are sharded then."""

    def __init__(
        self, engines: Sequence[Engine], reduce_dtype: torch.dtype | None, in_join: Callable[[], bool]
    ) -> None:
        self._engines = list(engines)
        self._collectives = engines[0].collectives
        self._reduce_dtype = reduce_dtype
        self._in_join = in_join
        self._buckets: list[_Bucket] = []  # of the current pass
        self._in_flight: deque[_Bucket] = deque()  # those that are not finished
        self._first_tag = self._collectives.reserve_tags()
        self._pass_number = 0
        self._passes_with_plans = 0  # the number of passes that found the plans of the one before
        self._side_streams: dict[torch.device, SideStream] = {}
        self._make_plans()

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
                self._in_flight.popleft().finish()
            started = self._start(bucket, buffer, future)
            self._buckets.append(started)
            self._in_flight.append(started)
            if bucket.is_last():
                self._finish_pass()
        return future

    def _make_plans(self) -> None:
        """Begin new plans for the current layouts, with new buffers."""
        self._pool = BufferPool()
        self._assignments = DDPBucketAssignmentCache(
            [engine.layout for engine in self._engines],
            [engine.params for engine in self._engines],
            self._collectives.group_rank,
        )
        self._gradients = GradientGroup(
            self._collectives, [param for engine in self._engines for param in engine.params], self._in_join
        )
        self._shard_grads: dict[int, ShardGrad] = {}  # by the identity of the parameter

    def _start(self, bucket: GradBucket, buffer: Tensor, future: Future[Tensor]) -> _Bucket:
        """Start the reduction of one bucket. A bucket that DDP has rebuilt is planned again."""
        if buffer.layout is not torch.strided:
            raise ValueError(
                "the reduce-scatter hook cannot divide sparse gradients among the ranks: make the gradients of "
                "embeddings dense (sparse=False), or train without the hook"
            )
        collectives, dtype = self._collectives, buffer.dtype
        assignment = self._assignments.get(bucket.index(), bucket.parameters())
        plan = assignment.plans.get(dtype)
        if plan is None:
            self._passes_with_plans = 0
            plan = assignment.plans[dtype] = ReduceScatterPlan(
                collectives, assignment.pieces, dtype, self._reduce_dtype or dtype, buffer.device
            )
        # No bucket of this pass or the pass before has this tag.
        tag = self._first_tag + self._pass_number * limits.DDP_BUCKETS_WITH_TAGS
        tag += bucket.index() % limits.DDP_BUCKETS_WITH_TAGS
        reduction = plan.start([buffer], self._pool, tag, None)
        views = assignment.views_without_optimizer(buffer)
        all_reduce = None
        if views:
            packed_views = torch.cat(views).mul_(1.0 / collectives.world_size)
            all_reduce = (collectives.all_reduce(packed_views, CALL), packed_views)
        return _Bucket(assignment, buffer, future, reduction, all_reduce)

    def _begin_pass(self) -> None:
        """Prepare for the first bucket of a backward pass."""
        layouts = zip(self._engines, self._assignments.layouts, strict=True)
        # An interrupted pass has left messages in flight. They are not waited for, so their buffers are not reused.
        if self._in_flight or any(engine.layout is not layout for engine, layout in layouts):
            self._make_plans()
        self._passes_with_plans += 1
        self._pass_number = (self._pass_number + 1) % (limits.TAGS // limits.DDP_BUCKETS_WITH_TAGS)
        self._in_flight.clear()
        self._buckets.clear()
        for engine in self._engines:
            engine.gradients.without_inputs.clear()

    def _finish_pass(self) -> None:
        """Finish all buckets in flight, and complete the futures."""
        while self._in_flight:
            self._in_flight.popleft().finish()
        if in_backward():
            after_backward(self._shard_gradients)
        else:  # a rank without inputs, where DDP does not change param.grad
            for bucket in self._buckets:
                for each in bucket.assignment.params:
                    if each.shard is not None:
                        gradients = self._engines[each.layout_index].gradients
                        gradients.without_inputs[each.index] = each.owned_view(bucket.buffer)
        for bucket in self._buckets:
            bucket.future.set_result(bucket.buffer)

    def _shard_gradients(self) -> None:
        """Replace the whole gradients in ``param.grad``, of which the owned range is reduced, by sharded ones."""
        targets, sources = [], []
        for bucket in self._buckets:
            memory = bucket.buffer.untyped_storage().data_ptr()
            for each in bucket.assignment.params:
                param, gradient, shard = each.param, each.param.grad, each.shard
                if gradient is None or isinstance(gradient, ShardGrad):
                    continue  # unused on all ranks, or DDP has copied into the sharded gradient
                start, stop = (0, 0) if shard is None else (shard.start, shard.stop)
                reduced = flat_like(gradient.detach(), param)[start:stop]
                # If DDP's gradients are views of its bucket, the sharded one is, too. Otherwise a copy frees the rest.
                is_view = gradient.untyped_storage().data_ptr() == memory and gradient.stride() == param.stride()
                is_view = is_view and reduced.numel() > 0  # nothing else should keep an old bucket alive
                sharded = self._shard_grad_of(param, reduced, start, is_view)
                if not is_view:
                    targets.append(sharded.local)
                    sources.append(reduced)
                param.grad = sharded
        if targets:
            torch._foreach_copy_(targets, sources)
        self._gradients.forget_norms()
        self._gradients.ddp_may_rebuild = self._passes_with_plans < 2  # a static graph is rebuilt after two passes
        self._buckets.clear()

    def _shard_grad_of(self, param: Tensor, reduced: Tensor, start: int, is_view: bool) -> ShardGrad:
        """The sharded gradient of a parameter, which is made again only if DDP has rebuilt the bucket."""
        sharded = self._shard_grads.get(id(param))
        if sharded is None or (is_view and sharded.local.data_ptr() != reduced.data_ptr()):
            local = reduced if is_view else torch.empty_like(reduced)
            sharded = self._shard_grads[id(param)] = ShardGrad(local, param, self._gradients, start)
        sharded.unreduced = None
        return sharded
