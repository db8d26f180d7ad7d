"""Communication in flight, and the errors of a backend that has lost a rank."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from onecopy.errors import OnecopyError, PeerFailedError


class Work(Protocol):
    """Communication in flight, as torch's process groups return it."""

    def wait(self) -> object:
        """Wait until it is done. On an accelerator, make the current stream wait."""


@dataclass(frozen=True, slots=True)
class WorkAfter:
    """Work, and another one that starts when it has been waited for."""

    work: Work
    start: Callable[[], Work]

    def wait(self) -> object:
        """Wait for both."""
        self.work.wait()
        return self.start().wait()


@dataclass(frozen=True, slots=True)
class WorkGroup:
    """Several works that are waited for together."""

    works: tuple[Work, ...]

    def wait(self) -> object:
        """Wait for all of them."""
        for work in self.works:
            work.wait()
        return None


@dataclass(frozen=True, slots=True)
class ExplainedWork:
    """Work that a later call waits for. A backend's error then names the call that has started it, and this rank."""

    work: Work
    call: str
    group_rank: int

    def wait(self) -> object:
        """Wait for the work."""
        with ExplainedErrors(self.call, self.group_rank):
            return self.work.wait()


def run_all(starts: Sequence[Callable[[], Work]]) -> list[BaseException]:
    """Start all works and wait for all of them, also if some fail; return the exceptions.

    Other ranks count on every message: none may be left out, and none may be left behind for a later receive.
    """
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:  # also of a signal's handler
            errors.append(error)

    for work in [attempt(start) for start in starts]:
        if work is not None:
            attempt(work.wait)
    return errors


class InFlight:
    """Messages in flight, waited for in the order they were started.

    Few of them use extra memory at one time.
    """

    def __init__(self) -> None:
        # An entry refers to its memory, so that it lives until the message has been waited for.
        self._entries: deque[tuple[Work, Tensor | None, Callable[[], None] | None, bool]] = deque()
        self._staged = 0

    def add(
        self,
        work: Work,
        memory: Tensor | None = None,
        then: Callable[[], None] | None = None,
        staged: bool = False,
    ) -> None:
        """Add a message in flight.

        Args:
            work: the message.
            memory: memory that must live until the message has ended.
            then: a function that is called when the message has ended.
            staged: whether the memory is extra memory.
        """
        self._entries.append((work, memory, then, staged))
        self._staged += staged

    def leave(self, most_staged: int) -> None:
        """Wait for the oldest messages until no more than ``most_staged`` use extra memory."""
        while self._staged > most_staged:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait for all messages."""
        while self._entries:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _, then, staged = self._entries.popleft()
        work.wait()
        if then is not None:
            then()
        self._staged -= staged


_TEXT = re.compile(
    r"/gloo/|^Gloo |pair closure|[Cc]onnection (closed|reset|refused)( by peer|$)|Timed out waiting \d+ms|NCCL",
    re.DOTALL,
)
"""Texts of gloo and NCCL; an error of the user may speak of a timeout, too."""


def is_backend_error(error: BaseException) -> bool:
    """Whether an exception, or its cause, comes from a process group that has lost a rank."""
    if isinstance(error, PeerFailedError) and error.__cause__ is not None:
        return is_backend_error(error.__cause__)
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_TEXT.search(str(error))))


class ExplainedErrors:
    """A ``with`` block that turns a backend's error, such as the timeout, into one that names a call of all ranks.

    All other exceptions pass. It is a class because it is used in every step: a generator would take longer.

    Args:
        call: the name of the call.
        group_rank: this rank.
    """

    __slots__ = ("_call", "_group_rank")

    def __init__(self, call: str, group_rank: int) -> None:
        self._call, self._group_rank = call, group_rank

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, OnecopyError) or not is_backend_error(error):
            return
        raise PeerFailedError(
            f"rank {self._group_rank}: {self._call} has waited for the other ranks in vain. Either one of them does "
            "not make this call, which all ranks must make (not inside `if rank == 0:`), or its process has died: look "
            f"at the logs of the other ranks, and start all processes again from a checkpoint. {error}"
        ) from error
