"""Where checkpoints are: a directory, through the operating system, or a URL, through fsspec.

Nothing is locked. A writer removes only names that it made itself, older checkpoints after its own commit (``keep``),
and leftovers of saves that died more than a day ago.

- In a directory a save writes under a temporary name. The commit is a rename, which never replaces a checkpoint.
- Object stores have no rename. There the ranks write below the final URL, under names that no other save has. The
  commit is the manifest, which is written last.

Every change is made by a function of this module, so that tests can make each of them fail.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from onecopy.checkpoint.manifest import FILE_NAME, FOLDER_NAME, NAME
from onecopy.errors import CheckpointError

logger = logging.getLogger(__name__)

LEFTOVER_SECONDS = 24 * 3600
"""A temporary name that has not changed for so long was left by a save that died."""

DAMAGE = {getattr(errno, name) for name in ("EIO", "EBADMSG", "EUCLEAN", "ESTALE", "ELOOP") if hasattr(errno, name)}
"""Errors of reads that a damaged disk, a removed file or a symbolic link in the place of a file causes."""

EXISTS = (
    "{} exists already: pass overwrite=True to replace it, load it to go on from it, or save under another step or "
    "into another directory"
)

_TEMPORARY = re.compile(r"\.(step-\d{8,}|pruned)\.[0-9a-f]{8}\.tmp")

_REFUSED = re.compile(r"::|[*?\[\]]")
"""Chains of file systems, and characters that fsspec takes for patterns: a removal would match other names, too."""


@dataclass(frozen=True, order=True)
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


Location: TypeAlias = Path | RemotePath
"""A file or directory: local, or on a remote store."""

Write: TypeAlias = Callable[[memoryview | bytes], object]

ReadInto: TypeAlias = Callable[[memoryview, int], int]
"""Reads from an offset of an open file into memory; returns the number of bytes."""


def location_of(given: str | os.PathLike[str]) -> Location:
    """Return the location that a path or a URL names; ``file://`` names a local path."""
    text = os.fspath(given)
    if "://" not in text or text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return RemotePath.parse(text)


def check_supported(location: Location) -> None:
    """Raise ``OSError`` on a system that cannot read and write checkpoints there."""
    if isinstance(location, Path) and not hasattr(os, "preadv"):
        raise OSError(
            "onecopy.checkpoint needs Linux or macOS: this system cannot flush directories. Save "
            "consolidate_state_dict() + state_dict() with torch.save instead"
        )


# Reading. A missing file is a FileNotFoundError; every other error of a remote store is a CheckpointError.


