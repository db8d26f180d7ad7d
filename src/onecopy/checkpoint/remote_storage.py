"""Checkpoints on remote stores, through fsspec: a prefix is a checkpoint if it has a manifest, which is written last.

Object stores have no rename and no locks. So each rank writes its object under the final prefix, and the manifest is
the commit. A prefix without a manifest is left of a save that died. The next save removes it, and so only one training
at a time may save under a root.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onecopy.checkpoint import manifest
from onecopy.checkpoint.disk import OpenFile
from onecopy.checkpoint.manifest_checks import FILE_NAME
from onecopy.errors import CheckpointError

logger = logging.getLogger(__name__)

_REFUSED = re.compile(r"::|[*?\[\]]")
"""Chains of file systems, and characters that fsspec takes for patterns: a removal would match other names, too."""


@dataclass(frozen=True, order=True, slots=True)
class RemotePath:
    """The URL of a directory or a file on a remote store, with the methods of ``Path`` that checkpoints need."""

    url: str

    @classmethod
    def parse(cls, url: str) -> RemotePath:
        """Return a URL that a user gave, without slashes at its end; raise ``ValueError`` if it is not supported."""
        if _REFUSED.search(url):
            raise ValueError(f"{url!r} is not supported: the URL of checkpoints has no '::' and none of * ? [ ]")
        scheme, _, rest = url.partition("://")
        return cls(f"{scheme}://{rest.rstrip('/')}")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def absolute(self) -> RemotePath:
        """Return the URL itself, because it does not depend on the working directory."""
        return self


class RemoteStorage:
    """The :class:`Storage` of URLs. All errors of a store are :class:`CheckpointError`, except missing files."""

    def check_supported(self) -> None:
        """Do nothing: every system can save to a remote store."""

    def names_in(self, folder: RemotePath) -> list[str]:
        """Return the names under a prefix."""
        with _store_errors(folder):
            fs, path = _connect(folder)
            try:
                found = fs.ls(path, detail=False)
            except FileNotFoundError:
                return []
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def exists(self, path: RemotePath) -> bool:
        """Return whether there is an object, or an object under a prefix."""
        try:
            self.size_of(path)
        except FileNotFoundError:
            return False
        return True

    def size_of(self, path: RemotePath) -> int | None:
        """Return the size of an object, and None for a prefix."""
        with _store_errors(path):
            fs, key = _connect(path)
            found = fs.info(key)
        size: int | None = found["size"] if found["type"] == "file" else None
        return size

    @contextlib.contextmanager
    def open_to_read(self, path: RemotePath) -> Iterator[OpenFile]:
        """Yield an object whose ranges are requested one by one; it does not survive a removal."""
        size = self.size_of(path)
        with _store_errors(path):
            fs, key = _connect(path)

        def read_into(memory: memoryview, offset: int) -> int:
            with _store_errors(path):
                content = fs.cat_file(key, start=offset, end=offset + len(memory)) if memory else b""
                memory[: len(content)] = content
            return len(content)

        yield OpenFile(size, read_into)

    @contextlib.contextmanager
    def create(self, path: RemotePath) -> Iterator[Callable[[memoryview | bytes], None]]:
        """Yield a function that uploads bytes; the object is complete at the end of the block."""
        with _store_errors(path):
            file = _open_to_write(path)

        def write(content: memoryview | bytes) -> None:
            with _store_errors(path):
                file.write(content)

        try:
            yield write
        except BaseException:
            # Otherwise its destructor ends the upload, maybe after the prefix was removed.
            with contextlib.suppress(Exception):
                file.close()
            raise
        with _store_errors(path):
            file.close()

    def prepare_root(self, root: RemotePath) -> None:
        """Remove prefixes without a manifest, which are left of saves that died. Other files stay."""
        for name in self.names_in(root):
            folder = root / name
            named = manifest.FOLDER_NAME.fullmatch(name) is not None
            if named and not self.exists(folder / manifest.NAME) and self._is_of_a_save(folder):
                logger.warning("removing %s, a leftover of a save that died", folder)
                self.remove(folder)

    def _is_of_a_save(self, folder: RemotePath) -> bool:
        """Return whether a save may have written every file under a prefix, by their names."""
        return all(FILE_NAME.fullmatch(name) or name == manifest.NAME for name in self.names_in(folder))

    def place_for(self, final: RemotePath) -> RemotePath:
        """Return the checkpoint's own prefix."""
        return final

    def begin(self, folder: RemotePath, stack: contextlib.ExitStack) -> None:
        """Do nothing: prefixes are not made, and nothing can be locked."""

    def commit(self, folder: RemotePath, final: RemotePath) -> None:
        """Do nothing: the manifest has been written, and that is the commit."""

    def set_aside(self, final: RemotePath) -> str:
        """Remove a damaged checkpoint, because a rename would copy all of it; raise if others have written there."""
        if not self._is_of_a_save(final):
            raise CheckpointError(f"{final} has files that no save has written; remove them, or save to another URL")
        self.remove(final)
        return "was removed"

    def discard(self, folder: RemotePath) -> None:
        """Remove everything that a failed save has written; if that fails, the next save does it."""
        try:
            self.remove(folder)
        except (OSError, CheckpointError) as error:
            logger.warning("%s, which is left of a failed save, could not be removed: %s", folder, error)

    def remove(self, folder: RemotePath) -> None:
        """Remove a checkpoint, its manifest first, so that a part of it is never taken for a checkpoint."""
        with _store_errors(folder):
            fs, path = _connect(folder)
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{path}/{manifest.NAME}")
            fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                fs.rm(path, recursive=True)


def _connect(path: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, without the listings that it has cached, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise CheckpointError(f"{path} needs fsspec: pip install 'onecopy[remote]'") from error
    fs, key = fsspec.url_to_fs(path.url)
    fs.invalidate_cache()  # another rank or process may have changed them
    return fs, key


def _open_to_write(path: RemotePath) -> Any:
    """Open a new object; make its directory on stores that have directories."""
    fs, key = _connect(path)
    try:
        return fs.open(key, "wb")
    except FileNotFoundError:
        fs.makedirs(key.rpartition("/")[0], exist_ok=True)
        return fs.open(key, "wb")


@contextlib.contextmanager
def _store_errors(path: RemotePath) -> Iterator[None]:
    """Turn every error of a store into a :class:`CheckpointError` that names the URL; a missing file stays one."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:  # each store has error classes of its own
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
