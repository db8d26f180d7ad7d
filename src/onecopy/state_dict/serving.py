"""Gathers the optimizer state on one rank without a call on the others, whose background services answer.

The rank that calls ``state_dict()`` asks the other ranks one after the other, in the order of their numbers. So ranks
that ask at the same time cannot block each other: a rank that answers one of them makes the others wait, but not the
rank that it answers.

1. The request names the optimizer and the step of the caller.
2. The other rank waits until it has made that step too, and lets no further step begin. If it has made another one
   already, it answers with an error. Otherwise it describes its state, as for ``consolidate_state_dict()``.
3. The two ranks connect. The caller receives the description, allocates the full tensors, and receives their values.
4. When all ranks have answered, the caller checks that the owners of a cut parameter agree.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from onecopy.comm import background_service
from onecopy.comm.background_service import Answering, BackgroundService, Link
from onecopy.comm.packing import receive_ranges, send_ranges
from onecopy.common.flat_views import to_bytes
from onecopy.common.torch_private import timeout_of
from onecopy.errors import OnecopyError, PeerFailedError, RanksDisagreeError
from onecopy.state_dict.gather import (
    Consolidated,
    FullState,
    as_consolidated,
    byte_views,
    describe_owned,
    other_facts,
)
from onecopy.state_dict.pending_state import PendingState
from onecopy.step.engine import Engine
from onecopy.step.master_weights import STATE_DICT_KEY
from onecopy.step.parameter_groups import Group
from onecopy.step.state_clock import OtherStepError

KIND = "state_dict"
CPU = torch.device("cpu")

INSTEAD = (
    "Call consolidate_state_dict(to={group_rank}) on all ranks first, and state_dict() on that rank; or save with "
    "onecopy.checkpoint.save, which gathers nothing (with torch.distributed.checkpoint: "
    "onecopy.checkpoint.get_optimizer_state_dict)"
)

_engines: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()
"""The optimizers that this process serves, by a key that is equal on all ranks."""

_numbers = itertools.count()


class StateDictServer:
    """Serves the state of one optimizer to the other ranks, and gathers it from them.

    All ranks construct it together.

    Args:
        engine: the engine of the optimizer.
        enabled: whether this rank serves and gathers at all.
    """

    def __init__(self, engine: Engine, enabled: bool) -> None:
        self._engine = engine
        self._refusal = "" if enabled else "serve_state_dict=False"
        self._service: BackgroundService | None = None
        self._inboxes: list[int] = []
        self._key = ""
        if enabled and engine.collectives.world_size > 1:
            self._start()

    def _start(self) -> None:
        inbox, number = 0, next(_numbers)
        if self._on_accelerator():
            self._refusal = "its parameters are on an accelerator"
        else:
            try:
                self._service = BackgroundService.of_process()
                inbox = self._service.inbox
            except (RuntimeError, NotImplementedError) as error:
                self._refusal = f"the process group's store cannot be used by a second thread ({error})"
        rows = self._engine.collectives.all_gather_flags([inbox, number], "constructing the optimizer")
        self._inboxes = [row[0] for row in rows]
        self._key = f"{rows[0][0]}/{rows[0][1]}"
        if inbox:
            _engines[self._key] = self._engine

    def _on_accelerator(self) -> bool:
        # The host is ahead of the accelerator there, so the state in memory belongs to no step that the host knows.
        return any(param.device.type != "cpu" for param in self._engine.params)

    def gather(self, count: int | None = None) -> Consolidated:
        """Return the full state of all ranks after this rank's last step.

        Args:
            count: the number of changes of the state that are meant, if they are not the current ones.

        Raises:
            RuntimeError: if the state is not served here, or not that of this step any more.
            RanksDisagreeError: if another rank has made another number of steps.
            PeerFailedError: if another rank cannot answer.
        """
        engine = self._engine
        clock, group_rank = engine.inner.clock, engine.collectives.group_rank
        self._check_served()
        count = clock.count if count is None else count
        full_state = FullState(engine.layout)
        timeout = timeout_of(engine.collectives.process_group, engine.collectives.host_device)
        for source in range(engine.collectives.world_size):
            if source != group_rank:
                self._receive(full_state, source, count, timeout)
                continue
            try:
                with clock.hold(count, 0.0):
                    header, tensors = describe_owned(engine.layout, engine.inner)
                    targets = self._allocate(full_state, header, source)
                    if targets:
                        torch._foreach_copy_(targets, byte_views(tensors))
            except OtherStepError as error:
                raise RuntimeError(
                    f"rank {group_rank}: state_dict() was called for the state after step {count}, but this rank "
                    f"{error}: read, copy or save the state dict before the next step() or load"
                ) from None
        return as_consolidated(engine, full_state.checked())

    def pending(self, form: dict[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
        """Return a state dict whose state is gathered when it is first read.

        Args:
            form: the state dict without state.
            groups: the parameter groups from which it was made.
        """
        self._check_served()
        engine, count = self._engine, self._engine.inner.clock.count
        position_of = {
            id(param): position
            for group, packed in zip(groups, form["param_groups"], strict=True)
            for param, position in zip(group["params"], packed["params"], strict=True)
        }

        @functools.cache
        def gathered() -> Consolidated:
            return self.gather(count)

        def state() -> dict[Any, Any]:
            return {position_of.get(id(key), key): value for key, value in gathered().by_param.items()}

        form["state"] = PendingState(state)
        if engine.inner.uses_master_weights:
            form[STATE_DICT_KEY] = PendingState(lambda: gathered().masters)
        return form

    def _check_served(self) -> None:
        """Raise ``RuntimeError`` if the state is not served on this or another rank."""
        group_rank = self._engine.collectives.group_rank
        refusal = self._refusal
        if not refusal and self._on_accelerator():
            refusal = "its parameters are on an accelerator"
        if not refusal and not all(self._inboxes):
            refusal = f"rank {self._inboxes.index(0)} could not start its background service"
        if refusal:
            raise RuntimeError(
                f"rank {group_rank} does not have the whole optimizer state, or no longer the current one, and cannot "
                f"ask the other ranks for it: {refusal}. " + INSTEAD.format(group_rank=group_rank)
            )

    def _receive(self, full_state: FullState, source: int, count: int, timeout: timedelta) -> None:
        """Ask one rank for its state, and write it into the full state."""
        assert self._service is not None
        group_rank = self._engine.collectives.group_rank
        request = {"kind": KIND, "optimizer": self._key, "step": count, "from": group_rank}
        try:
            asking = self._service.ask(self._inboxes[source], request, timeout)
            answer = asking.answer()
            self._check_answer(answer, source)
            link = asking.link()
            header = torch.empty(answer["header"], dtype=torch.uint8)
            link.receive(header).wait()
        except RuntimeError as error:
            if isinstance(error, RanksDisagreeError):
                raise
            raise PeerFailedError(
                f"rank {group_rank}: state_dict() gets no state from rank {source}, which {error}. "
                + INSTEAD.format(group_rank=group_rank)
            ) from error
        targets = self._allocate(full_state, to_bytes(header), source)
        receive_ranges(targets, link.receive, CPU)

    def _check_answer(self, answer: dict[str, Any], source: int) -> None:
        group_rank = self._engine.collectives.group_rank
        if "steps" in answer:
            raise RanksDisagreeError(f"rank {group_rank}: {answer['steps']}. " + INSTEAD.format(group_rank=group_rank))
        if "error" in answer:
            raise PeerFailedError(f"answers: {answer['error']}")
        mine = [[fact.subject, fact.value] for fact in other_facts(self._engine.inner)]
        for own, other in itertools.zip_longest(mine, answer["others"]):
            if own != other:
                raise RanksDisagreeError(
                    f"rank {group_rank}: the ranks disagree in state_dict(). First difference: rank {group_rank}: "
                    f"{own or 'nothing more'}; rank {source}: {other or 'nothing more'}"
                )

    def _allocate(self, full_state: FullState, header: bytes, source: int) -> list[torch.Tensor]:
        try:
            return full_state.allocate(header, source)
        except (RuntimeError, MemoryError) as error:
            group_rank = self._engine.collectives.group_rank
            raise OnecopyError(
                f"rank {group_rank} has no memory for the whole optimizer state: {error}. Save with "
                "onecopy.checkpoint.save, which gathers nothing"
            ) from error


def _answer(answering: Answering) -> None:
    """Answer another rank's request for the state that this rank owns; runs on the background service's thread."""
    request = answering.request
    engine, caller = _engines.get(request["optimizer"]), request["from"]
    if engine is None:
        answering.answer({"error": "this optimizer no longer exists here, because it was deleted"})
        return
    group_rank = engine.collectives.group_rank
    try:
        with engine.inner.clock.hold(request["step"], request["seconds"]):
            header, tensors = describe_owned(engine.layout, engine.inner)
            others = [[fact.subject, fact.value] for fact in other_facts(engine.inner)]
            answering.answer({"header": len(header), "others": others})
            _send(answering.link(), header, tensors)
    except OtherStepError as error:
        answering.answer(
            {
                "steps": f"rank {caller} asks for the state after step {request['step']}, but rank {group_rank} "
                f"{error} (steps, loads and added groups count)"
            }
        )


def _send(link: Link, header: bytes, tensors: list[torch.Tensor]) -> None:
    start: Callable[[torch.Tensor], Any] = link.send
    start(torch.frombuffer(bytearray(header), dtype=torch.uint8)).wait()
    send_ranges(byte_views(tensors), start, CPU)


background_service.handlers[KIND] = _answer
