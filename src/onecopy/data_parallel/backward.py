"""The backward pass of ``ShardedDataParallel``: every bucket of gradients is reduced to its owners when it is full."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.agreement import FailTogether, FirstFailure, Vote, check_vote, start_vote, vote_row
from onecopy.comm.buffers import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.reduce_scatter import Reduction
from onecopy.comm.status_flags import DeferredFlags
from onecopy.comm.streams import UsedStreams
from onecopy.common.torch_private import backward_number, profile_range, when_backward_ends, will_accumulate
from onecopy.data_parallel.bucket import GradientBucket, GradState, ReductionPolicy
from onecopy.data_parallel.construction import AttachedOptimizer
from onecopy.errors import RanksDisagreeError
from onecopy.step.engine import restored_on_failure
from onecopy.step.sharded_gradient import ShardGrad

CALL = "backward()"

_FROZEN = 2


@dataclass(slots=True)
class _BackwardPass:
    """One backward pass."""

    number: int  # autograd's number of the pass
    buckets: Sequence[GradientBucket]  # in the order of their launch
    failure: FirstFailure = field(default_factory=FirstFailure)  # of this rank
    next_bucket: int = 0  # the position of the bucket that is launched next
    in_flight: deque[tuple[GradientBucket, Reduction]] = field(default_factory=deque)  # launched, and not added up yet


_interrupted: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Reduction]] = weakref.WeakKeyDictionary()
"""Reductions of deleted reducers that other ranks may never end: their memory may be used until the group ends."""


class _PassVote:
    """The vote at the end of a pass: whether it has failed, and which parameters have a gradient, or are frozen.

    The row of the vote is followed by two integers for each parameter: ``2`` if it is frozen, ``+ 1`` if it has a
    gradient, and the negative of this. Their maxima tell what holds on any rank, and what on all. After the vote
    ``present`` tells for each parameter whether it has a gradient on any rank.
    """

    def __init__(
        self,
        collectives: Collectives,
        names: Sequence[str],
        present: Sequence[bool],
        trainable: Sequence[bool],
        failure: Exception | None,
    ) -> None:
        self._collectives, self._names, self._failure = collectives, names, failure
        self.present, self.trainable = present, trainable
        codes = [_FROZEN * (not is_trainable) + has for has, is_trainable in zip(present, trainable, strict=True)]
        self.row = vote_row(
            collectives,
            CALL,
            failure is not None,
            at_once=not collectives.defers_host_reads,
            rest=[*codes, *(-code for code in codes)],
        )

    def check(self, row: Tensor) -> None:
        """Raise if the row of all ranks tells of a failure; else note which parameters have a gradient on any rank."""
        vote = Vote(row.tolist())
        check_vote(vote, self._collectives, CALL, self._failure)
        count = len(self._names)
        codes = vote.rest[:count]
        for place, (code, negated) in enumerate(zip(codes, vote.rest[count:], strict=True)):
            if code >= _FROZEN > -negated:
                # Without the error, the gradients of the other ranks alone would train it.
                raise RanksDisagreeError(
                    f"rank {self._collectives.group_rank}: parameter {self._names[place]!r} is frozen on some ranks "
                    f"and not on others (on this rank requires_grad={self.trainable[place]}). Call requires_grad_() "
                    "for it on all ranks or on none, and zero the gradients."
                )
        self.present = [bool(code & 1) for code in codes]


class BackwardReducer:
    """Reduces gradients to their owners in every backward pass that synchronises.

    The phases of a pass:

    1. **Begin.** At the first gradient of a pass, or when the pass reaches the model's output, buckets are reset.
    2. **Collect.** A hook before autograd's accumulation removes the ``ShardGrad`` of an earlier pass from
       ``param.grad``, so that autograd adds to nothing. A hook after it gives the new gradient to its bucket.
    3. **Launch.** A bucket's reduction starts when the bucket is full and all buckets before it are launched, so that
       all ranks launch in the same order. Buckets that do not fill (unused parameters) are launched when the pass ends.
       The bytes in flight are limited.
    4. **Add up.** The mean of all ranks is written into this rank's shard, or added to it.
    5. **Vote.** When the pass ends, the ranks vote whether it has failed, which parameters have a gradient, and which
       are frozen.
    6. **Unfreeze.** Parameters that are trainable now and have no bucket yet get one, and are reduced, too.
    7. **Show.** ``param.grad`` of every parameter with a gradient on any rank becomes a ``ShardGrad``.

    Hooks do not raise, because the other ranks wait for every reduction. The first failure is kept, and phase 5 tells
    all ranks. On an accelerator the host reads the vote when it has arrived, at the latest in the second ``step()``
    after the pass. A rank reads it at once if it may change what the rank does: if a parameter is trainable and has no
    gradient here (DDP with ``find_unused_parameters`` waits there, too), or has no bucket.

    Attributes:
        synchronises: whether backward passes reduce gradients; False under ``no_sync()``.
    """

    def __init__(
        self,
        optimizers: Sequence[AttachedOptimizer],  # the attached optimizers
        # The name of each of their parameters, by ``id()``, in the order in which a forward pass uses them.
        names: Mapping[int, str],
        policy: ReductionPolicy,  # the process groups and the data type of all reductions
        flags: DeferredFlags,  # the queue of votes that the host reads later
    ) -> None:
        self.synchronises = True
        self._unfollowed: str | None = None
        self._optimizers = list(optimizers)
        self._policy = policy
        # Autograd reaches the last parameter first.
        self._order = {param: place for place, param in enumerate(reversed(list(names)))}
        self._params = [param for each in optimizers for param in each.engine.params]
        self._names = [names[id(param)] for param in self._params]
        self._buckets: list[GradientBucket] = []
        self._places: dict[int, tuple[GradientBucket, int]] = {}  # by parameter, its bucket and its position there
        # Autograd may run hooks on other streams than the one on which backward() was called.
        self._streams: dict[torch.device, UsedStreams] = {}
        self._add_buckets([bucket for each in optimizers for bucket in each.buckets])
        self._pool = BufferPool()
        # Two modules in one backward pass may launch their buckets in another order on every rank, so each has tags of
        # its own.
        self._tags = policy.collectives.reserve_tags()
        self._deferred_flags = flags
        self._pass: _BackwardPass | None = None
        self._no_sync_owners: dict[int, Tensor] = {}  # by address of a no_sync() gradient, its parameter
        # Autograd's nodes, with the hooks: they live only as long as a reference to them.
        self._accumulators: dict[int, Any] = {}
        self._lock = threading.RLock()  # a module on several devices has several autograd threads
        self.attach_hooks()

    def __del__(self) -> None:
        current = getattr(self, "_pass", None)
        if current is not None and current.in_flight:
            group = self._policy.collectives.process_group
            _interrupted.setdefault(group, []).extend(reduction for _, reduction in current.in_flight)

    def _add_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        self._buckets += buckets
        self._buckets.sort(key=lambda bucket: max(self._order[id(param)] for param in bucket.params))
        for bucket in buckets:
            self._streams.setdefault(bucket.device, UsedStreams(bucket.device))
            for position, param in enumerate(bucket.params):
                self._places[id(param)] = bucket, position

    def attach_hooks(self) -> None:
        """Attach hooks to all parameters that need a gradient and have no hooks yet."""
        for param in self._params:
            if param.requires_grad and id(param) not in self._accumulators:
                # A node's hooks run after all hooks of the tensor, as DDP's do: hooks of the user's see the gradient
                # that this rank has accumulated, whenever they were registered.
                node = torch.autograd.graph.get_gradient_edge(param).node
                node.register_prehook(partial(_before_accumulation, weakref.ref(self), weakref.ref(param)))
                node.register_hook(partial(_after_accumulation, weakref.ref(self), weakref.ref(param)))
                self._accumulators[id(param)] = node

    def reaches_params(self) -> bool:
        """Whether the current backward pass will accumulate a gradient for a parameter of the buckets."""
        return any(will_accumulate(node) for node in self._accumulators.values())

    def note_unfollowed(self, output: object) -> None:
        """Note that a forward pass returned something in which no tensor can be found."""
        if self.synchronises:
            self._unfollowed = torch.typename(output)

    def check_followed(self) -> None:
        """In a step without gradients: raise if a backward pass may have gone unnoticed here."""
        if self._unfollowed is not None:
            kind, self._unfollowed = self._unfollowed, None
            raise RuntimeError(
                f"rank {self._policy.collectives.group_rank}: step() finds no gradient, and forward() returned a "
                f"{kind}, in which ShardedDataParallel finds no tensor. If backward() was called and reached no "
                "parameter on this rank, the other ranks wait for this one in backward(). Return tensors, or tuples, "
                "lists, dicts or dataclasses of tensors"
            )

    # 1. Begin

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
        self._unfollowed = None
        self._pass = _BackwardPass(number, self._buckets)
        self._no_sync_owners.clear()
        for bucket in self._buckets:
            bucket.begin_pass()
        when_backward_ends(partial(_end_pass, weakref.ref(self), number))

    def reset(self) -> None:
        """End a backward pass that an exception has interrupted, so that the ranks can begin another pass together.

        The remaining reductions are made with zeros, and their results are ignored. Ranks whose pass succeeded are told
        of the failure.
        """
        current, self._pass = self._pass, None
        if current is not None:
            current.failure = FirstFailure(RuntimeError("backward() was interrupted by an exception"))
            with contextlib.suppress(RuntimeError):
                self._vote(current)

    # 2. Collect

    def before_accumulation(self, param: Tensor) -> None:
        """Before autograd accumulates: remove the ``ShardGrad`` of an earlier pass from ``param.grad``."""
        with self._lock:
            self.begin_pass()
            bucket, position = self._places.get(id(param), (None, 0))
            if bucket is None:
                return
            if isinstance(param.grad, ShardGrad):
                bucket.has_reduced_grad[position] = True
                bucket.states[position] = GradState.SHARD_REMOVED
                param.grad = None
            elif param.grad is None or bucket.was_zeroed(position):
                bucket.has_reduced_grad[position] = False

    def after_accumulation(self, param: Tensor) -> None:
        """After autograd has accumulated: give the whole local gradient to its bucket, and launch full buckets."""
        current = self._pass
        bucket, position = self._places.get(id(param), (None, 0))
        if param.grad is None:
            return
        if not self.synchronises or current is None or bucket is None:
            self._leave_unreduced(param)
            return
        with self._lock:
            try:  # not `with current.failure`, which takes longer: this runs for every parameter
                bucket.put(position, param.grad)
                param.grad = None
                while (
                    current.next_bucket < len(current.buckets)
                    and not current.buckets[current.next_bucket].pending_count
                ):
                    self._launch(current)
            except Exception as error:
                current.failure.error = current.failure.error or error

    def _leave_unreduced(self, param: Tensor) -> None:
        """Leave a whole gradient in ``param.grad`` for a later pass, in memory that no other gradient has.

        Autograd gives two parameters the same memory if their gradients are equal, and then adds to both in place.
        """
        with self._lock:
            other = self._no_sync_owners.get(_address(param.grad))
            if other is not None and other is not param and _address(other.grad) == _address(param.grad) != 0:
                assert param.grad is not None
                param.grad = param.grad.clone()
            self._no_sync_owners[_address(param.grad)] = param
        bucket, position = self._places.get(id(param), (None, 0))
        if bucket is not None:
            bucket.note_no_sync_grad(position)
        else:
            self._streams.setdefault(param.device, UsedStreams(param.device)).note()

    # 3. Launch

    def _launch(self, current: _BackwardPass) -> None:
        """Start the reduction of the next bucket, when few enough bytes are in flight."""
        number = current.next_bucket
        bucket = current.buckets[number]
        current.next_bucket += 1
        most = 2 * self._policy.collectives.bucket_bytes(bucket.device)
        while sum(each.nbytes for each, _ in current.in_flight) >= most:
            self._add_up_oldest(current)
        with current.failure:
            if not current.failure:  # after a failure nothing is reduced, and no_sync() gradients stay in param.grad
                bucket.put_no_sync_grads()
        with profile_range("onecopy.reduce"):
            self._streams[bucket.device].note()
            current.in_flight.append((bucket, bucket.launch(self._pool, self._tags + number)))

    # 4. Add up

    def _add_up_oldest(self, current: _BackwardPass) -> None:
        """Add up the bucket that has been in flight for the longest time."""
        bucket, reduction = current.in_flight.popleft()
        self._streams[bucket.device].note()
        bucket.add_up(reduction, self._pool)

    def end_pass(self, number: int) -> None:
        """End the backward pass with this number, if it is still running: phases 3 to 7."""
        current = self._pass
        if current is None or current.number != number:
            return
        self._pass = None
        vote = self._vote(current)
        trainable = [param for param, is_trainable in zip(self._params, vote.trainable, strict=True) if is_trainable]
        new = [param for param in trainable if id(param) not in self._places]
        if new:
            self._unfreeze(new)
        for param, has in zip(self._params, vote.present, strict=True):
            place = self._places.get(id(param))
            if has and place is not None:
                param.grad = place[0].shard_grads[place[1]]

    # 5. Vote

    def _vote(self, current: _BackwardPass) -> _PassVote:
        """Launch the remaining buckets, add all buckets up, and let the ranks vote on the pass."""
        collectives, failure = self._policy.collectives, current.failure
        for streams in self._streams.values():
            streams.join()
        while current.next_bucket < len(current.buckets):
            self._launch(current)
        present = {
            id(param): has for bucket in self._buckets for param, has in zip(bucket.params, bucket.present, strict=True)
        }
        has_gradient = [present.get(id(param), param.grad is not None) for param in self._params]
        # A frozen parameter may have a gradient of a no_sync() pass in which it was trainable: it needs a bucket.
        trainable = [
            param.requires_grad or (has and id(param) not in present)
            for param, has in zip(self._params, has_gradient, strict=True)
        ]
        vote = _PassVote(collectives, self._names, has_gradient, trainable, failure.error)
        work = start_vote(collectives, vote.row, CALL, self._policy.replicas)
        while current.in_flight:
            self._add_up_oldest(current)
        if not collectives.defers_host_reads:
            work.wait()
            vote.check(vote.row)
            return vote
        self._deferred_flags.put(vote.row, work, vote.check)
        if failure.error is not None:
            self._deferred_flags.clear()
            raise failure.error
        # Ranks freeze alike: if each trainable parameter has a gradient and a bucket here, it has both on all ranks.
        if any(
            is_trainable and not (has and id(param) in present)
            for param, has, is_trainable in zip(self._params, has_gradient, trainable, strict=True)
        ):
            self._deferred_flags.check_all()
        return vote

    # 6. Unfreeze

    def _unfreeze(self, params: Sequence[Tensor]) -> None:
        """Give parameters that all ranks have unfrozen their buckets, and reduce their gradients."""
        collectives, replicas = self._policy.collectives, self._policy.replicas
        identities = set(map(id, params))
        restored = restored_on_failure([each.engine for each in self._optimizers], params, self._optimizers)
        with restored, FailTogether(replicas, CALL), FailTogether(collectives, CALL):
            buckets = [bucket for each in self._optimizers for bucket in each.unfreeze(identities)]
            for bucket in buckets:
                bucket.begin_pass()
                bucket.put_no_sync_grads()
        self._add_buckets(buckets)
        late = _BackwardPass(-1, [bucket for bucket in self._buckets if bucket in buckets])
        while late.next_bucket < len(late.buckets):
            self._launch(late)
        while late.in_flight:
            self._add_up_oldest(late)
        for streams in self._streams.values():
            streams.release()


def _address(gradient: Tensor | None) -> int:
    """The address of a whole dense gradient's memory; 0 for None and for other gradients."""
    if gradient is None or isinstance(gradient, ShardGrad) or gradient.layout is not torch.strided:
        return 0
    return gradient.untyped_storage().data_ptr()


# Hooks and callbacks keep neither the reducer nor its parameters alive, and do nothing when they are gone.

_Reducer = Callable[[], BackwardReducer | None]


def _before_accumulation(reducer: _Reducer, param: Callable[[], Tensor | None], gradients: Sequence[Any]) -> None:
    live, tensor = reducer(), param()
    # A function may return no gradient; then autograd accumulates nothing.
    if live is not None and tensor is not None and gradients[0] is not None:
        live.before_accumulation(tensor)


def _after_accumulation(reducer: _Reducer, param: Callable[[], Tensor | None], *_gradients: Any) -> None:
    live, tensor = reducer(), param()
    if live is not None and tensor is not None:
        live.after_accumulation(tensor)


def _end_pass(reducer: _Reducer, number: int) -> None:
    live = reducer()
    if live is not None:
        live.end_pass(number)
