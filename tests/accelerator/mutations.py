"""Mistakes that only an accelerator shows: a wait, a join or an event is missing, or memory is reused too early.

Each one replaces a function of onecopy in the worker processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from onecopy.comm import limits, reduce_scatter
from onecopy.comm.buffers import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import DeferredFlags, DeferredRead
from onecopy.comm.streams import SideStream, UsedStreams
from onecopy.comm.work import InFlight
from onecopy.data_parallel import step as level_3_step
from onecopy.data_parallel.step import PipelinedStep
from onecopy.ddp_hooks.overlap import OverlappedStep
from onecopy.step import batched_copies, gradients
from tests.accelerator import device

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A mistake."""

    case: str  # the name of the training program that shows it
    apply: Callable[[Patch], None]
    is_on_host: bool = False  # whether the host reads too early, which shows only if it is far ahead of the device


class NoWait:
    """A collective for which nobody waits."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> Any:
        """Do not wait; return the result of a future."""
        return self.work.value() if isinstance(self.work, Future) else None


def _replaced(value: Any, *places: Any) -> Callable[[Patch], None]:
    """Something else in some places, each an object and a name."""

    def apply(patch: Patch) -> None:
        for place, name in places:
            patch.setattr(place, name, value)

    return apply


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _without_wait(name: str) -> Callable[[Patch], None]:
    """No stream waits for the collectives of one method of ``Collectives``."""
    original = getattr(Collectives, name)
    return _replaced(lambda *args, **kwargs: NoWait(original(*args, **kwargs)), (Collectives, name))


@contextlib.contextmanager
def _on_stream_without_wait(_self: Any, stream: torch.Stream) -> Iterator[None]:
    with stream:
        yield


def _unpack_before_waiting(self: Any) -> None:
    work, then, staged = self._entries.popleft()
    if then is not None:
        then()
    work.wait()
    self._staged -= staged


def _pool_gives_memory_in_use(patch: Patch) -> None:
    take = BufferPool.take

    def take_and_give_back(self: BufferPool, *args: Any) -> Tensor:
        buffer = take(self, *args)
        self.give_back(buffer)
        return buffer

    patch.setattr(BufferPool, "take", take_and_give_back)


def _one_pack_buffer(patch: Patch) -> None:
    _pool_gives_memory_in_use(patch)
    patch.setattr(limits, "ROUNDS_IN_FLIGHT", 3)


def _reporting_bad_flags(patch: Patch) -> None:
    """Flags that tell of a failure become a report: an exception on one rank only would leave the others waiting."""

    def check_oldest(self: DeferredFlags) -> None:
        read, check = self._unread.popleft()
        try:
            check(read.read())
        except Exception as error:
            device.load().scheduler.races.report("flags", str(error))

    patch.setattr(DeferredFlags, "_check_oldest", check_oldest)


def _flags_read_too_early(patch: Patch) -> None:
    _reporting_bad_flags(patch)
    patch.setattr(DeferredRead, "wait", _nothing)


def _flags_copied_too_early(patch: Patch) -> None:
    _reporting_bad_flags(patch)
    original = DeferredRead.__init__
    patch.setattr(
        DeferredRead, "__init__", lambda self, tensor, work=None: original(self, tensor, work and NoWait(work))
    )


def _update_before_gradients(patch: Patch) -> None:
    plan = OverlappedStep._plan_update

    def without_wait(self: Any, bucket: Any, reduced: Future[Any], *rest: Any) -> Any:
        without: Any = NoWait(reduced)
        return dataclasses.replace(plan(self, bucket, reduced, *rest), reduced=without)

    patch.setattr(OverlappedStep, "_plan_update", without_wait)


def _sum_read_too_early(patch: Patch) -> None:
    wait = reduce_scatter.Reduction.wait

    def without_wait(self: Any) -> Any:
        self._work = NoWait(self._work)
        return wait(self)

    patch.setattr(reduce_scatter.Reduction, "wait", without_wait)


_HOST_COPIES = (batched_copies, "wait_for_host_copies"), (gradients, "wait_for_host_copies")
MUTATIONS = {
    "level 1 does not wait for all-gathers": Mutation("level 1", _without_wait("all_gather")),
    "level 1 does not wait for uneven all-gathers": Mutation("level 1 Muon", _without_wait("all_gather")),
    "level 1 unpacks before it waits": Mutation(
        "level 1", _replaced(_unpack_before_waiting, (InFlight, "_finish_oldest"))
    ),
    "level 1 packs into a buffer in flight": Mutation("level 1", _one_pack_buffer),
    "level 1 copies flags before they are exchanged": Mutation("level 1", _flags_copied_too_early),
    "level 1 reads flags before they have arrived": Mutation("level 1", _flags_read_too_early, is_on_host=True),
    "level 1 reads offloaded gradients too early": Mutation("level 1 offload", _replaced(_nothing, *_HOST_COPIES)),
    "the norm is read before it is summed": Mutation("level 1 clipped", _without_wait("all_reduce")),
    "level 2 does not wait for reduce-scatters": Mutation("level 2", _without_wait("reduce_scatter")),
    "level 2 reuses a buffer in flight": Mutation("level 2", _pool_gives_memory_in_use),
    "level 2 packs on a side stream that does not wait": Mutation(
        "level 2", _replaced(_on_stream_without_wait, (SideStream, "_on_stream"))
    ),
    "the update in backward does not wait for gradients": Mutation("interleaved", _update_before_gradients),
    "backward does not wait for the update": Mutation(
        "interleaved", _replaced(lambda _self: Future(), (SideStream, "future"))
    ),
    "level 3 reads a sum too early": Mutation("level 3", _sum_read_too_early),
    "level 3 reuses a buffer in flight": Mutation("level 3", _pool_gives_memory_in_use),
    "the next forward does not wait": Mutation("level 3 overlap", _replaced(_nothing, (PipelinedStep, "wait_for"))),
    "packing does not wait for other streams": Mutation(
        "level 3 unfrozen two streams", _replaced(_nothing, (UsedStreams, "join"))
    ),
    "other streams do not wait for packing": Mutation(
        "level 3 unfrozen", _replaced(_nothing, (UsedStreams, "release"))
    ),
    "only the first stream waits": Mutation(
        "level 3 two streams", _replaced(True, (level_3_step._Transfers, "for_all_streams"))
    ),
}
