"""The step of ``ShardedDataParallel``: it updates a segment of buckets while the one before is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.agreement import FirstFailure
from onecopy.comm.sharing import Sharing
from onecopy.comm.streams import current_stream
from onecopy.comm.work import Work
from onecopy.common.torch_private import profile_range
from onecopy.data_parallel.backward import BackwardReducer
from onecopy.data_parallel.bucket import ParameterBuckets
from onecopy.step.engine import Engine
from onecopy.step.gradients import OwnedShard
from onecopy.step.parameter_groups import Group, OptionsSnapshot


@dataclass(frozen=True, slots=True)
class _UpdateSegment:
    """Buckets that are updated and sent together: their parameters, this rank's shards, and the transfers."""

    params: frozenset[int]
    owned: tuple[OwnedShard, ...]
    sharing: Sharing
    devices: tuple[torch.device, ...]


@dataclass(slots=True)
class _Transfers:
    """The transfers of one segment in one step.

    On an accelerator they are kept until the next step, because every stream that reads the parameters must wait.
    """

    works: list[Work]
    devices: tuple[torch.device, ...]
    changed: list[Tensor]  # the parameters that the transfers change
    increment_versions: Callable[[list[Tensor]], None]
    waiting: set[tuple[int, ...]] = field(default_factory=set)  # ids of the streams, of all devices, that have waited

    @property
    def for_all_streams(self) -> bool:
        """Whether waiting once is enough, because the CPU has no streams."""
        return all(device.type == "cpu" for device in self.devices)

    def wait(self) -> None:
        """Make the current stream wait, unless it has waited already."""
        current = tuple(stream.stream_id for stream in map(current_stream, self.devices) if stream is not None)
        if current in self.waiting:
            return
        for work in self.works:
            work.wait()
        if self.changed and not self.waiting:
            # The values were written without autograd's knowledge. The version counter lets a backward pass that needs
            # the old values raise.
            self.increment_versions(self.changed)
        self.waiting.add(current)


