"""Ends work that can never be done, after ranks have failed in the middle of collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.accelerator import device
from tests.accelerator.process_group import Communicator

_abandoned: list[Any] = []
"""Process groups with collectives that other ranks never joined: their destructors would wait for them."""


@contextlib.contextmanager
def abandoning_on_failure() -> Iterator[None]:
    """After an exception inside, forget all queued work of the device, as the end of a process does."""
    used: dict[int, Communicator] = {}

    def note(communicator: Communicator, *_: Any) -> None:
        used[id(communicator)] = communicator

    Communicator.observers.append(note)
    try:
        yield
    except BaseException:
        _abandoned.extend(used.values())
        _forget_work()
        raise
    finally:
        Communicator.observers.remove(note)


def _forget_work() -> None:
    scheduler = device.load().scheduler
    with scheduler.lock:
        scheduler._read_log()
        for stream, queue in scheduler._queues.items():
            _abandoned.extend(queue)
            scheduler._done[stream] += len(queue)
            queue.clear()
        for signals in scheduler._unsignalled.values():
            for _, event, version in signals:
                scheduler.core.event_done(event, version)
            signals.clear()
        scheduler.errors.clear()
