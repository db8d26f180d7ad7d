"""Mistakes that only an accelerator shows: a wait, a join or an event is missing, or memory is reused too early.

Each one changes the text of functions of onecopy in the worker processes.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from types import CodeType
from typing import Any

import pytest

from onecopy.comm.buffers import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.reduce_scatter import Reduction
from onecopy.comm.sharing import Sharing
from onecopy.comm.status_flags import DeferredFlags, DeferredRead
from onecopy.comm.streams import SideStream, UsedStreams
from onecopy.comm.work import InFlight
from onecopy.data_parallel.step import PipelinedStep, _Transfers
from onecopy.ddp_hooks.overlap import OverlappedStep
from onecopy.step.batched_copies import wait_for_host_copies
from tests.accelerator import device


def changed(function: Any, old: str, new: str) -> CodeType:
    """Return the code of a function after a change of its text."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has not one {old!r}"
    compiled = compile(source.replace(old, new), inspect.getfile(function), "exec")
    return next(each for each in compiled.co_consts if isinstance(each, CodeType))


def reported(self: DeferredFlags) -> None:
    """As ``_check_oldest``, but a report: an exception on one rank only would leave the others waiting."""
    read, check = self._unread.popleft()
    try:
        check(read.read())
    except Exception as error:
        device.load().scheduler.races.report("flags", str(error))


@dataclass(frozen=True)
class Mutation:
    """A mistake: the training program that shows it, and changed functions, each with an old and a new text."""

    case: str
    changes: tuple[tuple[Any, str, str], ...]
    is_of_flags: bool = False
    is_on_host: bool = False  # whether the host reads too early, which shows only if it is far ahead of the device

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Make the mistake."""
        for function, old, new in self.changes:
            patch.setattr(inspect.unwrap(function), "__code__", changed(function, old, new))
        if self.is_of_flags:
            patch.setattr(DeferredFlags, "_check_oldest", reported)


def one(case: str, function: Any, old: str, new: str, **options: bool) -> Mutation:
    """A mistake in one function."""
    return Mutation(case, ((function, old, new),), **options)


NO_GATHER = Collectives.all_gather, "Started(works", "Started([]"
NO_SUM = Collectives.all_reduce, "Started([work]", "Started([]"
IN_USE = BufferPool.take, "self._in_use[flat.data_ptr()] = chosen", "self._free.append(chosen)"
TOO_MANY = Sharing._start_round, "limits.ROUNDS_IN_FLIGHT", "3"
WAIT_LATE = "    work.wait()\n    if then is not None:\n        then()\n"
UNPACK = "    if then is not None:\n        then()\n    work.wait()\n"
OTHER = "wait_for_stream(current_stream(self._device), stream)"
RELEASED = "wait_for_stream(stream, current_stream(self._device))"
FOR_ALL: Any = _Transfers.for_all_streams
MUTATIONS = {
    "level 1 does not wait for all-gathers": one("level 1", *NO_GATHER),
    "level 1 does not wait for uneven all-gathers": one("level 1 Muon", *NO_GATHER),
    "level 1 unpacks before it waits": one("level 1", InFlight._finish_oldest, WAIT_LATE, UNPACK),
    "level 1 packs into a buffer in flight": Mutation("level 1", (IN_USE, TOO_MANY)),
    "level 1 copies flags before they are exchanged": one(
        "level 1", DeferredRead.__init__, "            work.wait()", "            pass", is_of_flags=True
    ),
    "level 1 reads flags before they have arrived": one(
        "level 1", DeferredRead.wait, "if not self._event.query()", "if False", is_of_flags=True, is_on_host=True
    ),
    "level 1 reads offloaded gradients too early": one(
        "level 1 offload", wait_for_host_copies, "event.synchronize()", "pass"
    ),
    "the norm is read before it is summed": one("level 1 clipped", *NO_SUM),
    "level 2 does not wait for reduce-scatters": one(
        "level 2", Collectives.reduce_scatter, "Started(works", "Started([]"
    ),
    "level 2 reuses a buffer in flight": one("level 2", *IN_USE),
    "level 2 packs on a side stream that does not wait": one(
        "level 2", SideStream._on_stream, "stream.wait_stream(", "("
    ),
    "the update in backward does not wait for gradients": one(
        "interleaved", OverlappedStep._reduced_gradients, "update.reduced.wait()", "update.reduced.value()"
    ),
    "backward does not wait for the update": one("interleaved", SideStream.future, "devices=[self._device]", ""),
    "level 3 reads a sum too early": one("level 3", Reduction.wait, "self._work.wait()", "pass"),
    "level 3 reuses a buffer in flight": one("level 3", *IN_USE),
    "the next forward does not wait": one("level 3 overlap", PipelinedStep.wait_for, "if self._transfers", "if False"),
    "packing does not wait for other streams": one("level 3 unfrozen two streams", UsedStreams.join, OTHER, "pass"),
    "other streams do not wait for packing": one("level 3 unfrozen", UsedStreams.release, RELEASED, "pass"),
    "only the first stream waits": one("level 3 two streams", FOR_ALL.fget, "return all(", "return True or all("),
}
