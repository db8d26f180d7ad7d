"""The overlap hooks: a step inside the backward pass, which updates bucket by bucket.

One iteration, after DDP has rebuilt its buckets:

1. Reduce: DDP calls the hook for a bucket, in the same order on all ranks. The user's own hook starts to reduce it.
2. Update: the next call, or with ``hook_with_zero_step`` the last one, waits for the reduced gradients, steps the inner
   optimizer over this rank's shards in the bucket, and starts to share the updated parameters. If some parameters may
   have no gradient, the ranks exchange which of them have one.
3. Finish: the call for the last bucket updates it, too, waits for all parameters and exchanges status flags. So
   ``backward()`` ends after the update.

On an accelerator all of this is enqueued on a side stream, which reads DDP's buckets and writes the parameters. Its
last work completes the future of the last bucket, for which the stream of the backward pass waits: so neither the next
forward pass nor DDP's next use of a bucket comes before it. The host reads the status flags in the next iteration.

``step()`` updates as usual before DDP has rebuilt its buckets, and later updates parameters that are in no bucket.
"""

# No `from __future__ import annotations` here: DDP reads a hook's annotations and needs the real types.

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import Fact, FailTogether, FirstFailure
from onecopy.comm.buffers import BufferPool
from onecopy.comm.sharing import Sharing
from onecopy.comm.status_flags import flags_on
from onecopy.comm.streams import SideStream
from onecopy.comm.work import InFlight, is_backend_error
from onecopy.common.torch_private import after_backward, in_join_context, profiled, version_of
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignmentCache, GradBucket
from onecopy.ddp_hooks.checks import ShardedOptimizer, check_overlap, optimizer_facts
from onecopy.step.consistency import options_text
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.join import JOIN_REFUSAL
from onecopy.step.owned_state import engine_of
from onecopy.step.parameter_groups import Group, OptionsSnapshot

Hook = Callable[[Any, Any], "Future[Any]"]

CALL = "the update inside backward()"
"""The name of the exchange between the ranks, for error messages."""


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, shard_buckets: bool = False
) -> Callable[[Any, Any], Future[Any]]:
    """Return a DDP communication hook that updates bucket by bucket after the backward pass has computed all gradients.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))

    Updates happen inside ``backward()`` from the third pass on (the fourth with ``static_graph``). Before that
    ``optimizer.step()`` updates. Call ``step()`` in every iteration, so that no update is lost or applied twice.

    Args:
        hook: the DDP communication hook that reduces a bucket, such as ``allreduce_hook``. Its state is the first
            argument of ``register_comm_hook``.
        ddp: the model on which the hook will be registered.
        zero: an optimizer over the model's parameters, constructed with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility and ignored. Ownership always comes from the optimizer's layout.
    """
    del shard_buckets
    return _overlap_hook(hook, ddp, zero, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, shard_buckets: bool = False
) -> Callable[[Any, Any], Future[Any]]:
    """Return a DDP communication hook that updates each bucket while the backward pass goes on.

    Everything else, with the arguments, is as in :func:`hook_with_zero_step`.
    """
    del shard_buckets
    return _overlap_hook(hook, ddp, zero, interleaved=True)


