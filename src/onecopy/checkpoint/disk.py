"""Every change to the file system goes through here, so that tests can let each of them fail or be the last."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

logger = logging.getLogger(__name__)

EARLY_BYTES = 64 << 20
"""How much is written before the disk is told to begin with it."""


def make_directory(path: Path) -> None:
    """Make a directory and those above it."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> int:
    """Open a new file for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write(descriptor: int, content: memoryview | bytes) -> None:
    """Write all of it."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def flush(descriptor: int) -> None:
    """Return when everything written is on the disk."""
    os.fsync(descriptor)


class EarlyFlush:
    """Flushes what has been written so far in a thread of its own, so that the disk is busy while more is prepared.

    As a context: its end waits for that thread. What goes wrong there is raised here, at the next write or at the end;
    the system tells of a failed flush only once.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(1)
        self._written = 0
        self._running: Future[None] | None = None

    def __enter__(self) -> EarlyFlush:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def wrote(self, nbytes: int) -> None:
        """Note that more has been written."""
        self._written += nbytes
        if self._written < EARLY_BYTES or (self._running is not None and not self._running.done()):
            return
        if self._running is not None:
            self._running.result()
        try:
            self._running = self._thread.submit(flush, self._descriptor)
        except RuntimeError:  # the interpreter is ending and starts no threads any more: the last flush does it all
            return
        self._written = 0


def flush_directory(path: Path) -> None:
    """Return when the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a directory its final name; the step at which a checkpoint begins to exist."""
    old.rename(new)


def remove(path: Path) -> None:
    """Remove a directory with all that is in it."""
    shutil.rmtree(path)


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill memory from a place of an open file; return how many bytes there were."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold a lock on a directory, which ends with the process at the latest."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems lock no directories
            logger.warning("%s cannot be locked, so what a save that dies leaves will not be removed: %s", path, error)
        yield
    finally:
        os.close(descriptor)


def is_claimed(path: Path) -> bool:
    """Whether a living process holds the lock on a directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return True  # it has just been renamed or removed by whoever holds it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or on a file system that cannot tell
        return True
    finally:
        os.close(descriptor)
    return False
