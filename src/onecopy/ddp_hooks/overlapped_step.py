"""The step that overlaps with the backward pass: it updates bucket by bucket inside ``backward()``.

One iteration, after DDP has rebuilt its buckets:

1. DDP calls the hook for a bucket. The user's own hook starts to reduce the bucket.
2. A task goes to the worker: for each bucket if interleaved, otherwise for all buckets after the last one. It exchanges
   which parameters have a gradient, if some may have none. For each bucket it waits for the reduced gradients, steps
   the inner optimizer over this rank's shards in the bucket, and starts to share the updated parameters.
3. The last task waits for all parameters, exchanges status flags and completes the future of the last bucket. DDP waits
   for that future, so ``backward()`` ends after the update.

On an accelerator a task is enqueued on a side stream. The side stream reads DDP's buckets and writes the parameters.
Its last work completes the future of the last bucket, for which the stream of the backward pass waits: so neither the
next forward pass nor DDP's next use of a bucket comes before it. The host reads the status flags in the next iteration.

``step()`` updates as usual before DDP has rebuilt its buckets, and later updates parameters that are in no bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from onecopy.comm.agreement import FirstFailure
from onecopy.comm.buffers import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.sharing import Sharing
from onecopy.comm.status_flags import flags_on
from onecopy.comm.work import is_backend_error
from onecopy.common.profiler_ranges import profiled
from onecopy.common.torch_private import after_backward, version_of
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignmentCache, GradBucket
from onecopy.ddp_hooks.overlap_info import BucketUpdate, OverlapInfo, OverlapSettings
from onecopy.ddp_hooks.worker import TaskWorker
from onecopy.step.consistency import StepStatus, options_text
from onecopy.step.engine import Engine
from onecopy.step.parameter_groups import Group, OptionsSnapshot

Hook = Callable[[Any, Any], "Future[Any]"]

CALL = "the update inside backward()"
"""The name of the exchange between the ranks, for error messages."""


class OverlappedStep:
    """Runs an engine's update and share for each bucket that DDP gives to a communication hook.

    Attributes:
        updated: whether a backward pass has updated, and ``step()`` has not been called since.
        step_was_called: whether ``step()`` was ever called.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Callable[[], Sequence[Group]],
        collectives: Collectives,
        worker: TaskWorker,
        hook: Hook,
        settings: Callable[[], OverlapSettings],
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._collectives = collectives
        # On the optimizer's own group, flags are read in the order of all its updates, also those of step().
        self._status = engine.status if collectives is engine.collectives else StepStatus(collectives)
        self._worker = worker
        self._hook = hook
        self._settings = settings
        self._passes = 0
        self._info: OverlapInfo | None = None
        self._sharings: dict[int, tuple[DDPBucketAssignment, Sharing]] = {}
        self._pool = BufferPool()
        self._assignments = self._make_assignments()
        self._params_in_buckets: set[int] = set()
        self._gradient_versions: list[int | None] | None = None
        self._options_after_update: list[dict[str, str]] = []
        self._unraised_error: Exception | None = None
        self.updated = False
        self.step_was_called = False

    def reduce_and_update(self, state: Any, bucket: GradBucket) -> Future[Any]:
        """Reduce one bucket with the user's hook, and submit the task that updates its parameters or let it wait.

        DDP calls this for every bucket of a synchronising backward pass.
        """
        settings = self._settings()
        if self._passes < settings.passes_before_overlap:
            self._passes += bucket.is_last()
            return self._hook(state, bucket)
        if bucket.index() == 0:
            self._begin_iteration()
        info = self._info
        assert info is not None
        reduced = self._hook(state, bucket)
        done: Future[Any] | None = self._worker.future() if bucket.is_last() else None
        info.waiting.append(self._plan_update(bucket, reduced, done, settings))
        if bucket.is_last():
            after_backward(self._end_backward)
        if settings.interleaved or bucket.is_last():
            updates, info.waiting = info.waiting, []
            self._worker.submit(partial(self._run_task, info, updates))
        return reduced if done is None else done

    def finish_step(self, groups: Sequence[Group]) -> bool:
        """Finish in ``step()`` an update inside backward: update the parameters that are in no bucket.

        Returns False if there was no update inside backward. Raises the error of that update if ``backward()`` did
        not. If options or gradients were changed too late, this rank raises; the others do so too if some parameter is
        in no bucket, because then this call communicates.
        """
        self._raise_unraised_error()
        if not self.updated:
            return False
        self.updated = False
        engine, failure = self._engine, FirstFailure()
        with failure:
            self._check_gradients_unchanged()
            self._check_options_unchanged(groups)
        if len(self._params_in_buckets) == len(engine.params):
            failure.raise_if_any()
            return True
        has_gradient = [
            index not in self._params_in_buckets and has for index, has in enumerate(engine.gradients.has_gradient())
        ]
        assert self._info is not None
        with failure:
            if not failure:
                self._info.options.restore(engine.inner.optim.param_groups)
                engine.update_some(has_gradient)
        engine.confirm_and_share(groups, has_gradient, failure.error)
        return True

    def _begin_iteration(self) -> None:
        """Prepare the engine and a new OverlapInfo for the first bucket of a backward pass."""
        self._status.check_previous()
        if self.updated and self.step_was_called:
            raise RuntimeError(
                "a second synchronising backward pass came before step(): its gradients would be applied on top of "
                "the first pass, which has already updated the parameters; accumulate inside ddp.no_sync(), and call "
                "step() after every other pass: an update inside backward() cannot be skipped"
            )
        if self._info is None and not self.step_was_called:
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
            self._sharings.clear()
        self._params_in_buckets = set()
        self._info = OverlapInfo(OptionsSnapshot.of(engine.inner.optim.param_groups), failure)

    def _make_assignments(self) -> DDPBucketAssignmentCache:
        """Return an empty cache of assignments for the current layout."""
        engine = self._engine
        return DDPBucketAssignmentCache([engine.layout], [engine.params], engine.collectives.group_rank)

    def _plan_update(
        self, bucket: GradBucket, reduced: Future[Any], done: Future[Any] | None, settings: OverlapSettings
    ) -> BucketUpdate:
        """Read everything that the task for a bucket needs, on autograd's thread."""
        assignment = self._assignments.get(bucket.index(), bucket.parameters())
        params = dict.fromkeys(segment.shard.param for segment in assignment.segments if segment.shard is not None)
        self._params_in_buckets.update(params)
        # param.grad is read here, because the flat buffer has zeros for a missing gradient.
        has_gradient = {index: self._engine.params[index].grad is not None for index in params}
        return BucketUpdate(bucket.index(), assignment, bucket.buffer(), reduced, done, has_gradient, settings)

    def _run_task(self, info: OverlapInfo, updates: Sequence[BucketUpdate]) -> None:
        """Run the task of some buckets; it never raises, because the worker has no caller that could handle it."""
        # A failed collective (a dead peer, a timeout) ends the iteration: later tasks must not wait for other ranks.
        if not info.collective_failure:
            with info.collective_failure, self._collectives.explained_errors(CALL):
                self._update_and_share(info, updates)
        last = updates[-1]
        if last.done is not None and info.collective_failure:
            # backward() raises this at its end: an exception in DDP's future would lose its type.
            self._unraised_error = info.collective_failure.error
            last.done.set_result(last.buffer)

    def _update_and_share(self, info: OverlapInfo, updates: Sequence[BucketUpdate]) -> None:
        """Update this rank's shards in some buckets and start to share them.

        Every rank makes the same collective calls in the same order, even if its own update has failed.
        """
        self._exchange_has_gradient(updates)
        for update in updates:
            gradients = self._reduced_gradients(info, update)
            with info.update_failure:
                if not info.update_failure:
                    self._update(info, update, gradients)
            self._start_sharing(info, update)
            if update.done is not None:
                self._finish_iteration(info)
                update.done.set_result(gradients)

    def _reduced_gradients(self, info: OverlapInfo, update: BucketUpdate) -> Tensor:
        """Wait for the gradients of the user's hook; raise if the hook has lost another rank.

        Other ranks are told of any other error of the hook at the end of the iteration. They cannot be told of a lost
        rank: the next collective would wait for it until the timeout, once more.
        """
        try:
            return _tensor_of(update.reduced.wait())
        except Exception as error:
            if is_backend_error(error):
                raise
            with info.update_failure:
                raise
        return update.buffer

    def _exchange_has_gradient(self, updates: Sequence[BucketUpdate]) -> None:
        """Replace, for each parameter of some buckets, whether this rank has a gradient by whether any rank has one.

        The host waits for the answer. In a group without a CPU backend that means waiting for the accelerator: once in
        an iteration, or once for each bucket if interleaved. This is only so with ``find_unused_parameters``,
        ``static_graph`` or ``Join``, where a parameter without a gradient must not be updated.
        """
        settings = updates[0].settings
        has_gradient = [has for update in updates for has in update.has_gradient.values()]
        if has_gradient and settings.unused_params:
            flags = flags_on(self._collectives.host_device, has_gradient)
            self._collectives.all_reduce(flags, CALL, largest=True).wait()
            has_gradient = [bool(flag) for flag in flags.tolist()]
        else:
            has_gradient = [True] * len(has_gradient)  # DDP would not have called the hook otherwise
        answers = iter(has_gradient)
        for update in updates:
            update.has_gradient.update(zip(update.has_gradient, answers, strict=False))

    @profiled("onecopy.overlap.update")
    def _update(self, info: OverlapInfo, update: BucketUpdate, gradients: Tensor) -> None:
        """Step the inner optimizer over this rank's shards in one bucket."""
        inner = self._engine.inner
        gradient_shards = {
            segment.shard.param: view
            for segment, view in update.assignment.owned_views(gradients)
            if segment.shard is not None and update.has_gradient[segment.shard.param]
        }
        # Counters that an optimizer class has in its groups must advance once in an iteration, on every rank.
        if gradient_shards or update.done is not None:
            info.options.restore(inner.optim.param_groups)
            inner.step_on(gradient_shards)

    @profiled("onecopy.overlap.send")
    def _start_sharing(self, info: OverlapInfo, update: BucketUpdate) -> None:
        """Start to share the updated parameters of one bucket."""
        engine, has_gradient = self._engine, update.has_gradient
        cached = self._sharings.get(update.index)
        if cached is None or cached[0] is not update.assignment:
            ranges = [each for each in engine.storage.ranges if not has_gradient.keys().isdisjoint(each.params)]
            sharing = Sharing(self._collectives, ranges, pool=self._pool)
            cached = self._sharings[update.index] = (update.assignment, sharing)
        changed = (
            None
            if engine.inner.updates_without_gradient
            else [has_gradient.get(index, False) for index in range(len(engine.params))]
        )
        cached[1].start(changed, info.broadcasts, CALL)
        changed_params = [engine.params[index] for index, has in has_gradient.items() if has]
        if changed_params:
            engine.inner.master_weights.increment_versions(changed_params)

    def _finish_iteration(self, info: OverlapInfo) -> None:
        """Wait for all parameters and exchange status flags; raise if the update has failed.

        With flags on an accelerator, the other ranks raise when the next iteration begins.
        """
        info.wait_for_broadcasts()
        groups = self._groups()
        facts = self._engine.facts(groups, [True] * len(self._engine.params))
        self._status.exchange(facts, info.update_failure.error, CALL)
        info.update_failure.raise_if_any()
        inner = self._engine.inner
        inner.pull_options(groups)
        # Read from the inner optimizer: the user may have changed an option in param_groups during backward().
        self._options_after_update = [options_text(group) for group in inner.optim.param_groups]
        self.updated = True

    def _raise_unraised_error(self) -> None:
        """Raise the error of the last update, once."""
        error, self._unraised_error = self._unraised_error, None
        if error is not None:
            raise error

    def _end_backward(self) -> None:
        """Raise the error of the update, or remember the version of every gradient; called at the end of backward."""
        self._raise_unraised_error()
        self._gradient_versions = [
            None if param.grad is None else version_of(param.grad) for param in self._engine.params
        ]

    def _check_gradients_unchanged(self) -> None:
        """Raise if a gradient was changed after the update inside backward."""
        versions, self._gradient_versions = self._gradient_versions, None
        if versions is None:
            return
        for index in self._params_in_buckets:
            gradient = self._engine.params[index].grad
            if gradient is not None and version_of(gradient) != versions[index]:
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

    Args:
        attributes: the optimizer's attributes, among which a GradScaler leaves its own.
        closure: the closure given to ``step()``.
        kwargs: further arguments given to ``step()``.
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
