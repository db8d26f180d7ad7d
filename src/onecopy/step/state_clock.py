"""Counts the changes of an optimizer's state, so that another thread can read the state of one step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

SECONDS_BEHIND = 10.0
"""How long a reader waits for a rank that is behind and not inside a step: it may need the reader's rank to go on."""


class OtherStepError(Exception):
    """The state is that of another step than the reader wants."""


class StateClock:
    """Counts changes of the state: steps, loads and added groups, which all ranks make together.

    A change is everything between :meth:`begin` and :meth:`end`. The thread that changes the state takes an
    uncontended lock at both, and a reader has this lock while it reads.

    Attributes:
        count: the number of changes that have ended. It is equal on all ranks that have made the same calls.
        is_changing: whether a change has begun and not ended.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_changing = False
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)

    def begin(self) -> None:
        """Begin a change, unless one has begun already; wait for a reader to end first."""
        if not self.is_changing:
            with self._lock:
                self.is_changing = True

    def end(self) -> None:
        """End a change and count it, also one that has failed before it began."""
        with self._lock:
            self.count += 1
            self.is_changing = False
            self._ended.notify_all()

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """Run a block as one change."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @contextlib.contextmanager
    def edit(self) -> Iterator[None]:
        """Run a block that changes the state of this rank alone, which is not counted."""
        with self._lock:
            yield

    @contextlib.contextmanager
    def hold(self, count: int, seconds: float) -> Iterator[None]:
        """Run a block that reads the state after change ``count``; no change begins meanwhile.

        A rank that is inside an earlier change can end it without the reader, so it is waited for.

        Args:
            count: the wanted number of changes.
            seconds: how long a change that is going on may take.

        Raises:
            OtherStepError: if the state is that of another step; its text continues a sentence about this rank.
        """
        with self._lock:
            self._wait_until(count, seconds)
            yield

    def _wait_until(self, count: int, seconds: float) -> None:
        begun = time.monotonic()
        while self.count < count:
            limit = seconds if self.is_changing else min(seconds, SECONDS_BEHIND)
            remaining = begun + limit - time.monotonic()
            if remaining <= 0:
                break
            self._ended.wait(min(remaining, SECONDS_BEHIND))
        if self.count != count:
            raise OtherStepError(f"is {'inside' if self.is_changing else 'at'} step {self._current}")
        if self.is_changing:
            raise OtherStepError(f"is inside step {self._current} already")

    @property
    def _current(self) -> int:
        return self.count + self.is_changing
