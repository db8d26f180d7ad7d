"""Messages that the package logs, on the rank that looks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """Collect the messages that onecopy logs at a level or above."""
    messages: list[str] = []
    logger, handler = logging.getLogger("onecopy"), logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
