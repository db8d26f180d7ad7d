"""Counts the changes of an optimizer's state, so that another thread can read the state of one step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


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

        A rank that is inside an earlier change ends it without the reader: no rank ends a change before all ranks
        have begun it. So it is waited for.

        Args:
            count: the wanted number of changes.
            seconds: how long a change that is going on may take.

        Raises:
            OtherStepError: if the state is that of another step; its text continues a sentence about this rank.
        """
        with self._lock:
            self._ended.wait_for(lambda: self.count >= count or not self.is_changing, seconds)
            if self.is_changing:
                raise OtherStepError(f"is inside step {self.count + 1}")
            if self.count != count:
                raise OtherStepError(f"is at step {self.count}")
            yield
