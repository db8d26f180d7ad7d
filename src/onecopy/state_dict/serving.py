"""Gathers the optimizer state on one rank without a call on the others, whose background services answer.

The rank that calls ``state_dict()`` asks the other ranks one after the other. A rank that answers sends to the rank
that it answers, which receives at that time, and so never waits for another rank that asks.

1. The request names the optimizer and the step of the caller.
2. If the other rank is inside that step, it waits for its end. It lets no further step begin. If it is at another step,
   it answers with an error. Otherwise it describes its state, as for ``consolidate_state_dict()``.
3. The two ranks connect. The caller receives the description, allocates the full tensors, and receives their values.
4. When all ranks have answered, the caller checks that the owners of a cut parameter agree.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from onecopy.comm import background_service
from onecopy.comm.background_service import BARRIER_HINT, Answering, BackgroundService
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

SECONDS_AFTER_DELETION = 60.0
"""How long the state of a deleted optimizer can still be read."""

Description = tuple[bytes, list[torch.Tensor], list[list[str]]]
"""The header of ``describe_owned()``, its tensors, and the facts about state under keys that are not parameters."""

_numbers = itertools.count()


class ServedState:
    """The state that this rank owns of one optimizer, as other ranks ask for it.

    Attributes:
        clock: counts the changes of the state.
        group_rank: this rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._last: Description | None = None
        self.clock = engine.inner.clock
        self.group_rank = engine.collectives.group_rank

    def describe(self) -> Description:
        """Return the state of the present, which the caller lets no step change."""
        if self._last is not None:
            return self._last
        assert self._engine is not None
        others = [[fact.subject, fact.value] for fact in other_facts(self._engine.inner)]
        return *describe_owned(self._engine.layout, self._engine.inner), others

    def freeze(self) -> None:
        """Keep the state alone: parameters, gradients and the process group are freed with the optimizer."""
        self._last, self._engine = self.describe(), None


class _Deleted:
    """Keeps the state of deleted optimizers for a while, or until another optimizer is constructed.

    Rank 0 often saves when ``main()`` has returned on the other ranks.
    """

    def __init__(self) -> None:
        self._states: list[ServedState] = []
        self._timer: threading.Timer | None = None

    def keep(self, state: ServedState) -> None:
        """Keep a state, and all others for as long."""
        if self._timer is not None:
            self._timer.cancel()
        self._states.append(state)
        self._timer = threading.Timer(SECONDS_AFTER_DELETION, self.release)
        self._timer.daemon = True
        self._timer.start()

    def release(self) -> None:
        """Free the states that are kept."""
        timer, self._states, self._timer = self._timer, [], None
        if timer is not None:
            timer.cancel()


_deleted = _Deleted()


