"""The step schedule of ``ShardedDataParallel``: it updates a segment of buckets while the one before is sent.

1. Confirm: all ranks have gradients for the same parameters and the same options, and none has failed yet.
2. For each segment, in the order in which the next forward pass reads them: update, start sending.
3. Exchange status flags and wait for all transfers. With ``overlap``, the next forward pass does both: each submodule
   waits for the parameters that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.agreement import FirstFailure, raise_together
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import InFlight
from onecopy.comm.parameter_sharing import ParameterSharing
from onecopy.comm.status_flags import DeferredFlags, flags_on
from onecopy.comm.transports import SharingByDevice
from onecopy.common.profiler_ranges import profile_range
from onecopy.data_parallel.parameter_buckets import ParameterBuckets
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.layout import BucketPlan
from onecopy.step.engine import Engine
from onecopy.step.group_options import OptionsSnapshot
from onecopy.step.owned_shards import OwnedShard
from onecopy.step.parameter_groups import Group


@dataclass(frozen=True, slots=True)
class _UpdateSegment:
    """Buckets that are updated and sent together: their parameters, this rank's shards, and the transfers."""

    params: frozenset[int]
    owned: tuple[OwnedShard, ...]
    sharing: ParameterSharing


class PipelinedStep:
    """Steps one engine, whose storage is :class:`~onecopy.data_parallel.parameter_buckets.ParameterBuckets`.

    Args:
        engine: the engine.
        plans: the buckets of its parameters.
        overlap: whether ``step()`` returns while parameters are in flight.
        is_only_optimizer: whether the module has no other optimizer.
        replicas: the ranks that own the same shards in other replicas (with a mesh), or None.
    """

    def __init__(
        self,
        engine: Engine,
        plans: Sequence[BucketPlan],
        overlap: bool,
        is_only_optimizer: bool,
        replicas: Collectives | None,
    ) -> None:
        self._engine = engine
        self._plans = list(plans)
        self._overlap = overlap
        # If another optimizer steps next, the ranks must know of a failure before that.
        self._defers_flags = overlap and is_only_optimizer and replicas is None
        self._storage: object = None
        self._segments: list[_UpdateSegment] = []
        self._segment_of: dict[int, int] = {}  # by parameter
        # By segment, the transfers that have not ended, and the parameters that they change.
        self._transfers: dict[int, tuple[InFlight, list[Tensor]]] = {}
        self._replicas = replicas
        self._deferred_flags = DeferredFlags()
        self._plan_segments()

    def step(
        self, engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        """Make one step; return the loss of the closure, if there is one."""
        self._raise_failure_of_last_step()
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
        inner, gradients = engine.inner, engine.gradients
        gradient_shards: dict[int, Tensor] = {}
        failure = FirstFailure()
        self.wait()
        # 1. Confirm.
        with failure:
            engine.follow_moved_params()
            self._plan_segments()
            engine.check_groups(groups)
            inner.push_options(groups)
            inner.master_weights.refresh_from_params()
            gradient_shards = dict(gradients.owned_shards() or {})
        has_gradient = gradients.has_gradient()
        try:
            engine.confirm(groups, has_gradient, failure.error)
        except Exception as error:
            if self._replicas is not None:
                self._finish_step(error)  # ranks of other replicas have confirmed, and wait for these status flags
            raise
        # 2. Update and send. A rank that fails goes on sending, because the other ranks receive.
        options = OptionsSnapshot.of(inner.optim.param_groups)
        for number, segment in enumerate(self._segments):
            with failure:
                if not failure:
                    with profile_range("onecopy.update"):
                        options.restore(inner.optim.param_groups)
                        inner.step_part(segment.owned, gradient_shards, kwargs)
            self._start_sending(number, segment, has_gradient)
        # 3. Exchange status flags and wait.
        digest = 0 if self._replicas is None else engine.step_digest(groups, has_gradient)
        self._finish_step(failure.error, digest)
        inner.pull_options(groups)
        return loss

    def _start_sending(self, number: int, segment: _UpdateSegment, has_gradient: Sequence[bool]) -> None:
        engine = self._engine
        sends_all = engine.inner.updates_without_gradient or engine.defers_status
        changed = [engine.params[index] for index in segment.params if sends_all or has_gradient[index]]
        with profile_range("onecopy.share"):
            self._transfers[number] = (segment.sharing.start(None if sends_all else has_gradient), changed)

    def _finish_step(self, failure: Exception | None, digest: int = 0) -> None:
        """Exchange whether a rank has failed, and wait for all transfers, or leave both for later.

        Replicas compare options and gradients here: ``confirm`` is among the ranks of one replica.

        Args:
            failure: this rank's exception in the step.
            digest: with replicas, a digest of the facts that must be equal in all replicas.
        """
        collectives = self._engine.collectives
        failed = 0 if failure is None else 1 + collectives.global_rank
        # The largest digest, and the largest of the negated digests, differ where the digests do.
        flags = flags_on(collectives.control_device, [failed, digest, -digest])
        if self._defers_flags and not collectives.defers_host_reads:
            # The flags arrive after the parameters, for which this step does not wait. The next forward reads them.
            self._deferred_flags.put(flags, collectives.all_reduce(flags, largest=True))
            if failure is not None:
                self.wait()
                raise failure
            return
        collectives.all_reduce(flags, largest=True).wait()
        if self._replicas is not None:
            self._replicas.all_reduce(flags, largest=True).wait()
        if collectives.defers_host_reads:
            if failure is not None:
                self.wait()
                raise failure
            self._deferred_flags.put(flags)
        else:
            failed, highest, negated = flags.tolist()
            if failed:
                self.wait()
                self._engine.clear_status()
                raise_together(collectives, "step()", failure)
            self._check_replicas(highest, negated)
        if not self._overlap:
            self.wait()

    def raise_deferred_failure(self) -> None:
        """In a forward pass, before the ranks exchange anything: raise if the last step has failed on any rank."""
        if self._deferred_flags.in_flight:
            self._raise_failure_of_last_step()

    def _raise_failure_of_last_step(self) -> None:
        """Raise if the deferred flags tell that the update of the last step has failed on any rank."""
        flags = self._deferred_flags.take()
        if flags is None:
            return
        self._check_replicas(flags[1], flags[2])
        if flags[0]:
            raise PeerFailedError(
                f"rank {self._engine.collectives.group_rank}: the previous step() failed on rank {flags[0] - 1}; see "
                "its own error, and load a checkpoint before going on"
            )

    def _check_replicas(self, highest: int, negated: int) -> None:
        """Raise if the digests of the replicas differ."""
        if highest != -negated:
            self.wait()
            raise RanksDisagreeError(
                f"global rank {self._engine.collectives.global_rank}: the replicas of the mesh disagree in step(): "
                "they have different options in param_groups, or gradients for different parameters. Parameters may "
                "have been updated: load a checkpoint before going on"
            )

    def wait(self) -> None:
        """Wait for all transfers. The deferred flags have arrived then, but the next forward pass reads them."""
        self._end_transfers(list(self._transfers))
        self._deferred_flags.wait()

    @property
    def in_flight(self) -> bool:
        """Whether parameters are in flight."""
        return bool(self._transfers)

    def wait_for(self, params: Iterable[int]) -> None:
        """Wait for the segments that hold these parameters."""
        for param in params if self._transfers else ():
            number = self._segment_of[param]
            if number in self._transfers:
                self._end_transfers([number])

    def _end_transfers(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            transfers, changed = self._transfers.pop(number)
            transfers.drain()
            if changed:
                # The values were written without autograd's knowledge. The version counter lets a backward pass that
                # needs the old values raise.
                self._engine.inner.master_weights.increment_versions(changed)

    def _plan_segments(self) -> None:
        """Divide the buckets into segments, again if the parameters have moved."""
        engine, storage = self._engine, self._engine.storage
        if storage is self._storage:
            return
        assert isinstance(storage, ParameterBuckets)
        buckets_of_segment: list[list[int]] = [[]]
        size = size_before = 0
        for number in reversed(range(len(self._plans))):
            is_full = size >= min(limits.SEGMENT_BYTES, size_before)
            if buckets_of_segment[-1] and is_full and not engine.inner.updates_without_gradient:
                buckets_of_segment.append([])
                size_before += size
                size = 0
            buckets_of_segment[-1].append(number)
            size += storage.buckets[number].numel() * storage.buckets[number].element_size()
        segments = []
        for numbers in buckets_of_segment:
            params = frozenset(index for number in numbers for index in self._plans[number].params)
            owned = tuple(entry for entry in engine.inner.owned if entry.shard.param in params)
            ranges = [owned_range for number in numbers for owned_range in storage.ranges_by_bucket[number]]
            segments.append(
                _UpdateSegment(params, owned, SharingByDevice(engine.collectives, ranges, storage.direct_bytes))
            )
        # Assigned last, so that planning is repeated after a failure.
        self._storage, self._segments = storage, segments
        self._segment_of = {param: number for number, each in enumerate(self._segments) for param in each.params}
