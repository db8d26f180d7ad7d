"""Communication in flight, and the errors of a backend that has lost a rank."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

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


class Started:
    """Works that are waited for together, and the memory that must live until then.

    A backend's error names the call that has started them, and this rank.
    """

    __slots__ = ("_call", "_group_rank", "_memory", "_works")

    def __init__(self, works: Sequence[Work], call: str, group_rank: int, *memory: Tensor) -> None:
        self._works, self._call, self._group_rank, self._memory = works, call, group_rank, memory

    def wait(self) -> None:
        """Wait for all of them."""
        with ExplainedErrors(self._call, self._group_rank):
            for work in self._works:
                work.wait()


class InFlight:
    """Messages in flight, waited for in the order they were started.

    Few of them use extra memory at one time.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[Work, Callable[[], None] | None, bool]] = deque()
        self._staged = 0

    def add(
        self,
        work: Work,
        then: Callable[[], None] | None = None,  # a function that is called when the message has ended
        staged: bool = False,  # whether it uses extra memory
    ) -> None:
        """Add a message in flight."""
        self._entries.append((work, then, staged))
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
        work, then, staged = self._entries.popleft()
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


@dataclass(slots=True)
class ExplainedErrors:
    """A ``with`` block that turns a backend's error, such as the timeout, into one that names a call of all ranks.

    All other exceptions pass. It is a class because it is used in every step: a generator would take longer.
    """

    _call: str
    _group_rank: int

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