def names_in(folder: Location) -> list[str]:
    """Return the names in a directory; none if it is missing."""
    if isinstance(folder, Path):
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
    with _store(folder) as (fs, path):
        try:
            return [name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []


def exists(path: Location) -> bool:
    """Return whether there is anything, also a link. If that cannot be found out, a later call has to say why."""
    try:
        if isinstance(path, Path):
            os.lstat(path)
        else:
            size_of(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def size_of(path: Location) -> int | None:
    """Return the size of a regular file; None for anything else, such as a symbolic link, a FIFO or a device."""
    if isinstance(path, Path):
        found = os.lstat(path)
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    with _store(path) as (fs, key):
        described = fs.info(key)
    size: int | None = described["size"] if described["type"] == "file" else None
    return size


@contextlib.contextmanager
def open_to_read(path: Location) -> Iterator[ReadInto]:
    """Open a file during the block. A local file can then be read even if another process removes it."""
    if isinstance(path, Path):
        descriptor = open_descriptor(path)
        try:
            yield partial(read_into, descriptor)
        finally:
            os.close(descriptor)
    else:
        yield partial(_read_remote, path)


def open_descriptor(path: Path) -> int:
    """Open a local file for reading, without following a symbolic link and without waiting for a FIFO."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read from an offset of an open file into memory; return the number of bytes that were read."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _read_remote(path: RemotePath, memory: memoryview, offset: int) -> int:
    with _store(path) as (fs, key):
        content = fs.cat_file(key, start=offset, end=offset + len(memory)) if memory else b""
        memory[: len(content)] = content
    return len(content)


# Writing


def make_directory(path: Path) -> None:
    """Make a directory and its parents."""
    path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def create(path: Location) -> Iterator[Write]:
    """Write a new file in the block, which gets the function to write with; the file is stored durably at its end."""
    if isinstance(path, RemotePath):
        with _upload(path) as write_remote:
            yield write_remote
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield partial(write, descriptor)
        flush(descriptor)
    finally:
        os.close(descriptor)
    flush_directory(path.parent)


def write(descriptor: int, content: memoryview | bytes) -> None:
    """Write all bytes."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def flush(descriptor: int) -> None:
    """Return when everything written is on the disk."""
    os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """Return when the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or directory. A directory that has anything in it, such as a checkpoint, is never replaced."""
    old.rename(new)


def remove(path: Path) -> None:
    """Remove a directory and everything in it."""
    shutil.rmtree(path)


# The life of a checkpoint; rank 0 makes these calls.


def prepare_root(root: Location) -> None:
    """Make the directory of all checkpoints, and remove what saves that died have left more than a day ago."""
    if isinstance(root, Path):
        make_directory(root)
        flush_directory(root.parent)
    for name in names_in(root):
        folder = root / name
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if _is_leftover(folder) and time.time() - _changed_at(folder) > LEFTOVER_SECONDS:
                logger.warning("removing %s, a leftover of a save that died", folder)
                remove(folder) if isinstance(folder, Path) else _remove_remote(folder)


def _is_leftover(folder: Location) -> bool:
    if isinstance(folder, Path):
        is_temporary = _TEMPORARY.fullmatch(folder.name) is not None
        return is_temporary and folder.is_dir() and not folder.is_symlink()
    if not FOLDER_NAME.fullmatch(folder.name) or exists(folder / NAME):
        return False
    return all(FILE_NAME.fullmatch(name) for name in names_in(folder))


def _changed_at(folder: Location) -> float:
    """Return when a directory, or a file in it, was last changed; now, if a store does not say."""
    if isinstance(folder, Path):
        return max((each.lstat().st_mtime for each in folder.iterdir()), default=folder.stat().st_mtime)
    with _store(folder) as (fs, path):
        try:
            return max((fs.modified(f"{path}/{name}").timestamp() for name in names_in(folder)), default=0.0)
        except NotImplementedError:
            return time.time()


def place_for(final: Location, token: str) -> Location:
    """Return where the files of a checkpoint are written; ``token`` belongs to this save alone."""
    return final.with_name(f".{final.name}.{token}.tmp") if isinstance(final, Path) else final


def file_name(folder: Location, group_rank: int, token: str) -> str:
    """Return the name of a rank's file, which no other save uses in this directory."""
    return f"rank-{group_rank:05d}{'' if isinstance(folder, Path) else f'-{token}'}.safetensors"


def commit(folder: Location, final: Location, overwrite: bool) -> None:
    """Make a directory with all files and a manifest the checkpoint ``final``; if this raises, it is none.

    With ``overwrite`` an older checkpoint of that name is renamed first and removed at the end.
    """
    if isinstance(folder, RemotePath) or isinstance(final, RemotePath):
        return  # the manifest was the commit
    aside = None
    if overwrite and exists(final / NAME):
        aside = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
        rename(final, aside)
    try:
        rename(folder, final)
        try:
            flush_directory(final.parent)
        except Exception:
            rename(final, folder)  # all ranks raise, so the checkpoint must not exist
            raise
    except BaseException as error:
        if aside is not None:
            rename(aside, final)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise CheckpointError(EXISTS.format(final)) from None  # another process has just saved it
        raise
    if aside is not None:
        try:
            remove(aside)
        except OSError as error:
            logger.warning("%s, which was replaced, could not be removed: %s", aside, error)


def discard(folder: Location, token: str) -> None:
    """Remove the files of a save that failed, as far as possible. A manifest that names them is removed first."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        with _store(folder) as (fs, path):
            if NAME in names_in(folder) and token.encode() in fs.cat_file(f"{path}/{NAME}"):
                fs.rm_file(f"{path}/{NAME}")
        remove_files(folder, lambda name: token in name)
    except (OSError, CheckpointError) as error:
        logger.warning("files of a failed save could not be removed from %s: %s", folder, error)


def remove_files(folder: RemotePath, wanted: Callable[[str], bool]) -> None:
    """Remove those files of saves below a URL whose names are wanted."""
    for name in names_in(folder):
        if FILE_NAME.fullmatch(name) and wanted(name):
            with _store(folder / name) as (fs, path), contextlib.suppress(FileNotFoundError):
                fs.rm(path)


def remove_checkpoint(folder: Location) -> None:
    """Remove a checkpoint, unless another process has; no reader takes a part of it for a checkpoint."""
    if isinstance(folder, RemotePath):
        _remove_remote(folder)
        return
    hidden = folder.with_name(f".pruned.{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(FileNotFoundError):
        rename(folder, hidden)
        remove(hidden)


# fsspec


@contextlib.contextmanager
def _store(path: RemotePath) -> Iterator[tuple[Any, str]]:
    """Yield fsspec's file system for a URL, without the listings that it has cached, and the path in it.

    Every error of the store becomes a :class:`CheckpointError` that names the URL. A missing file stays one.
    """
    try:
        import fsspec

        fs, key = fsspec.url_to_fs(path.url)
        fs.invalidate_cache()  # another rank or process may have changed them
        yield fs, key
    except ImportError as error:
        raise CheckpointError(f"{path} needs fsspec: pip install 'onecopy[remote]' ({error})") from error
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:  # each store has error classes of its own
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _upload(path: RemotePath) -> Iterator[Write]:
    with _store(path) as (fs, key):
        try:
            file = fs.open(key, "wb")
        except FileNotFoundError:  # a store that has directories
            fs.makedirs(key.rpartition("/")[0], exist_ok=True)
            file = fs.open(key, "wb")

    def write_remote(content: memoryview | bytes) -> None:
        with _store(path):
            file.write(content)

    try:
        yield write_remote
    except BaseException:
        # Otherwise its destructor ends the upload, maybe after its name was removed.
        with contextlib.suppress(Exception):
            file.close()
        raise
    with _store(path):
        file.close()


def _remove_remote(folder: RemotePath) -> None:
    """Remove the files of saves below a URL, the manifest first; files of others stay."""
    with _store(folder) as (fs, path):
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{path}/{NAME}")
        fs.invalidate_cache()
        if all(FILE_NAME.fullmatch(name) for name in names_in(folder)):
            with contextlib.suppress(FileNotFoundError):
                fs.rm(path, recursive=True)
        else:
            remove_files(folder, lambda _: True)