class StateDictServer:
    """Serves the state of one optimizer to the other ranks, and gathers it from them.

    All ranks construct it together.

    Args:
        engine: the engine of the optimizer.
        enabled: whether this rank serves and gathers at all.
    """

    def __init__(self, engine: Engine, enabled: bool) -> None:
        self._engine = engine
        self._served = ServedState(engine)
        self._group_rank = engine.collectives.group_rank
        self._refusal = "" if enabled else "serve_state_dict=False"
        self._service: BackgroundService | None = None
        self._inboxes: list[int] = []
        self._key = ""
        if enabled and engine.collectives.world_size > 1 and not self._is_on_accelerator():
            self._start()

    def _start(self) -> None:
        inbox = 0
        _deleted.release()
        try:
            self._service = BackgroundService.of_process()
            inbox = self._service.inbox
        except RuntimeError as error:
            self._refusal = f"the process group's store cannot be used by a second thread ({error})"
        rows = self._engine.collectives.all_gather_flags([inbox, next(_numbers)], "constructing the optimizer")
        self._inboxes = [row[0] for row in rows]
        self._key = f"{rows[0][0]}/{rows[0][1]}"
        if self._service is not None:
            self._service.subjects[self._key] = self._served

    def __del__(self) -> None:
        """Keep the state for a while, unless this process is ending."""
        inner = self._engine.inner
        if self._service is not None and self._service.is_running and (inner.has_state or inner.uses_master_weights):
            with contextlib.suppress(TypeError):  # state that cannot be gathered
                self._served.freeze()
                self._service.subjects[self._key] = self._served  # again: a collected cycle has cleared weak references
                _deleted.keep(self._served)

    def _is_on_accelerator(self) -> bool:
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
        self._check_served()
        engine = self._engine
        count = engine.inner.clock.count if count is None else count
        full_state = FullState(engine.layout)
        try:
            with engine.inner.clock.hold(count, 0.0):
                header, tensors = describe_owned(engine.layout, engine.inner)
                targets = self._allocate(full_state, header, self._group_rank)
                if targets:
                    torch._foreach_copy_(targets, byte_views(tensors))
        except OtherStepError as error:
            raise RuntimeError(
                f"rank {self._group_rank}: state_dict() was called for the state after step {count}, but this rank "
                f"{error}: read, copy or save the state dict before the next step() or load"
            ) from None
        timeout = timeout_of(engine.collectives.process_group, engine.collectives.host_device)
        for source in range(engine.collectives.world_size):
            if source != self._group_rank:
                self._receive(full_state, source, count, timeout)
        return as_consolidated(engine, full_state.checked())

    def pending(self, form: dict[str, Any], groups: Sequence[Group], may_be_refused: bool) -> dict[str, Any]:
        """Return a state dict whose state is gathered when it is first read.

        Args:
            form: the state dict without state.
            groups: the parameter groups from which it was made.
            may_be_refused: if the state is not served, raise when it is read, not now. Another rank has it then, and
                frameworks that save on that rank call ``state_dict()`` on this one too.
        """
        if not may_be_refused:
            self._check_served()
        count = self._engine.inner.clock.count
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
        if self._engine.inner.uses_master_weights:
            form[STATE_DICT_KEY] = PendingState(lambda: gathered().masters)
        return form

    def _check_served(self) -> None:
        """Raise ``RuntimeError`` if the state is not served on this or another rank."""
        refusal = self._refusal
        if not refusal and self._is_on_accelerator():
            refusal = "the parameters are on an accelerator, which other ranks cannot read while it computes"
        if not refusal and not all(self._inboxes):
            refusal = f"rank {self._inboxes.index(0)} could not start its background service"
        if refusal:
            raise RuntimeError(
                f"rank {self._group_rank} does not have the whole optimizer state, or no longer the current one, and "
                f"cannot ask the other ranks for it: {refusal}. {self._advice()}"
            )

    def _advice(self) -> str:
        return (
            f"Instead, call consolidate_state_dict(to={self._group_rank}) on all ranks and then state_dict() on that "
            "rank, or save with onecopy.checkpoint.save, which gathers nothing (with torch.distributed.checkpoint: "
            "onecopy.checkpoint.get_optimizer_state_dict)"
        )

    def _receive(self, full_state: FullState, source: int, count: int, timeout: timedelta) -> None:
        """Ask one rank for its state, and write it into the full state."""
        assert self._service is not None
        request = {"kind": KIND, "subject": self._key, "step": count, "from": self._group_rank}
        try:
            asking = self._service.ask(self._inboxes[source], request, timeout)
            answer = asking.answer()
            if "steps" in answer:
                raise RanksDisagreeError(f"rank {self._group_rank}: {answer['steps']}. {self._advice()}")
            if "error" in answer:
                raise PeerFailedError(answer["error"])
            # The other rank lets no step begin until this one has connected, and received everything or closed.
            with contextlib.closing(asking.link()) as link:
                self._check_other_state(answer["others"], source)
                header = torch.empty(answer["header"], dtype=torch.uint8)
                link.receive(header).wait()
                targets = self._allocate(full_state, to_bytes(header), source)
                receive_ranges(targets, link.receive, CPU)
        except RuntimeError as error:
            if isinstance(error, OnecopyError) and not isinstance(error, PeerFailedError):
                raise
            reason = error if isinstance(error, PeerFailedError) else f"has broken the connection: {error}"
            raise PeerFailedError(
                f"rank {self._group_rank}: state_dict() gets no state from rank {source}, which {reason}. "
                f"{self._advice()}"
            ) from error

    def _check_other_state(self, others: list[list[str]], source: int) -> None:
        """Raise if another rank has other state than this one under keys that are not parameters."""
        mine = [[fact.subject, fact.value] for fact in other_facts(self._engine.inner)]
        for own, other in itertools.zip_longest(mine, others):
            if own != other:
                raise RanksDisagreeError(
                    f"rank {self._group_rank}: the ranks disagree in state_dict(). First difference: rank "
                    f"{self._group_rank}: {own or 'nothing more'}; rank {source}: {other or 'nothing more'}"
                )

    def _allocate(self, full_state: FullState, header: bytes, source: int) -> list[torch.Tensor]:
        try:
            return full_state.allocate(header, source)
        except (RuntimeError, MemoryError) as error:
            raise OnecopyError(
                f"rank {self._group_rank} has no memory for the whole optimizer state: {error}. Save with "
                "onecopy.checkpoint.save, which gathers nothing"
            ) from error


def _answer(answering: Answering) -> None:
    """Answer another rank's request for the state that this rank owns; runs on the background service's thread."""
    request = answering.request
    served: ServedState | None = answering.subject
    if served is None:
        reason = "no longer has this optimizer: it was deleted, or the function that made it has returned"
        answering.answer({"error": f"{reason}; {BARRIER_HINT}"})
        return
    try:
        with served.clock.hold(request["step"], request["seconds"]):
            header, tensors, others = served.describe()
            answering.answer({"header": len(header), "others": others})
            with contextlib.closing(answering.link()) as link:
                link.send(torch.frombuffer(bytearray(header), dtype=torch.uint8)).wait()
                send_ranges(byte_views(tensors), link.send, CPU)
    except OtherStepError as error:
        answering.answer(
            {
                "steps": f"rank {request['from']} asks for the state after step {request['step']}, but rank "
                f"{served.group_rank} {error} (steps, loads and added groups count)"
            }
        )


background_service.handlers[KIND] = _answer
