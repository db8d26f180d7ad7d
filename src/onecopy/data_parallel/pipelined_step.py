"""The driver for parameters in divided buckets: update a bucket while the one before it is on its way to all ranks.

1. Confirm: all ranks have gradients for the same parameters and the same options, and none has failed yet.
2. Bucket by bucket, those that the next forward pass reads first in front: update, start sending.
3. Confirm again, and wait for all of it; or leave both to the next forward pass (``overlap``), whose modules wait for
   what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onecopy.comm import limits
from onecopy.comm.agreement import raise_together
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import InFlight
from onecopy.comm.status_flags import DeferredRead, flags_on
from onecopy.comm.work import Work
from onecopy.common.profiling import profile_range
from onecopy.data_parallel.parameter_buckets import ParameterBuckets
from onecopy.errors import PeerFailedError
from onecopy.layout import BucketPlan
from onecopy.step.engine import Engine
from onecopy.step.group_options import OptionsSnapshot
from onecopy.step.owned_shards import OwnedShard
from onecopy.step.parameter_groups import Group
from onecopy.step.parameter_sync import ParameterSync


@dataclass(frozen=True, slots=True)
class _UpdateSegment:
    """Some buckets that are updated together: their parameters, what this rank owns of them, and how they are sent."""

    params: frozenset[int]
    owned: tuple[OwnedShard, ...]
    param_sync: ParameterSync


class PipelinedStep:
    """Steps one engine, whose storage is an :class:`~onecopy.data_parallel.parameter_buckets.Arena`."""

    def __init__(
        self, engine: Engine, plans: Sequence[BucketPlan], overlap: bool, alone: bool, replicas: Collectives | None
    ) -> None:
        self._engine = engine
        self._plans = list(plans)
        self._overlap = overlap
        # With another optimizer's step to come, ranks must know of a failure before it.
        self._defers_word = overlap and alone and replicas is None
        self._storage: object = None
        self._segments: list[_UpdateSegment] = []
        self._segment_of: dict[int, int] = {}  # by parameter
        self._flying: dict[int, tuple[InFlight, list[Tensor]]] = {}
        self._replicas = replicas
        self._unread: DeferredRead | None = None
        self._arriving: Work | None = None
        self._plan()

    def step(
        self, engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        """One step, as every driver does it."""
        self._raise_failure_of_last_step()
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
        local, gradients = engine.inner, engine.gradients
        ranges: dict[int, Tensor] = {}
        failure: Exception | None = None
        self.wait()
        try:
            engine.follow_moved_params()
            self._plan()
            engine.check_groups(groups)
            local.push_options(groups)
            local.master_weights.refresh_from_params()
            ranges = dict(gradients.owned_shards() or {})
        except Exception as error:
            failure = error
        has_gradient = gradients.has_gradient()
        engine.confirm(groups, has_gradient, failure)
        options = OptionsSnapshot.of(local.optim.param_groups)
        for number, segment in enumerate(self._segments):
            try:
                if failure is None:
                    with profile_range("onecopy.update"):
                        options.restore(local.optim.param_groups)
                        local.step_part(segment.owned, ranges, kwargs)
            except Exception as error:
                failure = error
            self._send(number, segment, has_gradient)
        self._end(failure)
        local.pull_options(groups)
        return loss

    def _send(self, number: int, segment: _UpdateSegment, has_gradient: Sequence[bool]) -> None:
        engine = self._engine
        everything = engine.inner.moves_all or engine.defers_status
        changed = [engine.params[index] for index in segment.params if everything or has_gradient[index]]
        with profile_range("onecopy.share"):
            self._flying[number] = (segment.param_sync.start(None if everything else has_gradient), changed)

    def _end(self, failure: Exception | None) -> None:
        """Tell all ranks whether one has failed; then wait, or leave that for later."""
        words = [collectives for collectives in (self._engine.collectives, self._replicas) if collectives is not None]
        mine = 0 if failure is None else 1 + words[0].group_rank
        word = flags_on(words[0].control_device, [mine])
        if self._defers_word and not words[0].defers_host_reads:
            # The word arrives behind the parameters, for which nobody waits here: it is read in the next forward pass.
            self._arriving, self._unread = words[0].all_reduce(word, largest=True), DeferredRead(word)
            if failure is not None:
                self.wait()
                raise failure
            return
        for collectives in words:
            collectives.all_reduce(word, largest=True).wait()
        if words[0].defers_host_reads:
            if failure is not None:
                self.wait()
                raise failure
            self._unread = DeferredRead(word)
        elif word.item():
            self.wait()
            self._engine.clear_status()
            raise_together(words[0], "step()", failure)
        if not self._overlap:
            self.wait()

    def raise_deferred_failure(self) -> None:
        """In a forward pass, before anything else is exchanged: raise if the last step has failed on a rank."""
        if self._arriving is not None:
            self._raise_failure_of_last_step()

    def _raise_failure_of_last_step(self) -> None:
        """Raise on all ranks if the update has failed on one of them in the last step."""
        arriving, self._arriving = self._arriving, None
        unread, self._unread = self._unread, None
        if arriving is not None:
            arriving.wait()
        failed = unread.read()[0] if unread is not None else 0
        if failed:
            raise PeerFailedError(
                f"rank {self._engine.collectives.group_rank}: the previous step() failed on rank {failed - 1}; see its "
                "own error, and load a checkpoint before going on"
            )

    def wait(self) -> None:
        """End everything that is under way."""
        self._drain(list(self._flying))
        if self._arriving is not None:
            self._arriving.wait()  # what it says is for the next forward pass

    @property
    def under_way(self) -> bool:
        """Whether something has not arrived everywhere yet."""
        return bool(self._flying)

    def wait_for(self, params: Iterable[int]) -> None:
        """End the transfers of what holds some parameters."""
        for param in params if self._flying else ():
            number = self._segment_of[param]
            if number in self._flying:
                self._drain([number])

    def _drain(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            flying, changed = self._flying.pop(number)
            flying.drain()
            if changed:
                # Written behind autograd's back: whoever has used the old values is told so by autograd.
                increment_version(changed)

    def _plan(self) -> None:
        """Divide the buckets into segments, anew where parameters have moved."""
        engine, storage = self._engine, self._engine.storage
        if storage is self._storage:
            return
        assert isinstance(storage, ParameterBuckets)
        sets: list[list[int]] = [[]]
        size = before = 0
        for number in reversed(range(len(self._plans))):
            if sets[-1] and size >= min(limits.SEGMENT_BYTES, before) and not engine.inner.moves_all:
                sets.append([])
                before += size
                size = 0
            sets[-1].append(number)
            size += storage.buckets[number].numel() * storage.buckets[number].element_size()
        segments = []
        for numbers in sets:
            params = frozenset(index for number in numbers for index in self._plans[number].params)
            owned = tuple(entry for entry in engine.inner.owned if entry.shard.param in params)
            pieces = [piece for number in numbers for piece in storage.pieces_of[number]]
            segments.append(
                _UpdateSegment(params, owned, ParameterSync(engine.collectives, pieces, storage.direct_bytes))
            )
        # Last, so that a plan which failed is made again.
        self._storage, self._segments = storage, segments
        self._segment_of = {param: number for number, each in enumerate(self._segments) for param in each.params}
