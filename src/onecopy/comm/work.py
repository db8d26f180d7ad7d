"""Handles of communication that is in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from onecopy.comm.backend_errors import ExplainedErrors


class Work(Protocol):
    """Communication in flight, as torch's process groups return it."""

    def wait(self) -> object:
        """Wait until it is done. On an accelerator, make the current stream wait."""


@dataclass(frozen=True, slots=True)
class WorkWithBuffer:
    """Work and the buffer that it reads: the buffer must not be freed before the work has ended."""

    work: Work
    buffer: Tensor

    def wait(self) -> object:
        """Wait for the work."""
        return self.work.wait()


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
