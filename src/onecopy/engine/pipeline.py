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

from onecopy.engine.agreement import raise_together
from onecopy.engine.arena import Arena
from onecopy.engine.collectives import Collectives, Work
from onecopy.engine.core import Engine
from onecopy.engine.inputs import Group
from onecopy.engine.marks import mark
from onecopy.engine.options import OptionsSnapshot
from onecopy.engine.owned import Owned
from onecopy.engine.sharing import Sharing
from onecopy.engine.stream import InFlight
from onecopy.engine.words import LateWord, word_on
from onecopy.errors import PeerFailedError
from onecopy.layout import BucketPlan

SEGMENT_BYTES = 8 << 20
"""Buckets are updated and sent together until they have this size, or that of all before: the first ones, for which
the next forward pass waits, go alone."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Some buckets that are updated together: their parameters, what this rank owns of them, and how they are sent."""

    params: frozenset[int]
    owned: tuple[Owned, ...]
    sharing: Sharing


class Pipeline:
    """Steps one engine, whose storage is an :class:`~onecopy.engine.arena.Arena`."""

    def __init__(
        self, engine: Engine, plans: Sequence[BucketPlan], overlap: bool, alone: bool, replicas: Collectives | None
    ) -> None:
        self._engine = engine
        self._plans = list(plans)
        self._overlap = overlap
        # With another optimizer's step to come, ranks must know of a failure before it.
        self._defers_word = overlap and alone and replicas is None
        self._storage: object = None
        self._segments: list[_Segment] = []
        self._segment_of: dict[int, int] = {}  # by parameter
        self._flying: dict[int, tuple[InFlight, list[Tensor]]] = {}
        self._replicas = replicas
        self._unread: LateWord | None = None
        self._arriving: Work | None = None
        self._plan()

    def step(
        self, engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        """One step, as every driver does it."""
        self._hear_of_last_step()
        loss = None
        if callable(closure):
            with torch.enable_grad():
                loss = closure()
        local, gradients = engine.local, engine.gradients
        ranges: dict[int, Tensor] = {}
        failure: Exception | None = None
        self.wait()
        try:
            engine.follow_moves()
            self._plan()
            engine.check_groups(groups)
            local.push_options(groups)
            local.copies.take_over_writes()
            ranges = dict(gradients.lent() or {})
        except Exception as error:
            failure = error
        has_gradient = gradients.has_gradient()
        engine.confirm(groups, has_gradient, failure)
        options = OptionsSnapshot.of(local.inner.param_groups)
        for number, segment in enumerate(self._segments):
            try:
                if failure is None:
                    with mark("onecopy.update"):
                        options.restore(local.inner.param_groups)
                        local.step_part(segment.owned, ranges, kwargs)
            except Exception as error:
                failure = error
            self._send(number, segment, has_gradient)
        self._end(failure)
        local.pull_options(groups)
        return loss

    def _send(self, number: int, segment: _Segment, has_gradient: Sequence[bool]) -> None:
        engine = self._engine
        everything = engine.local.moves_all or engine.agrees_late
        changed = [engine.params[index] for index in segment.params if everything or has_gradient[index]]
        with mark("onecopy.share"):
            self._flying[number] = (segment.sharing.start(None if everything else has_gradient), changed)

    def _end(self, failure: Exception | None) -> None:
        """Tell all ranks whether one has failed; then wait, or leave that for later."""
        words = [collectives for collectives in (self._engine.collectives, self._replicas) if collectives is not None]
        mine = 0 if failure is None else 1 + words[0].group_rank
        word = word_on(words[0].control_device, [mine])
        if self._defers_word and not words[0].reads_late:
            # The word arrives behind the parameters, for which nobody waits here: it is read in the next forward pass.
            self._arriving, self._unread = words[0].all_reduce(word, largest=True), LateWord(word)
            if failure is not None:
                self.wait()
                raise failure
            return
        for collectives in words:
            collectives.all_reduce(word, largest=True).wait()
        if words[0].reads_late:
            if failure is not None:
                self.wait()
                raise failure
            self._unread = LateWord(word)
        elif word.item():
            self.wait()
            self._engine.forget_status()
            raise_together(words[0], "step()", failure)
        if not self._overlap:
            self.wait()

    def hear(self) -> None:
        """In a forward pass, before anything else is exchanged: raise if the last step has failed on a rank."""
        if self._arriving is not None:
            self._hear_of_last_step()

    def _hear_of_last_step(self) -> None:
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
        assert isinstance(storage, Arena)
        sets: list[list[int]] = [[]]
        size = before = 0
        for number in reversed(range(len(self._plans))):
            if sets[-1] and size >= min(SEGMENT_BYTES, before) and not engine.local.moves_all:
                sets.append([])
                before += size
                size = 0
            sets[-1].append(number)
            size += storage.buckets[number].numel() * storage.buckets[number].element_size()
        segments = []
        for numbers in sets:
            params = frozenset(index for number in numbers for index in self._plans[number].params)
            owned = tuple(entry for entry in engine.local.owned if entry.shard.param in params)
            pieces = [piece for number in numbers for piece in storage.pieces_of[number]]
            segments.append(_Segment(params, owned, Sharing(engine.collectives, pieces, storage.direct_bytes)))
        # Last, so that a plan which failed is made again.
        self._storage, self._segments = storage, segments
        self._segment_of = {param: number for number, each in enumerate(self._segments) for param in each.params}
