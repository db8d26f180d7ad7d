"""Where checkpoints are stored: one interface, with an implementation for directories and one for URLs.

Directories have renames and locks, so a checkpoint is written under a temporary name. ``remote_storage`` says what
replaces that on remote stores.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from onecopy.checkpoint import disk
from onecopy.checkpoint.disk import OpenFile
from onecopy.checkpoint.remote_storage import RemotePath, RemoteStorage
from onecopy.errors import CheckpointError

logger = logging.getLogger(__name__)

Location: TypeAlias = Path | RemotePath
"""A file or directory: local, or on a remote store."""

Write: TypeAlias = Callable[[memoryview | bytes], None]

EXISTS = (
    "{} exists already, and a checkpoint is never overwritten; save under another step or into another directory, or "
    "remove it"
)

ATTEMPTS = 20
"""How often a temporary directory is made again if another process removes it."""

_UNFINISHED = re.compile(r"\.(step-\d{8,}|pruned)\.[0-9a-f]{8}\.tmp")

Place = TypeVar("Place")


class Storage(Protocol[Place]):
    """The operations on checkpoints that differ between directories and remote stores.

    Reads and sizes of missing files raise ``FileNotFoundError``. Rank 0 makes the calls from :meth:`prepare_root` on.
    """

    def check_supported(self) -> None:
        """Raise ``OSError`` on a system that cannot save here."""

    def names_in(self, folder: Place) -> list[str]:
        """Return the names in a directory; none if it is missing."""

    def exists(self, path: Place) -> bool:
        """Return whether there is a file or directory."""

    def size_of(self, path: Place) -> int | None:
        """Return the size of a regular file, and None for anything else."""

    def open_to_read(self, path: Place) -> contextlib.AbstractContextManager[OpenFile]:
        """Open a file during a ``with`` block."""

    def create(self, path: Place) -> contextlib.AbstractContextManager[Write]:
        """Write a new file in a ``with`` block, which yields the function to write with; it is stored at the end."""

    def prepare_root(self, root: Place) -> None:
        """Make the directory of all checkpoints, and remove leftovers of saves that died."""

    def place_for(self, final: Place) -> Place:
        """Return the directory in which a checkpoint is written before :meth:`commit`."""

    def begin(self, folder: Place, stack: contextlib.ExitStack) -> None:
        """Make the directory of :meth:`place_for`; it belongs to this save until ``stack`` is closed."""

    def commit(self, folder: Place, final: Place) -> None:
        """Make a directory with a manifest the checkpoint ``final``; if this raises, it is none."""

    def set_aside(self, final: Place) -> str:
        """Make room for a checkpoint whose damaged predecessor is in its place; return what became of that."""

    def discard(self, folder: Place) -> None:
        """Remove the directory of a save that failed; errors are not raised."""

    def remove(self, folder: Place) -> None:
        """Remove a checkpoint; nobody sees a part of it as a checkpoint."""


class LocalStorage:
    """The :class:`Storage` of directories: temporary directories with locks, flushes, and one rename."""

    def check_supported(self) -> None:
        """Raise ``OSError`` if directories cannot be locked and flushed."""
        disk.check_supported()

    def names_in(self, folder: Path) -> list[str]:
        """Return the names in a directory."""
        if not folder.is_dir():
            return []
        try:
            return [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        """Return whether there is anything, also a link. If that cannot be found out, a later call has to say why."""
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    def size_of(self, path: Path) -> int | None:
        """Return the size of a regular file."""
        return disk.size_of(path)

    @contextlib.contextmanager
    def open_to_read(self, path: Path) -> Iterator[OpenFile]:
        """Open a file; from then on it can be read even if another process removes it."""
        descriptor = disk.open_to_read(path)
        try:
            size = os.fstat(descriptor).st_size
            yield OpenFile(size, lambda memory, offset: disk.read_into(descriptor, memory, offset))
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[Write]:
        """Write a file, and flush it and its name to the disk."""
        descriptor = disk.create(path)
        try:
            with disk.EarlyFlush(descriptor) as early:

                def write(content: memoryview | bytes) -> None:
                    disk.write(descriptor, content)
                    early.wrote(len(content))

                yield write
            disk.flush(descriptor)
        finally:
            os.close(descriptor)
        disk.flush_directory(path.parent)

    def prepare_root(self, root: Path) -> None:
        """Make the root, and remove temporary directories of saves that died; those of running saves are locked."""
        disk.make_directory(root)
        disk.flush_directory(root.parent)
        for path in root.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                with disk.locked(path, wait=False, without_locks=False) as has_lock:
                    if has_lock:
                        # A save that was about to lock an empty one makes it again.
                        level = logging.WARNING if any(path.iterdir()) else logging.DEBUG
                        logger.log(level, "removing %s, a leftover of a save that died", path)
                        disk.remove(path)

    def place_for(self, final: Path) -> Path:
        """Return a temporary directory beside the final one."""
        return final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")

    def begin(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """Make and lock the temporary directory."""
        for _ in range(ATTEMPTS):  # another save may take it for a leftover before it is locked
            disk.make_directory(folder)
            if stack.enter_context(disk.locked(folder)):
                return
        raise OSError("it was removed again and again before it could be locked")

    def commit(self, folder: Path, final: Path) -> None:
        """Rename the directory, and flush its new name."""
        try:
            disk.rename(folder, final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise CheckpointError(EXISTS.format(final)) from None  # another process has just saved it
        try:
            disk.flush_directory(final.parent)
        except Exception:
            disk.rename(final, folder)  # all ranks raise, so the checkpoint must not exist
            raise

    def set_aside(self, final: Path) -> str:
        """Rename a damaged checkpoint."""
        renamed = final.with_name(f"damaged-{final.name}.{secrets.token_hex(4)}")
        disk.rename(final, renamed)
        return f"is now {renamed.name}"

    def discard(self, folder: Path) -> None:
        """Remove a directory as far as possible; the next save removes the rest."""
        shutil.rmtree(folder, ignore_errors=True)

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint that no other process has locked.

        It is locked, so that another save does not take it for a leftover, and renamed, so that no reader sees a part
        of it.
        """
        with disk.locked(folder, wait=False) as has_lock:
            if has_lock:
                hidden = folder.with_name(f".pruned.{secrets.token_hex(4)}.tmp")
                disk.rename(folder, hidden)
                disk.remove(hidden)


def location_of(given: str | os.PathLike[str]) -> Location:
    """Return the location that a path or a URL names; ``file://`` names a local path."""
    text = os.fspath(given)
    if "://" not in text or text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return RemotePath.parse(text)


def storage_of(location: Location) -> Storage[Any]:
    """Return the storage that a location is on."""
    return RemoteStorage() if isinstance(location, RemotePath) else LocalStorage()
