"""Every change to the file system is a function here, so that tests can make each of them fail."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

EARLY_BYTES = 64 << 20
"""Bytes that are written before an early flush starts."""

DAMAGE = {getattr(errno, name) for name in ("EIO", "EBADMSG", "EUCLEAN", "ESTALE", "ELOOP") if hasattr(errno, name)}
"""Errors of reads that a damaged disk, a removed file or a symbolic link in the place of a file causes."""


class OpenFile(NamedTuple):
    """A file that is open for reading, on a disk or elsewhere.

    Attributes:
        size: its size; None if that is unknown.
        read_into: reads from an offset into memory, and returns the number of bytes that were read.
    """

    size: int | None
    read_into: Callable[[memoryview, int], int]


def check_supported() -> None:
    """Raise ``OSError`` on a system whose directories cannot be locked and flushed."""
    if fcntl is None:
        raise OSError(
            "onecopy.checkpoint needs Linux or macOS: this system cannot lock and flush directories. Save "
            "consolidate_state_dict() + state_dict() with torch.save instead"
        )


def make_directory(path: Path) -> None:
    """Make a directory and its parents."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> int:
    """Open a new file for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def write(descriptor: int, content: memoryview | bytes) -> None:
    """Write all bytes."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def flush(descriptor: int) -> None:
    """Return when everything written is on the disk."""
    os.fsync(descriptor)


class EarlyFlush:
    """Flushes a file in a thread while more data is written to it.

    The end of the ``with`` block waits for the thread. An error of the thread is raised at the next write or at the end
    of the block, because the operating system reports a failed flush only once.
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
        """Count written bytes, and start a flush if they are enough and no flush is running."""
        self._written += nbytes
        if self._written < EARLY_BYTES or (self._running is not None and not self._running.done()):
            return
        if self._running is not None:
            self._running.result()
        try:
            self._running = self._thread.submit(flush, self._descriptor)
        except RuntimeError:  # the interpreter is ending and starts no more threads: the last flush does everything
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
    """Rename a directory; this is how a checkpoint begins to exist."""
    old.rename(new)


def remove(path: Path) -> None:
    """Remove a directory and everything in it."""
    shutil.rmtree(path)


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read from an offset of an open file into memory; return the number of bytes that were read."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def size_of(path: Path) -> int | None:
    """Return the size of a regular file; None for anything else, such as a symbolic link, a FIFO or a device."""
    found = os.lstat(path)
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def open_to_read(path: Path) -> int:
    """Open a file for reading, without following a symbolic link and without waiting for a FIFO."""
    check_supported()
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True, without_locks: bool = True) -> Iterator[bool]:
    """Lock a directory during the block; the lock also ends with the process.

    Args:
        path: the directory.
        wait: whether to wait for another process that has locked it.
        without_locks: the result on file systems that lock no directories.

    Yields:
        Whether this process has the lock and ``path`` is still the directory that it has locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if wait and not isinstance(error, FileNotFoundError):
            raise
        descriptor = None  # removed by another process, or not a directory, or not ours
    if descriptor is None:
        yield False
        return
    try:
        yield _lock(descriptor, path, wait, without_locks) and _is_same(descriptor, path)
    finally:
        _unlock(descriptor, path)


def _lock(descriptor: int, path: Path, wait: bool, without_locks: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems lock no directories
        if wait:
            logger.warning("%s cannot be locked, so it stays if this save dies: %s", path, error)
        return without_locks
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether a directory that was opened is still at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _unlock(descriptor: int, path: Path) -> None:
    """Unlock and close a directory. The work under the lock is done, so errors are only logged.

    Processes that were forked in the meantime share the lock, so that closing the descriptor alone would not end it.
    """
    with _logged_errors(path):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with _logged_errors(path):
        os.close(descriptor)


@contextlib.contextmanager
def _logged_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be unlocked: %s", path, error)
