"""The backward pass of ``ShardedDataParallel``: every bucket of gradients is reduced to its owners when it is full.

1. A hook before autograd's accumulation removes the ``ShardGrad`` of an earlier pass from ``param.grad``, so that
   autograd adds to nothing. A hook after it gives the new gradient to its bucket.
2. All ranks launch the buckets in the same order. A bucket is launched when it is full and all buckets before it are
   launched; buckets that do not fill (unused parameters) are launched when the pass ends. The bytes in flight are
   limited.
3. When the pass ends, all buckets are added up, the ranks exchange which parameters have a gradient on any rank, and
   ``param.grad`` becomes a ``ShardGrad``.

Hooks do not raise, because the other ranks wait for every reduction. The first failure is kept, and the flags at the
end of the pass tell all ranks. On an accelerator the host reads them when they have arrived, at the latest in the
second ``step()`` after the pass. A rank that has no gradient for a parameter which is not frozen reads them at once,
because it cannot know whether the parameter has a gradient on another rank (DDP with ``find_unused_parameters`` waits
there, too).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.agreement import FirstFailure, start_vote
from onecopy.comm.bucket_reduce_scatter import InFlightReduction
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.side_stream import UsedStreams
from onecopy.comm.status_flags import DeferredFlags
from onecopy.common.profiler_ranges import profile_range
from onecopy.common.torch_private import backward_number, when_backward_ends, will_accumulate
from onecopy.data_parallel.gradient_buckets import GradientBucket, GradState, ReductionPolicy
from onecopy.data_parallel.pass_flags import CALL, PassVote
from onecopy.step.sharded_gradient import ShardGrad


@dataclass(frozen=True, slots=True)
class _BucketInFlight:
    """A bucket and its reduction, which reads the bucket's gradients until it has ended."""

    bucket: GradientBucket
    reduction: InFlightReduction

    def end(self, pool: BufferPool) -> None:
        """End the reduction and release the gradients."""
        self.reduction.end()
        self.bucket.release_gradients(pool)


@dataclass(slots=True)
class _BackwardPass:
    """One backward pass.

    Attributes:
        number: autograd's number of the pass.
        failure: the first failure of this rank in the pass.
        next_bucket: the position of the bucket that is launched next.
        in_flight: the buckets that are not added up yet, in the order of their launch.
    """

    number: int
    failure: FirstFailure = field(default_factory=FirstFailure)
    next_bucket: int = 0
    in_flight: deque[_BucketInFlight] = field(default_factory=deque)