def _overlap_hook(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, interleaved: bool
) -> Callable[[Any, Any], Future[Any]]:
    """Return a hook that reduces and updates each bucket; all ranks make this call together."""
    with FailTogether(collectives_of([zero]), "making an overlap hook") as together:
        engine = engine_of(zero)
        check_overlap(ddp, zero, engine)
        together.facts = [
            Fact("interleaved", str(interleaved)),
            Fact("hook", _hook_name(hook)),
            Fact("static_graph of DDP", str(bool(ddp.static_graph))),
            Fact("find_unused_parameters of DDP", str(bool(ddp.find_unused_parameters))),
            *optimizer_facts([engine]),
        ]
    zero.overlap = OverlappedStep(engine, ddp, zero, hook, interleaved)

    def hook_with_step(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        future: Future[Tensor] = zero.overlap.reduce_and_update(state, bucket)
        return future

    return hook_with_step


def _hook_name(hook: Hook) -> str:
    """Return the name of a function, or the class name of another callable, whose repr may contain an address."""
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"


@dataclass(frozen=True, slots=True)
class _BucketUpdate:
    """The update of one bucket in one backward pass."""

    is_last: bool  # whether it is the last bucket of the pass
    assignment: DDPBucketAssignment  # which rank owns which range of the bucket
    buffer: Tensor  # the bucket's gradients
    reduced: "Future[Any]"  # the future of the user's hook, which gives the reduced gradients
    done: "Future[Any]"  # the future that DDP waits for
    # By parameter in the bucket, whether this rank has a gradient, and later whether any rank has.
    has_gradient: dict[int, bool]


@dataclass(slots=True)
class _Iteration:
    """The progress of the overlapped step in one backward pass."""

    options: OptionsSnapshot  # the inner optimizer's options before the update
    # A failure of this rank's own update. This rank goes on with all collectives, and the status flags at the end tell
    # the other ranks.
    update_failure: FirstFailure
    waiting: list[_BucketUpdate] = field(default_factory=list)  # the buckets that have not been updated yet
    broadcasts: InFlight = field(default_factory=InFlight)  # the updated parameters in flight
    params: set[int] = field(default_factory=set)  # the parameters that are in a bucket
    # A failure of a collective, or the error that the status flags raised. No collective follows.
    collective_failure: FirstFailure = field(default_factory=FirstFailure)
    gradient_versions: Sequence[int | None] = ()  # at the end of the pass, the version of every gradient


class OverlappedStep:
    """Runs an engine's update and share for each bucket that DDP gives to a communication hook.

    DDP refers to the optimizer through the hook, and the optimizer to this object. It refers weakly to both.
    """

    def __init__(
        self, engine: Engine, ddp: DistributedDataParallel, zero: ShardedOptimizer, hook: Hook, interleaved: bool
    ) -> None:
        self._engine = engine
        self._ddp, self._zero = weakref.ref(ddp), weakref.ref(zero)
        self._hook = hook
        self._interleaved = interleaved
        self._side_stream = SideStream(engine.params[0].device)
        self._passes = 0
        self._iteration: _Iteration | None = None
        self._pool = BufferPool()
        self._assignments = self._make_assignments()
        self._options_after_update: list[dict[str, str]] = []
        self.updated = False  # whether a backward pass has updated, and step() has not been called since
        self.step_was_called = False

    def reduce_and_update(self, state: Any, bucket: GradBucket) -> Future[Any]:
        """Reduce one bucket with the user's hook, and update earlier ones.

        DDP calls this for every bucket of a synchronising backward pass.
        """
        ddp = self._ddp()
        assert ddp is not None, "only a live DDP calls its hook"
        if in_join_context(ddp):
            raise RuntimeError(JOIN_REFUSAL)
        if self._passes < (3 if ddp.static_graph else 2):  # until DDP has rebuilt its buckets
            self._passes += bucket.is_last()
            return self._hook(state, bucket)
        if bucket.index() == 0:
            self._iteration = self._begin_iteration()
        iteration = self._iteration
        assert iteration is not None
        update = self._plan_update(bucket, self._hook(state, bucket))
        iteration.params.update(update.has_gradient)
        iteration.waiting.append(update)
        if bucket.is_last():
            after_backward(self._end_backward)
        if self._interleaved or bucket.is_last():
            # The last bucket but for the last call is left alone: its reduction has just begun.
            count = len(iteration.waiting) - (not bucket.is_last())
            updates, iteration.waiting = iteration.waiting[:count], iteration.waiting[count:]
            may_lack_gradients = bool(ddp.find_unused_parameters or ddp.static_graph)
            self._run_updates(iteration, updates, may_lack_gradients)
        return update.done

    def finish_step(self, groups: Sequence[Group]) -> bool:
        """Finish in ``step()`` an update inside backward: update the parameters that are in no bucket.

        Returns False if there was no update inside backward. If options or gradients were changed too late, this rank
        raises; the others do so too if some parameter is in no bucket, because then this call communicates.
        """
        if not self.updated:
            return False
        self.updated = False
        engine, iteration, failure = self._engine, self._iteration, FirstFailure()
        assert iteration is not None
        with failure:
            self._check_gradients_unchanged(iteration)
            self._check_options_unchanged(groups)
        if len(iteration.params) == len(engine.params):
            failure.raise_if_any()
            engine.inner.end_step()
            return True
        has_gradient = [
            index not in iteration.params and has for index, has in enumerate(engine.gradients.has_gradient())
        ]
        with failure:
            if not failure:
                iteration.options.restore(engine.inner.optim.param_groups)
                engine.update_some(has_gradient)
        engine.confirm_and_share(groups, has_gradient, failure.error)
        return True

    def _groups(self) -> list[Group]:
        zero = self._zero()
        assert zero is not None, "the hook keeps it alive"
        return zero.param_groups

    def _begin_iteration(self) -> _Iteration:
        """Prepare the engine for the first bucket of a backward pass."""
        self._engine.status.check_previous()
        if self.updated and self.step_was_called:
            raise RuntimeError(
                "a second synchronising backward pass came before step(): its gradients would be applied on top of "
                "the first pass, which has already updated the parameters; accumulate inside ddp.no_sync(), and call "
                "step() after every other pass: an update inside backward() cannot be skipped"
            )
        if self._iteration is None and not self.step_was_called:
            warnings.warn(
                "updates now happen inside backward(), and step() was never called, so the backward passes before this "
                "one updated nothing; call step() in every iteration and no update is lost",
                stacklevel=2,
            )
        engine, groups, failure = self._engine, self._groups(), FirstFailure()
        with failure:
            engine.follow_moved_params()
            engine.check_groups(groups)
            engine.inner.push_options(groups)
            engine.inner.master_weights.refresh_from_params()
        if self._assignments.layouts[0] is not engine.layout:
            self._assignments = self._make_assignments()
        return _Iteration(OptionsSnapshot.of(engine.inner.optim.param_groups), failure)

    def _make_assignments(self) -> DDPBucketAssignmentCache:
        """Return an empty cache of assignments for the current layout."""
        engine = self._engine
        return DDPBucketAssignmentCache([engine.layout], [engine.params], engine.collectives.group_rank)

    def _plan_update(self, bucket: GradBucket, reduced: "Future[Any]") -> _BucketUpdate:
        assignment = self._assignments.get(bucket.index(), bucket.parameters())
        # param.grad is read here, because the flat buffer has zeros for a missing gradient.
        has_gradient = {each.index: each.param.grad is not None for each in assignment.params}
        done = self._side_stream.future()
        return _BucketUpdate(bucket.is_last(), assignment, bucket.buffer(), reduced, done, has_gradient)

    def _run_updates(self, iteration: _Iteration, updates: Sequence[_BucketUpdate], may_lack_gradients: bool) -> None:
        """Update and share some buckets. It never raises: :meth:`_end_backward` does, when DDP has ended the pass."""
        failure = iteration.collective_failure
        with self._side_stream.use():
            # A failed collective (a dead peer, a timeout) ends the iteration: nothing may wait for other ranks again.
            if updates and not failure:
                with failure, self._engine.collectives.explained_errors(CALL):
                    self._update_and_share(iteration, updates, may_lack_gradients)
            for update in updates:
                if not update.done.done():
                    update.done.set_result(update.buffer)

    def _update_and_share(
        self, iteration: _Iteration, updates: Sequence[_BucketUpdate], may_lack_gradients: bool
    ) -> None:
        """Update this rank's shards in some buckets and start to share them.

        Every rank makes the same collective calls in the same order, even if its own update has failed.
        """
        self._exchange_has_gradient(updates, may_lack_gradients)
        for update in updates:
            gradients = self._reduced_gradients(iteration, update)
            with iteration.update_failure:
                if not iteration.update_failure:
                    self._update(iteration, update, gradients)
            self._start_sharing(iteration, update)
            if update.is_last:
                self._finish_iteration(iteration)
            update.done.set_result(gradients)

    def _reduced_gradients(self, iteration: _Iteration, update: _BucketUpdate) -> Tensor:
        """Wait for the gradients of the user's hook; raise if the hook has lost another rank.

        Other ranks are told of any other error of the hook at the end of the iteration. They cannot be told of a lost
        rank: the next collective would wait for it until the timeout, once more.
        """
        try:
            return _tensor_of(update.reduced.wait())
        except Exception as error:
            if is_backend_error(error):
                raise
            with iteration.update_failure:
                raise
        return update.buffer

    def _exchange_has_gradient(self, updates: Sequence[_BucketUpdate], may_lack_gradients: bool) -> None:
        """Replace, for each parameter of some buckets, whether this rank has a gradient by whether any rank has one.

        The host waits for the answer. In a group without a CPU backend that means waiting for the accelerator: once in
        an iteration, or once for each bucket if interleaved. This is only so with ``find_unused_parameters`` or
        ``static_graph``, where a parameter without a gradient must not be updated.
        """
        has_gradient = [has for update in updates for has in update.has_gradient.values()]
        if has_gradient and may_lack_gradients:
            collectives = self._engine.collectives
            flags = flags_on(collectives.host_device, has_gradient)
            collectives.all_reduce(flags, CALL, largest=True).wait()
            has_gradient = [bool(flag) for flag in flags.tolist()]
        else:
            has_gradient = [True] * len(has_gradient)  # DDP would not have called the hook otherwise
        answers = iter(has_gradient)
        for update in updates:
            update.has_gradient.update(zip(update.has_gradient, answers, strict=False))

    @profiled("onecopy.overlap.update")
    def _update(self, iteration: _Iteration, update: _BucketUpdate, gradients: Tensor) -> None:
        """Step the inner optimizer over this rank's shards in one bucket."""
        inner = self._engine.inner
        gradient_shards = {
            each.index: each.owned_view(gradients)
            for each in update.assignment.params
            if each.shard is not None and update.has_gradient[each.index]
        }
        # Counters that an optimizer class has in its groups must advance once in an iteration, on every rank.
        if gradient_shards or update.is_last:
            iteration.options.restore(inner.optim.param_groups)
            inner.step_on(gradient_shards)

    @profiled("onecopy.overlap.send")
    def _start_sharing(self, iteration: _Iteration, update: _BucketUpdate) -> None:
        """Start to share the updated parameters of one bucket."""
        engine, has_gradient = self._engine, update.has_gradient
        sharing = update.assignment.plans.get("sharing")
        if sharing is None:
            ranges = [each for each in engine.storage.ranges if not has_gradient.keys().isdisjoint(each.params)]
            sharing = update.assignment.plans["sharing"] = Sharing(engine.collectives, ranges, pool=self._pool)
        changed = (
            None
            if engine.inner.updates_without_gradient
            else [has_gradient.get(index, False) for index in range(len(engine.params))]
        )
        sharing.start(changed, iteration.broadcasts, CALL)
        changed_params = [engine.params[index] for index, has in has_gradient.items() if has]
        if changed_params:
            engine.inner.master_weights.increment_versions(changed_params)

    def _finish_iteration(self, iteration: _Iteration) -> None:
        """Wait for all parameters and exchange status flags; raise if the update has failed.

        With flags on an accelerator, the other ranks raise when the next iteration begins.
        """
        iteration.broadcasts.drain()
        engine, groups = self._engine, self._groups()
        facts = engine.facts(groups, [True] * len(engine.params))
        engine.status.exchange(facts, iteration.update_failure.error, CALL)
        iteration.update_failure.raise_if_any()
        inner = engine.inner
        inner.pull_options(groups)
        # Read from the inner optimizer: the user may have changed an option in param_groups during backward().
        self._options_after_update = [options_text(group) for group in inner.optim.param_groups]
        self.updated = True

    def _end_backward(self) -> None:
        """Raise the error of the update, or remember the version of every gradient; called at the end of backward."""
        iteration = self._iteration
        assert iteration is not None
        iteration.collective_failure.raise_if_any()
        iteration.gradient_versions = [
            None if param.grad is None else version_of(param.grad) for param in self._engine.params
        ]

    def _check_gradients_unchanged(self, iteration: _Iteration) -> None:
        """Raise if a gradient was changed after the update inside backward."""
        for index in iteration.params:
            gradient = self._engine.params[index].grad
            if gradient is not None and version_of(gradient) != iteration.gradient_versions[index]:
                raise RuntimeError(
                    f"the gradient of parameter {self._engine.layout.params[index].name!r} was changed between "
                    "backward() and step() (clipping, unscaling), but the update has already happened inside "
                    "backward(); use onecopy.reduce_scatter_hook, which steps after backward"
                )

    def _check_options_unchanged(self, groups: Sequence[Group]) -> None:
        """Raise if an option was changed after the update inside backward."""
        if [options_text(group) for group in groups] != self._options_after_update:
            raise RuntimeError(
                "options in param_groups were changed in backward() or between backward() and step(), but the update "
                "has already happened inside backward(); change them before backward(), as schedulers do after step()"
            )


def check_step_arguments(attributes: dict[str, Any], closure: object, kwargs: dict[str, Any]) -> None:
    """Raise if ``step()`` is called with a closure, a GradScaler or arguments, which need an update after backward.

    A GradScaler leaves attributes of its own among those of the optimizer.
    """
    refused = "a closure" if closure is not None else f"step({', '.join(kwargs)}=...)" if kwargs else None
    refused = "a GradScaler" if "found_inf" in attributes else refused
    if refused is not None:
        for name in ("found_inf", "grad_scale"):  # a GradScaler removes them only if step() returns
            attributes.pop(name, None)
        raise RuntimeError(
            f"{refused} cannot be combined with overlap_with_ddp=True, because the update happens inside backward(); "
            "construct the optimizer without it and register onecopy.reduce_scatter_hook, which steps after backward"
        )


def _tensor_of(result: Any) -> Tensor:
    """Return the tensor in the result of a hook's future, which may be a list with one tensor."""
    tensor = result[0] if isinstance(result, (list, tuple)) else result
    assert isinstance(tensor, Tensor), type(result)
    return tensor
