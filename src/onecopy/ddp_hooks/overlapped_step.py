"""Stepping inside the backward pass, bucket by bucket.

One iteration, once DDP's buckets are final:

1. DDP calls the hook for a bucket; the user's own hook starts to reduce it.
2. A job for the bucket goes to the worker (at once, or when the last bucket has come). Jobs run in bucket order, on a
   process group of their own: wait for the reduced gradients, agree on who has one, step the inner optimizer over this
   rank's part of the bucket, start sending the result.
3. The last job waits for everything sent, exchanges the status word and completes the last bucket's future, for which
   DDP, and so ``backward()``, waits.

Until the buckets are final, and for parameters that are in none, ``step()`` does the update as usual.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.futures import Future

from onecopy.comm import limits
from onecopy.comm.agreement import agree
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import InFlight
from onecopy.common.profiling import profiled
from onecopy.common.torch_private import after_backward, in_backward, version_of
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment, DDPBucketAssignments, GradBucket
from onecopy.ddp_hooks.worker import Task, Worker
from onecopy.step.engine import Engine
from onecopy.step.group_options import OptionsSnapshot
from onecopy.step.join_handover import read_handover, write_handover
from onecopy.step.parameter_groups import Group
from onecopy.step.parameter_sync import PackBuffers, ParameterSync
from onecopy.step.rank_comparison import group_facts, options_text

Hook = Callable[[Any, Any], "Future[Any]"]


@dataclass(frozen=True, slots=True)
class OverlapSchedule:
    """How a hook overlaps. ``passes`` backward passes go by before updates move into backward."""

    passes: int
    when_reduced: bool
    unused_params: bool
    uneven_inputs: bool
    last_used: Callable[[], set[int]]  # identities of what this rank's last backward pass used, as DDP sees it


@dataclass(slots=True)
class OverlapInfo:
    """What one backward pass has done so far."""

    options: OptionsSnapshot
    jobs: list[Task] = field(default_factory=list)
    flying: InFlight = field(default_factory=InFlight)
    failure: Exception | None = None  # of this rank's own update: told to all ranks at the end
    broken: Exception | None = None  # of a collective: there is no telling any more


class OverlappedStep:
    """Drives an engine from DDP's hook. Made when the hook is, with the engine that it steps."""

    def __init__(
        self,
        engine: Engine,
        groups: Callable[[], Sequence[Group]],
        collectives: Collectives,
        worker: Worker,
        hook: Hook,
        schedule: Callable[[], OverlapSchedule],
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._collectives = collectives
        self._worker = worker
        self._hook = hook
        self._schedule = schedule
        self._passes = 0
        self._iteration: OverlapInfo | None = None
        self._param_syncs: dict[int, tuple[DDPBucketAssignment, ParameterSync]] = {}
        self._gradient_versions: list[int | None] | None = None
        self._assignments = self._make_assignments()
        self._covered: set[int] = set()
        self._error: Exception | None = None
        self._options_after: list[dict[str, str]] = []
        self._slots = PackBuffers()
        self.updated = False
        self.step_was_called = False

    def on_bucket(self, state: Any, bucket: GradBucket) -> Future[Any]:
        """What DDP calls for every bucket of every synchronising backward pass."""
        schedule = self._schedule()
        if self._passes < schedule.passes:
            self._passes += bucket.is_last()
            return self._hook(state, bucket)
        if bucket.index() == 0:
            self._begin()
        iteration = self._iteration
        assert iteration is not None
        reduced = self._hook(state, bucket)
        done: Future[Any] | None = self._worker.future() if bucket.is_last() else None
        iteration.jobs.append(self._job(iteration, bucket, reduced, done, schedule))
        if bucket.is_last() and in_backward():
            after_backward(self._end_backward)
        if schedule.when_reduced or bucket.is_last():
            for job in iteration.jobs:
                self._worker.submit(job)
            iteration.jobs.clear()
        return reduced if done is None else done

    def finish_step(self, groups: Sequence[Group]) -> bool:
        """Do what an update inside backward has left for ``step()``: parameters that no bucket holds.

        Returns False if there was no such update. Raises what went wrong in it, if that was not raised already.
        """
        self._raise_error()
        if not self.updated:
            return False
        self.updated = False
        self._check_gradients_unchanged()
        if [options_text(group) for group in groups] != self._options_after:
            raise RuntimeError(
                "options in param_groups were changed in backward() or between backward() and step(), but the update "
                "has already happened inside backward(); change them before backward(), as schedulers do after step()"
            )
        engine = self._engine
        rest = [index for index in range(len(engine.params)) if index not in self._covered]
        if not rest:
            return True
        failure = None
        has_gradient = [index not in self._covered and has for index, has in enumerate(engine.gradients.has_gradient())]
        try:
            assert self._iteration is not None
            self._iteration.options.restore(engine.inner.optim.param_groups)
            engine.update_some(has_gradient)
        except Exception as error:
            failure = error
        engine.confirm_and_share(groups, has_gradient, failure)
        return True

    def _begin(self) -> None:
        if self.updated and self.step_was_called:
            raise RuntimeError(
                "a second synchronising backward pass came before step(): its gradients would be applied on top of "
                "those of the first, which have been stepped on already; accumulate inside ddp.no_sync(), and call "
                "step() after every other pass: an update inside backward() cannot be skipped"
            )
        if self._iteration is None and not self.step_was_called:
            warnings.warn(
                "updates now happen inside backward(), and step() was never called, so the backward passes before this "
                "one updated nothing; call step() in every iteration and no update is lost",
                stacklevel=2,
            )
        engine = self._engine
        failure: Exception | None = None
        groups = self._groups()
        try:
            engine.follow_moved_params()
            engine.check_groups(groups)
            engine.inner.push_options(groups)
            engine.inner.master_weights.refresh_from_params()
        except Exception as error:
            failure = error  # told to all ranks at the end, like any other
        if self._assignments.layouts[0] is not engine.layout:
            self._assignments = self._make_assignments()
            self._param_syncs.clear()
        self._covered = set()
        self._iteration = OverlapInfo(OptionsSnapshot.of(engine.inner.optim.param_groups), failure=failure)

    def _make_assignments(self) -> DDPBucketAssignments:
        engine = self._engine
        collectives = engine.collectives
        return DDPBucketAssignments([engine.layout], [engine.params], collectives.world_size, collectives.group_rank)

    def _job(
        self,
        iteration: OverlapInfo,
        bucket: GradBucket,
        reduced: Future[Any],
        done: Future[Any] | None,
        schedule: OverlapSchedule,
    ) -> Task:
        number, buffer = bucket.index(), bucket.buffer()
        assignment = self._assignments.find(number, bucket.parameters())
        params = list(
            dict.fromkeys(segment.shard.param for segment in assignment.segments if segment.shard is not None)
        )
        self._covered.update(params)
        # Read here, on autograd's thread: the flat buffer shows zeros for a missing gradient. A rank that has run out
        # of inputs says what it said last, as it does in DDP's own exchange.
        active = in_backward()
        if active or not schedule.unused_params:
            has_gradient = [self._engine.params[index].grad is not None for index in params]
        else:
            used = schedule.last_used()
            has_gradient = [id(self._engine.params[index]) in used for index in params]

        def work() -> None:
            # Every rank makes the same calls in the same order, also one whose own update has failed.
            gradients = buffer
            with _noting_failure(iteration):
                gradients = _tensor_of(reduced.wait())
            if number == 0 and schedule.uneven_inputs:
                self._hand_over_options(iteration, active)
            present = self._agree_on_gradients(params, has_gradient, schedule)
            with _noting_failure(iteration):
                if iteration.failure is None:
                    self._update(iteration, assignment, gradients, present, last=done is not None)
            self._send(iteration, number, assignment, present)
            if done is not None:
                self._complete(iteration)
                done.set_result(gradients)

        def job() -> None:
            # A collective that fails (a dead peer, a timeout) ends the iteration: backward() must not wait for it.
            try:
                if iteration.broken is None:
                    work()
            except Exception as error:
                iteration.broken = error
            if done is not None and iteration.broken is not None:
                # Raised when backward() ends: an exception inside DDP's future would lose its type.
                self._error = iteration.broken
                done.set_result(buffer)

        return job

    def _hand_over_options(self, iteration: OverlapInfo, active: bool) -> None:
        """Give ranks that have run out of inputs the options of one that has not."""
        flags = [row[0] for row in self._collectives.all_gather_flags([int(active)], "the update inside backward()")]
        if all(flags):
            return
        source, header = flags.index(1), b""
        groups = self._groups()
        with _noting_failure(iteration):
            if source == self._collectives.group_rank:
                header = write_handover(groups, [], False)
        received = self._collectives.broadcast_bytes(header, source)
        if received and not active:
            read_handover(received).apply_options(groups)
            self._engine.inner.push_options(groups)
            iteration.options = OptionsSnapshot.of(self._engine.inner.optim.param_groups)

    def _agree_on_gradients(
        self, params: Sequence[int], has_gradient: Sequence[bool], schedule: OverlapSchedule
    ) -> dict[int, bool]:
        """Which parameters of a bucket have a gradient on some rank. DDP vouches for all unless told otherwise."""
        if not params or not (schedule.unused_params or schedule.uneven_inputs):
            return dict.fromkeys(params, True)
        flags = torch.tensor(has_gradient, dtype=torch.int64, device=self._collectives.control_device)
        self._collectives.all_reduce(flags, largest=True).wait()
        return {index: bool(flag) for index, flag in zip(params, flags.tolist(), strict=True)}

    @profiled("onecopy.overlap.update")
    def _update(
        self,
        iteration: OverlapInfo,
        assignment: DDPBucketAssignment,
        buffer: Tensor,
        present: dict[int, bool],
        last: bool,
    ) -> None:
        local = self._engine.inner
        ranges = {
            segment.shard.param: view
            for segment, view in assignment.mine(buffer)
            if segment.shard is not None and present[segment.shard.param]
        }
        # Values that a class keeps in its groups (step counters) advance once an iteration, on every rank.
        if ranges or last:
            iteration.options.restore(local.optim.param_groups)
            local.step_on(ranges)

    @profiled("onecopy.overlap.send")
    def _send(
        self, iteration: OverlapInfo, number: int, assignment: DDPBucketAssignment, present: dict[int, bool]
    ) -> None:
        engine = self._engine
        known = self._param_syncs.get(number)
        if known is None or known[0] is not assignment:
            members = {segment.shard.param for segment in assignment.segments if segment.shard is not None}
            pieces = [piece for piece in engine.storage.ranges if not members.isdisjoint(piece.params)]
            known = (assignment, ParameterSync(self._collectives, pieces, limits.DIRECT_BYTES, self._slots))
            self._param_syncs[number] = known
        touched = None if engine.inner.moves_all else [present.get(index, False) for index in range(len(engine.params))]
        known[1].start(touched, iteration.flying)
        changed = [engine.params[index] for index, has in present.items() if has]
        if changed:
            increment_version(changed)

    def _complete(self, iteration: OverlapInfo) -> None:
        iteration.flying.drain()
        agree(self._collectives, "the update inside backward()", group_facts(self._groups()), iteration.failure)
        local = self._engine.inner
        local.pull_options(self._groups())
        # Not those of the groups themselves: someone may have changed an option while backward() was running.
        self._options_after = [options_text(group) for group in local.optim.param_groups]
        self.updated = True

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_backward(self) -> None:
        self._raise_error()
        self._gradient_versions = [
            None if param.grad is None else version_of(param.grad) for param in self._engine.params
        ]

    def _check_gradients_unchanged(self) -> None:
        versions, self._gradient_versions = self._gradient_versions, None
        if versions is None:
            return
        for index in self._covered:
            gradient = self._engine.params[index].grad
            if gradient is not None and version_of(gradient) != versions[index]:
                raise RuntimeError(
                    f"the gradient of parameter {self._engine.layout.params[index].name!r} was changed between "
                    "backward() and step() (clipping, unscaling), but the update has already happened inside "
                    "backward(); use onecopy.reduce_scatter_hook, which steps after backward"
                )


def check_step_arguments(attributes: dict[str, Any], closure: object, kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be combined with an update that has already happened inside backward."""
    what = "a closure" if closure is not None else f"step({', '.join(kwargs)}=...)" if kwargs else None
    what = "a GradScaler" if "found_inf" in attributes else what
    if what is not None:
        for name in ("found_inf", "grad_scale"):  # a GradScaler takes them back only after a step
            attributes.pop(name, None)
        raise RuntimeError(
            f"{what} cannot be combined with overlap_with_ddp=True, because the update happens inside backward(); "
            "construct the optimizer without it and register onecopy.reduce_scatter_hook, which steps afterwards"
        )


@contextlib.contextmanager
def _noting_failure(iteration: OverlapInfo) -> Iterator[None]:
    """Keep the first exception for the end of the iteration, when all ranks hear of it."""
    try:
        yield
    except Exception as error:
        iteration.failure = iteration.failure or error


def _tensor_of(result: Any) -> Tensor:
    tensor = result[0] if isinstance(result, (list, tuple)) else result
    assert isinstance(tensor, Tensor), type(result)
    return tensor