class BackwardReducer:
    """Reduces the gradients of all buckets, in order, in every backward pass that synchronises.

    Args:
        buckets: the buckets, in the order of their launch.
        policy: the process groups and the data type of all reductions.
        flags: the queue of status flags that the host reads later.

    Attributes:
        synchronises: whether backward passes reduce gradients; False under ``no_sync()``.
    """

    def __init__(self, buckets: Sequence[GradientBucket], policy: ReductionPolicy, flags: DeferredFlags) -> None:
        self.synchronises = True
        self._buckets = list(buckets)
        self._policy = policy
        self._pool = BufferPool()
        # Two modules in one backward pass may launch their buckets in another order on every rank, so each has tags of
        # its own.
        self._tags = policy.collectives.reserve_tags()
        # Autograd may run hooks on other streams than the one on which backward() was called.
        self._streams = {bucket.device: UsedStreams(bucket.device) for bucket in buckets}
        self._deferred_flags = flags
        self._pass: _BackwardPass | None = None
        self._no_sync_owners: dict[int, Tensor] = {}  # by address of a no_sync() gradient, its parameter
        self._accumulators: dict[int, Any] = {}  # autograd's nodes, which live only as long as a reference to them
        self._lock = threading.RLock()  # a module on several devices has several autograd threads
        self.attach_hooks()

    def attach_hooks(self) -> None:
        """Attach hooks to all parameters that need a gradient and have no hooks yet."""
        for bucket in self._buckets:
            for position, param in enumerate(bucket.params):
                if param.requires_grad and id(param) not in self._accumulators:
                    self._accumulators[id(param)] = torch.autograd.graph.get_gradient_edge(param).node
                    _attach_hooks(weakref.ref(self), weakref.ref(bucket), position, param)

    def reaches_params(self) -> bool:
        """Whether the current backward pass will accumulate a gradient for a parameter of the buckets."""
        return any(will_accumulate(node) for node in self._accumulators.values())

    def begin_pass(self) -> None:
        """Begin a backward pass, unless it has begun already.

        It is also called for a pass that reaches no parameter of the buckets.
        """
        number = backward_number()
        if not self.synchronises or (self._pass is not None and self._pass.number == number):
            return
        if self._pass is not None:
            raise RuntimeError(
                "a backward pass began before another one ended: with activation checkpointing use "
                "use_reentrant=False; after an exception in backward() run a forward pass first"
            )
        self._deferred_flags.check_arrived()
        self._pass = _BackwardPass(number)
        self._no_sync_owners.clear()
        for bucket in self._buckets:
            bucket.begin_pass(self._pool)
        reducer = weakref.ref(self)

        def end() -> None:
            live = reducer()
            if live is not None and live._pass is not None and live._pass.number == number:
                live.end_pass()

        when_backward_ends(end)

    def reset(self) -> None:
        """End a backward pass that an exception has interrupted, so that the ranks can begin another pass together.

        The remaining reductions are made with zeros, and their results are ignored. Ranks whose pass succeeded are told
        of the failure.
        """
        current, self._pass = self._pass, None
        if current is not None:
            current.failure = FirstFailure(RuntimeError("backward() was interrupted by an exception"))
            with contextlib.suppress(RuntimeError):
                self._reduce_remaining(current)

    def clear_accumulated(self, params: Collection[int]) -> None:
        """Note that the gradients of one optimizer's parameters, given by ``id()``, were zeroed."""
        for bucket in self._buckets:
            if id(bucket.params[0]) in params:  # a bucket has parameters of one optimizer
                bucket.clear_accumulated()

    def before_accumulation(self, bucket: GradientBucket, position: int) -> None:
        """Before autograd accumulates: remove the ``ShardGrad`` of an earlier pass from ``param.grad``."""
        param = bucket.params[position]
        if param.grad is None and self._pass is not None and self._pass.number == backward_number():
            bucket.has_reduced_grad[position] = False  # the usual case: nothing to remove
            return
        if not will_accumulate(self._accumulators[id(param)]):  # torch.autograd.grad() runs this hook too
            return
        with self._lock:
            self.begin_pass()
            if isinstance(param.grad, ShardGrad):
                bucket.has_reduced_grad[position] = True
                bucket.states[position] = GradState.SHARD_REMOVED
                param.grad = None
            elif param.grad is None or bucket.was_zeroed(position):
                bucket.has_reduced_grad[position] = False

    def after_accumulation(self, bucket: GradientBucket, position: int) -> None:
        """After autograd has accumulated: give the whole local gradient to its bucket, and launch full buckets."""
        current, param = self._pass, bucket.params[position]
        if param.grad is None:
            return
        if not self.synchronises or current is None:
            self._leave_unreduced(bucket, position)
            return
        with self._lock:
            try:  # not `with current.failure`, which takes longer: this runs for every parameter
                bucket.put(position, param.grad, self._pool)
                param.grad = None
                while (
                    current.next_bucket < len(self._buckets) and self._buckets[current.next_bucket].pending_count == 0
                ):
                    self._launch(current)
            except Exception as error:
                current.failure.error = current.failure.error or error

    def _leave_unreduced(self, bucket: GradientBucket, position: int) -> None:
        """Leave a whole gradient in ``param.grad`` for a later pass, in memory that no other gradient has.

        Autograd gives two parameters the same memory if their gradients are equal, and then adds to both in place.
        """
        param = bucket.params[position]
        with self._lock:
            other = self._no_sync_owners.get(_address(param.grad))
            if other is not None and other is not param and _address(other.grad) == _address(param.grad) != 0:
                assert param.grad is not None
                param.grad = param.grad.clone()
            self._no_sync_owners[_address(param.grad)] = param
        bucket.note_no_sync_grad(position)

    def _launch(self, current: _BackwardPass) -> None:
        """Start the reduction of the next bucket, when few enough bytes are in flight."""
        number = current.next_bucket
        bucket = self._buckets[number]
        current.next_bucket += 1
        while sum(each.bucket.nbytes for each in current.in_flight) >= bucket.transport.gradient_bytes_in_flight:
            self._add_up_oldest(current)
        with current.failure:
            if not current.failure:  # after a failure nothing is reduced, and no_sync() gradients stay in param.grad
                self._put_no_sync_grads(bucket)
        with profile_range("onecopy.reduce"):
            self._streams[bucket.device].note()
            reduction = bucket.launch(self._pool, self._tags + number, is_last=number == len(self._buckets) - 1)
        current.in_flight.append(_BucketInFlight(bucket, reduction))

    def _put_no_sync_grads(self, bucket: GradientBucket) -> None:
        """Put gradients of ``no_sync()`` passes into the bucket, for parameters that this pass does not use."""
        for position, param in enumerate(bucket.params):
            if bucket.states[position] is GradState.ARRIVED or param.grad is None or isinstance(param.grad, ShardGrad):
                continue
            if bucket.was_zeroed(position):
                bucket.has_reduced_grad[position] = False
            bucket.put(position, param.grad, self._pool)
            param.grad = None

    def _add_up_oldest(self, current: _BackwardPass) -> None:
        """Add up the bucket that has been in flight for the longest time."""
        oldest = current.in_flight.popleft()
        self._streams[oldest.bucket.device].note()
        oldest.bucket.add_up(oldest.reduction)
        oldest.end(self._pool)

    def end_pass(self) -> None:
        """End a backward pass: reduce the remaining buckets and set ``param.grad``."""
        current, self._pass = self._pass, None
        assert current is not None
        self._set_shard_grads(self._reduce_remaining(current).present)

    def _reduce_remaining(self, current: _BackwardPass) -> PassVote:
        """Launch the remaining buckets, add all buckets up, and let the ranks vote on the pass."""
        collectives = self._policy.collectives
        with collectives.explained_errors(CALL):
            for streams in self._streams.values():
                streams.join()
            while current.next_bucket < len(self._buckets):
                self._launch(current)
            failure = current.failure.error
            vote = PassVote(self._buckets, failure)
            work = start_vote(collectives, vote.row, CALL, self._policy.replicas)
            while current.in_flight:
                self._add_up_oldest(current)
            if not collectives.defers_host_reads:
                work.wait()
        if not collectives.defers_host_reads:
            vote.check(vote.row)
            return vote
        self._deferred_flags.put(vote.row, work, vote.check)
        if failure is not None:
            self._deferred_flags.clear()
            raise failure
        if not vote.knows_others:
            self._deferred_flags.check_all()
        return vote

    def _set_shard_grads(self, present: Sequence[Sequence[bool]]) -> None:
        """Set ``param.grad`` for every parameter that has a gradient on any rank."""
        for bucket, flags in zip(self._buckets, present, strict=True):
            for param, gradient, has in zip(bucket.params, bucket.shard_grads, flags, strict=True):
                if has:
                    param.grad = gradient


def _address(gradient: Tensor | None) -> int:
    """The address of a whole dense gradient's memory; 0 for None and for other gradients."""
    if gradient is None or isinstance(gradient, ShardGrad) or gradient.layout is not torch.strided:
        return 0
    return gradient.untyped_storage().data_ptr()


def _attach_hooks(
    reducer: Callable[[], BackwardReducer | None],
    bucket: Callable[[], GradientBucket | None],
    position: int,
    param: Tensor,
) -> None:
    """Attach hooks that do not keep the reducer alive, and do nothing when it is gone."""

    def before(gradient: Tensor | None) -> None:
        live_reducer, live_bucket = reducer(), bucket()
        # A function may return no gradient; then autograd accumulates nothing.
        if live_reducer is not None and live_bucket is not None and gradient is not None:
            live_reducer.before_accumulation(live_bucket, position)

    def after(_param: Tensor) -> None:
        live_reducer, live_bucket = reducer(), bucket()
        if live_reducer is not None and live_bucket is not None:
            live_reducer.after_accumulation(live_bucket, position)

    param.register_hook(before)
    param.register_post_accumulate_grad_hook(after)