class PipelinedStep:
    """Steps one engine, whose parameters are in buckets.

    The phases of a step:

    1. **Confirm.** The ranks vote that all have gradients for the same parameters and the same options, and none has
       failed yet. With ``nonfinite``, all gradients are finite, too; otherwise all ranks raise or skip the step.
    2. **Update and send.** For each segment of buckets, in the order in which the next forward pass reads them: update
       this rank's shards, start sending them. A rank that fails goes on sending, because the other ranks receive.
    3. **Vote and wait.** The ranks vote that no update has failed, and wait for all transfers. With ``overlap``, the
       next forward pass does both: each submodule waits for the parameters that it reads.

    On an accelerator 1 is a part of 3, in one vote, which the host reads when it has arrived, at the latest in the next
    ``step()``. Nothing there makes the stream of the computation wait for it. With ``nonfinite="skip"`` the host reads
    1 at once there, too.
    """

    def __init__(
        self,
        engine: Engine,
        reducer: BackwardReducer,  # the backward pass of the module
        overlap: bool,  # whether ``step()`` returns while parameters are in flight
        is_only_optimizer: bool,  # whether the module has no other optimizer
        has_replicas: bool,  # whether there are other replicas (with a mesh)
    ) -> None:
        self._engine, self._reducer = engine, reducer
        self._overlap = overlap
        # On an accelerator the host must not wait. On the CPU, if another optimizer steps next, the ranks must know of
        # a failure before that.
        self._confirms_later = engine.collectives.defers_host_reads
        guard = engine.guard
        self._confirms_first = not self._confirms_later or (guard is not None and guard.agrees_first)
        self._defers_vote = self._confirms_later or (overlap and is_only_optimizer and not has_replicas)
        self._storage: object = None
        self._segments: list[_UpdateSegment] = []
        self._segment_of: dict[int, int] = {}  # by parameter
        self._transfers: dict[int, _Transfers] = {}  # by segment
        self._plan_segments()

    def step(
        self, engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        """Make one step; return the loss of the closure, if there is one."""
        # The one place where the host waits for an accelerator: for a vote that is a whole step old.
        engine.status.check_last_step()
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
        inner, gradients = engine.inner, engine.gradients
        has_gradient = gradients.has_gradient()
        if not any(has_gradient):
            self._reducer.check_followed()
        gradient_shards: dict[int, Tensor] = {}
        failure = FirstFailure()
        self.wait()
        self._transfers.clear()
        # 1. Confirm.
        with failure:
            engine.follow_moved_params()
            self._plan_segments()
            engine.check_groups(groups)
            inner.push_options(groups)
            inner.master_weights.refresh_from_params()
            gradient_shards = gradients.owned(inner.owned)
            if engine.guard is not None:
                engine.guard.look(gradient_shards, engine.layout)
        if self._confirms_first and engine.confirm(groups, has_gradient, failure.error, at_once=True):
            return loss
        # 2. Update and send.
        options = OptionsSnapshot.of(inner.optim.param_groups)
        for number, segment in enumerate(self._segments):
            with failure:
                if not failure:
                    with profile_range("onecopy.update"):
                        options.restore(inner.optim.param_groups)
                        inner.step_part(segment.owned, gradient_shards, kwargs)
            self._start_sending(number, segment, has_gradient)
        # 3. Vote and wait.
        self._finish_step(groups, has_gradient, failure.error)
        inner.pull_options(groups)
        inner.end_step()
        return loss

    def _start_sending(self, number: int, segment: _UpdateSegment, has_gradient: Sequence[bool]) -> None:
        engine = self._engine
        # Which buckets are sent may depend on the gradients only if the ranks have compared them.
        sends_all = engine.inner.updates_without_gradient or self._confirms_later
        changed = [engine.params[index] for index in segment.params if sends_all or has_gradient[index]]
        with profile_range("onecopy.share"):
            works = segment.sharing.start_in_place(None if sends_all else has_gradient)
            self._transfers[number] = _Transfers(
                works, segment.devices, changed, engine.inner.master_weights.increment_versions
            )

    def _finish_step(self, groups: Sequence[Group], has_gradient: Sequence[bool], failure: Exception | None) -> None:
        """Vote on the update and wait for all transfers, or leave both for later."""
        engine, status = self._engine, self._engine.status
        compared_later = engine.facts(groups, has_gradient) if self._confirms_later else None
        try:
            with profile_range("onecopy.confirm"):
                status.exchange(compared_later, failure, guard=engine.guard, at_once=not self._defers_vote)
            if failure is not None:
                status.queue.clear()
                raise failure
        except Exception:
            self.wait()
            raise
        if not self._overlap:
            self.wait()
            self._transfers.clear()

    def __del__(self) -> None:
        """Wait for the messages that use this memory, before it is freed."""
        with contextlib.suppress(Exception):  # another rank has ended
            self._end_transfers(list(self._transfers))

    def wait(self) -> None:
        """Wait for all transfers; on an accelerator, make the current stream wait."""
        self._end_transfers(list(self._transfers))
        if not self._confirms_later:
            # The vote has arrived then, but the next forward pass reads it.
            self._engine.status.queue.wait()

    @property
    def in_flight(self) -> bool:
        """Whether there are parameters in flight for which no stream has waited."""
        return any(not transfers.waiting for transfers in self._transfers.values())

    def wait_for(self, params: Iterable[int]) -> None:
        """Wait for the segments that hold these parameters; on an accelerator, make the current stream wait."""
        if self._transfers:
            self._end_transfers(dict.fromkeys(self._segment_of.get(param, -1) for param in params))

    def _end_transfers(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            transfers = self._transfers.get(number)
            if transfers is not None:
                transfers.wait()
                if transfers.for_all_streams:
                    del self._transfers[number]

    def _plan_segments(self) -> None:
        """Divide the buckets into segments, again if the parameters have moved."""
        engine, storage = self._engine, self._engine.storage
        if storage is self._storage:
            return
        assert isinstance(storage, ParameterBuckets)
        sizes = [each.memory.numel() * each.memory.element_size() for each in storage.buckets]
        buckets_of_segment: list[Sequence[int]] = [range(len(sizes))[::-1]]
        # An unknown class may change parameters that have no gradient, so it steps once only.
        if sizes and not engine.inner.updates_without_gradient:
            device = storage.buckets[0].memory.device
            buckets_of_segment = divide_into_segments(sizes, partial(engine.collectives.segment_bytes, device))
        segments = []
        for numbers in buckets_of_segment:
            buckets = [storage.buckets[number] for number in numbers]
            params = frozenset(index for bucket in buckets for index in bucket.params)
            owned = tuple(entry for entry in engine.inner.owned if entry.shard.param in params)
            devices = tuple(dict.fromkeys(bucket.memory.device for bucket in buckets))
            segments.append(_UpdateSegment(params, owned, Sharing(engine.collectives, buckets=buckets), devices))
        # Assigned last, so that planning is repeated after a failure.
        self._storage, self._segments = storage, segments
        self._segment_of = {param: number for number, each in enumerate(self._segments) for param in each.params}


def divide_into_segments(sizes: Sequence[int], full: Callable[[int, int], int]) -> list[Sequence[int]]:
    """The buckets of each segment, by their sizes in bytes. A forward pass reads the last buckets first.

    ``full`` returns the size from which a segment is full, by the bytes of the segments before it, and of all.
    """
    segments: list[list[int]] = [[]]
    size = size_before = 0
    for number in reversed(range(len(sizes))):
        if segments[-1] and size >= full(size_before, sum(sizes)):
            segments.append([])
            size_before += size
            size = 0
        segments[-1].append(number)
        size += sizes[number]
    return [*segments]
