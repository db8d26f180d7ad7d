"""Gradients sharded during the backward pass: every bucket is reduced to its owners as soon as it is full.

1. A hook in front of a parameter's gradient takes away the range that an earlier pass left there, so that autograd
   finds nothing to add to. A hook behind it gives the new gradient to its bucket, which copies it only if it is small
   (and takes an embedding's by rows, if wanted).
2. Buckets are exchanged in the same order on all ranks: each when it is full and all before it are under way, those
   that do not fill (unused parameters) when the pass ends. Few are under way at a time.
3. When the pass ends, all are added up, the ranks agree on which parameters have a gradient anywhere, and
   ``param.grad`` becomes the owned range of it.

Nothing raises before the end, because other ranks count on every exchange: what goes wrong is told to all of them then.
On an accelerator 1 and 2 are enqueued on a stream of their own, and the host reads what the ranks agree on only where
a parameter of its own has no gradient; a failure elsewhere it reads in the next pass.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.agreement import raise_together
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.pairwise_exchange import PairwiseExchange, sum_into
from onecopy.comm.side_stream import SideStream
from onecopy.comm.status_flags import DeferredRead, flags_on
from onecopy.comm.work import Work
from onecopy.common.profiling import profile_range
from onecopy.common.torch_private import backward_number, when_backward_ends, will_accumulate
from onecopy.data_parallel.gradient_buckets import Bucket, Policy
from onecopy.data_parallel.pass_flags import PassFlags, failure_of_last, flags_of, frozen_on_some
from onecopy.data_parallel.sharded_gradients import ShardGrad
from onecopy.data_parallel.sparse_rows import RowBucket, RowExchange
from onecopy.errors import PeerFailedError


@dataclass(frozen=True, slots=True)
class _BucketInFlight:
    """An exchange under way.

    Attributes:
        bucket: whose gradients it reads until it has ended.
        keeps: whether the sum is added to what the shard holds.
        work: the transfers.
        sum: what the sum arrives in if a backend adds up; at least as long as the shard.
    """

    bucket: Bucket
    keeps: bool
    work: PairwiseExchange | RowExchange | Work
    sum: Tensor | None = None


@dataclass(slots=True)
class _Pass:
    """One backward pass."""

    number: int
    next: int = 0  # the bucket that is launched next
    pending: deque[_BucketInFlight] = field(default_factory=deque)
    departing: list[RowExchange] = field(default_factory=list)  # added up, but perhaps not all sent
    failure: Exception | None = None


class BackwardReducer:
    """Reduces the gradients of some buckets, in order, in every backward pass that synchronises."""

    def __init__(self, buckets: Sequence[Bucket], policy: Policy) -> None:
        self.synchronises = True
        self._buckets = list(buckets)
        self._policy = policy
        self._pool = BufferPool()
        # Its own, because two modules in one backward pass may launch their buckets in another order on every rank.
        self._tags = policy.collectives.reserve_tags()
        self._side_streams = {bucket.device: SideStream(bucket.device) for bucket in buckets}
        self._unread: DeferredRead | None = None
        self._pass: _Pass | None = None
        self._left_in: dict[int, Tensor] = {}  # by address, whose gradient a pass without synchronising has left there
        self._nodes: dict[int, Any] = {}  # autograd's accumulators, which live as long as they are held
        self._lock = threading.RLock()  # a module on several devices has several autograd threads
        self.attach()

    def attach(self) -> None:
        """Put hooks on all parameters that need a gradient and have none yet."""
        for bucket in self._buckets:
            for position, param in enumerate(bucket.params):
                if param.requires_grad and id(param) not in self._nodes:
                    self._nodes[id(param)] = torch.autograd.graph.get_gradient_edge(param).node
                    _attach(weakref.ref(self), weakref.ref(bucket), position, param)

    def reached(self) -> bool:
        """Whether the running pass will accumulate a gradient for a parameter of ours."""
        return any(will_accumulate(node) for node in self._nodes.values())

    def begin(self) -> None:
        """Note that a backward pass runs; also where none of its gradients is for a parameter of ours."""
        number = backward_number()
        if not self.synchronises or (self._pass is not None and self._pass.number == number):
            return
        if self._pass is not None:
            raise RuntimeError(
                "a backward pass began before another one ended: with activation checkpointing use "
                "use_reentrant=False; after an exception in backward() run a forward pass first"
            )
        self._pass = _Pass(number)
        unread, self._unread = self._unread, None
        if unread is not None:
            self._pass.failure = failure_of_last(self._buckets, unread.read())
        self._left_in.clear()
        for bucket in self._buckets:
            bucket.begin(self._pool)
        me = weakref.ref(self)

        def end() -> None:
            live = me()
            if live is not None and live._pass is not None and live._pass.number == number:
                live.finish()

        when_backward_ends(end)

    def reset(self) -> None:
        """End a backward pass that an exception has interrupted, so that the next one finds all ranks in step.

        The exchanges that are left are made with zeros and thrown away. Ranks on which the pass went well hear of it.
        """
        current, self._pass = self._pass, None
        if current is not None:
            current.failure = RuntimeError("backward() was interrupted by an exception")
            with contextlib.suppress(RuntimeError):
                self._finish(current, active=True)

    def forget_accumulated(self) -> None:
        """Note that gradients were zeroed, also those that were set aside."""
        for bucket in self._buckets:
            bucket.kept = [False] * len(bucket.params)
            bucket.left.clear()

    def before(self, bucket: Bucket, position: int) -> None:
        """In front of autograd's accumulation: set aside what an earlier pass has reduced."""
        param = bucket.params[position]
        if param.grad is None and self._pass is not None and self._pass.number == backward_number():
            bucket.kept[position] = False  # the usual case, and nothing to set aside
            return
        if not will_accumulate(self._nodes[id(param)]):  # torch.autograd.grad() passes by here too
            return
        with self._lock:
            self.begin()
            if isinstance(param.grad, ShardGrad):
                bucket.kept[position] = True
                bucket.aside.add(position)
                param.grad = None
            elif param.grad is None or not bucket.is_as_left(position):
                bucket.kept[position] = False

    def after(self, bucket: Bucket, position: int) -> None:
        """Behind autograd's accumulation: give the whole local gradient to its bucket."""
        current, param = self._pass, bucket.params[position]
        if param.grad is None:
            return
        if not self.synchronises or current is None:
            self._leave(bucket, position)
            return
        with self._lock:
            try:
                self._put(bucket, position, param.grad)
                while current.next < len(self._buckets) and self._buckets[current.next].missing == 0:
                    self._launch(current)
            except Exception as error:
                current.failure = current.failure or error

    def _leave(self, bucket: Bucket, position: int) -> None:
        """Leave a whole gradient for a later pass, in memory of its own.

        Autograd gives two parameters the same memory if their gradients are equal, and then adds to both of them in
        place.
        """
        param = bucket.params[position]
        with self._lock:
            other = self._left_in.get(_address(param.grad))
            if other is not None and other is not param and _address(other.grad) == _address(param.grad) != 0:
                assert param.grad is not None
                param.grad = param.grad.clone()
            self._left_in[_address(param.grad)] = param
        bucket.leave(position)

    def take_part(self) -> None:
        """Serve one backward pass of other ranks, with nothing to add (uneven inputs)."""
        self._pass = current = _Pass(-1)
        for bucket in self._buckets:
            bucket.begin(self._pool)
            bucket.allocate()
            for param in bucket.params:
                param.grad = None
        before = [bucket.shard.clone() for bucket in self._buckets]
        agreed = self._finish(current, active=False)
        self._pass = None
        # The others know whether gradients were zeroed since the last pass; this rank has seen nothing of that.
        for bucket, old, keeps in zip(self._buckets, before, agreed.kept, strict=True):
            new = bucket.shard.clone()
            bucket.shard.copy_(old)
            bucket.clear(keeps)
            bucket.shard.add_(new)
        self._show(agreed.present)

    def _put(self, bucket: Bucket, position: int, gradient: Tensor) -> None:
        side_stream = self._side_streams[bucket.device]
        if side_stream.is_cpu:
            bucket.put(position, gradient, self._pool)
        else:
            with side_stream.use():
                bucket.put(position, gradient, self._pool)
                side_stream.record(gradient)
        bucket.params[position].grad = None

    def _launch(self, current: _Pass) -> None:
        number = current.next
        bucket = self._buckets[number]
        current.next += 1
        while sum(pending.bucket.nbytes for pending in current.pending) >= limits.GRADIENT_BYTES_IN_FLIGHT:
            self._add_up(current)
        try:
            if current.failure is None:  # else nothing is reduced, and it stays where it is
                self._take_unused(bucket)
        except Exception as error:
            current.failure = error
        with profile_range("onecopy.reduce"), self._side_streams[bucket.device].use():
            current.pending.append(self._exchange(number, bucket))

    def _exchange(self, number: int, bucket: Bucket) -> _BucketInFlight:
        collectives, plan = self._policy.collectives, bucket.plan
        bucket.close(self._pool)
        bucket.allocate()
        keeps = any(bucket.kept)
        if isinstance(bucket, RowBucket):
            return _BucketInFlight(bucket, keeps, RowExchange(bucket, collectives, self._pool, self._tags + number))
        if not collectives.uses_pairwise(bucket.device):
            memory = self._pool.take(plan.longest, bucket.wire_dtype, bucket.device)
            sizes = [stop - start for start, stop in pairwise(plan.bounds)]
            (run,) = bucket.runs
            assert run.memory is not None
            return _BucketInFlight(bucket, keeps, collectives.reduce_scatter(run.memory, sizes, memory), memory)
        # One of the rows can arrive where the sum will be, unless that is added to something.
        fits = bucket.wire_dtype == bucket.kept_dtype and self._policy.replicas is None and not keeps
        mine = bucket.messages[collectives.group_rank]
        lengths = [message.owner_slice.stop - message.owner_slice.start for message in mine]
        homes = [bucket.shard[message.owner_slice] for message in mine] if fits else ()
        work = PairwiseExchange(
            collectives,
            bucket.outgoing(),
            lengths,
            bucket.wire_dtype,
            bucket.device,
            self._pool,
            self._tags + number,
            homes,
            # Between its launch and the end of the pass, which all ranks reach, nothing waits for it.
            in_turns=number == len(self._buckets) - 1,
        )
        return _BucketInFlight(bucket, keeps, work)

    def _add_up(self, current: _Pass) -> None:
        pending = current.pending.popleft()
        with self._side_streams[pending.bucket.device].use():
            self._add_up_here(pending)
        if isinstance(pending.work, RowExchange):
            current.departing.append(pending.work)

    def _add_up_here(self, pending: _BucketInFlight) -> None:
        bucket, replicas, keeps = pending.bucket, self._policy.replicas, pending.keeps
        if keeps:
            bucket.clear(bucket.kept)
        scale = 1.0 if bucket.wire_dtype is torch.float16 else self._policy.scale
        # Zeros, because nothing is written into the gaps between parameters.
        target = bucket.shard if replicas is None else torch.zeros_like(bucket.shard)
        adds = keeps and replicas is None
        if isinstance(pending.work, RowExchange):
            with profile_range("onecopy.add"):
                pending.work.add_up(target, scale, adds)
        elif isinstance(pending.work, PairwiseExchange):
            here = self._policy.collectives.group_rank
            for message, rows in zip(bucket.messages[here], pending.work.arrivals(), strict=True):
                with profile_range("onecopy.add"):
                    rows.insert(here, message.values)
                    sum_into(target[message.owner_slice], rows, scale, adds)
            pending.work.end()
        else:
            assert pending.sum is not None
            pending.work.wait()
            with profile_range("onecopy.add"):
                sum_into(target, [pending.sum[: target.numel()]], scale, adds)
            self._pool.give_back(pending.sum)
        if replicas is not None:
            replicas.all_reduce(target).wait()
            bucket.shard.add_(target) if keeps else bucket.shard.copy_(target)
        if not isinstance(pending.work, RowExchange):  # which ends later
            bucket.give_back(self._pool)

    def finish(self) -> None:
        """The end of a backward pass."""
        current, self._pass = self._pass, None
        assert current is not None
        self._show(self._finish(current, active=True).present)

    def _take_unused(self, bucket: Bucket) -> None:
        """Put in what was accumulated without synchronising for parameters that get nothing in this pass."""
        for position, param in enumerate(bucket.params):
            if bucket.arrived[position] or param.grad is None or isinstance(param.grad, ShardGrad):
                continue
            if not bucket.is_as_left(position):
                bucket.kept[position] = False
            self._put(bucket, position, param.grad)

    def _finish(self, current: _Pass, active: bool) -> PassFlags:
        """Exchange what is left and add up; return the flags that hold on any rank."""
        collectives = self._policy.collectives
        with collectives.naming("backward()"):
            while current.next < len(self._buckets):
                self._launch(current)
            mine = flags_of(self._buckets, current.failure is not None, active)
            word = flags_on(collectives.control_device, mine.word(), torch.uint8)
            work = collectives.all_reduce(word, largest=True)
            while current.pending:
                self._add_up(current)
            for departing in current.departing:
                departing.end()
            work.wait()
            if self._policy.replicas is not None:
                self._policy.replicas.all_reduce(word, largest=True).wait()
        for side_stream in self._side_streams.values():
            side_stream.join()
        agreed = self._read(DeferredRead(word), current.failure, mine)
        if agreed.failed:
            raise_together(collectives, "backward()", current.failure)
        disagreement = frozen_on_some(self._buckets, agreed)
        if disagreement is not None:
            raise disagreement
        return agreed

    def _read(self, word: DeferredRead, failure: Exception | None, mine: PassFlags) -> PassFlags:
        """What the ranks agree on; on an accelerator what must be the same, where this rank can tell by itself."""
        if not self._policy.collectives.defers_host_reads:
            return PassFlags.of_word(word.read(), mine.sizes)
        if failure is not None:
            raise failure
        if all(map(all, mine.present)):
            self._unread = word
            return mine
        agreed = PassFlags.of_word(word.read(), mine.sizes)
        if agreed.failed:
            raise PeerFailedError("backward() failed on another rank; see its own error")
        return agreed

    def _show(self, present: Sequence[Sequence[bool]]) -> None:
        for bucket, flags in zip(self._buckets, present, strict=True):
            for param, gradient, has in zip(bucket.params, bucket.gradients, flags, strict=True):
                if has:
                    param.grad = gradient


def _address(gradient: Tensor | None) -> int:
    """Where a whole dense gradient's memory begins; 0 for everything else."""
    if gradient is None or isinstance(gradient, ShardGrad) or gradient.layout is not torch.strided:
        return 0
    return gradient.untyped_storage().data_ptr()


def _attach(
    reducer: Callable[[], BackwardReducer | None], bucket: Callable[[], Bucket | None], position: int, param: Tensor
) -> None:
    """Hooks that do not keep the reducer alive, and do nothing once it is gone."""

    def before(gradient: Tensor | None) -> None:
        live, home = reducer(), bucket()
        # A function may have no gradient to give; then autograd accumulates nothing.
        if live is not None and home is not None and gradient is not None:
            live.before(home, position)

    def after(_param: Tensor) -> None:
        live, home = reducer(), bucket()
        if live is not None and home is not None:
            live.after(home, position)

    param.register_hook(before)
    param.register_post_accumulate_grad_hook(after)
