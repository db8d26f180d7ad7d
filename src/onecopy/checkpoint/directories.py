"""Checkpoint directories under a root: their names, how to list them, and how to verify one."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from onecopy.checkpoint import manifest as manifests
from onecopy.checkpoint import storage
from onecopy.checkpoint.files import Reader, read_whole
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.storage import Location, location_of
from onecopy.errors import CorruptCheckpointError

logger = logging.getLogger(__name__)

_known_roots: set[str] = set()
"""The roots that this process has loaded from or saved to."""


def folder_name(step: int) -> str:
    """Return the name of the directory for the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(folder: Location) -> int:
    """Return the step of a checkpoint directory."""
    return int(folder.name.removeprefix("step-"))


def latest(root: str | os.PathLike[str]) -> Any | None:
    """Return the newest complete checkpoint under a root, or None.

    Args:
        root: the directory or URL that was given to :func:`save`.
    """
    found = committed(location_of(root))
    return found[0] if found else None


def committed(root: Location) -> list[Location]:
    """Return all complete checkpoints under a root, the newest first."""
    found, before = _listed(root), None
    while found != before:  # another process may have renamed some while they were listed
        found, before = _listed(root), found
    return found


def _listed(root: Location) -> list[Location]:
    names = storage.names_in(root)
    found = [(int(match[1]), root / name) for name in names if (match := manifests.FOLDER_NAME.fullmatch(name))]
    return [path for _, path in sorted(found, reverse=True) if has_manifest(path)]


def note_known(folder: Location) -> None:
    """Note that this process knows what is in the root of a checkpoint."""
    _known_roots.add(str(folder.absolute()).rpartition("/")[0])


def warn_of_later_steps(folder: Location, root: Location) -> None:
    """Warn, at the first save of a process that has not loaded from a root, of a later step of another run in it."""
    is_known = str(root.absolute()) in _known_roots
    later = [] if is_known else [other for other in committed(root) if step_of(other) > step_of(folder)]
    note_known(folder)
    if later:
        logger.warning(
            "%s has checkpoints of later steps, up to %s: a save of a step that is there raises, and load() takes the "
            "newest. Load from it to go on with that run, pass overwrite=True to replace its steps, or save into "
            "another directory",
            root,
            later[0].name,
        )


def has_manifest(folder: Location) -> bool:
    """Return whether a directory is a complete checkpoint."""
    return storage.exists(folder / manifests.NAME)


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint; raise if the directory is not a complete checkpoint."""
    path = folder / manifests.NAME
    if not has_manifest(folder):
        raise CorruptCheckpointError(f"{path} is missing: {folder} is not a complete checkpoint")
    return manifests.parse(read_whole(path, manifests.MAX_BYTES), str(path))


def candidates_in(source: str | os.PathLike[str], missing_ok: bool = False) -> list[Location]:
    """Return the path itself if it is a checkpoint, else the checkpoints under it, the newest first."""
    path = location_of(source)
    if has_manifest(path) or path.name.startswith("step-"):
        return [path]
    found = committed(path)
    if not found and not missing_ok:
        raise FileNotFoundError(f"{path} is not a checkpoint, and has none in it")
    return found


@contextlib.contextmanager
def opened(source: str | os.PathLike[str]) -> Iterator[tuple[Location, Manifest, Reader]]:
    """Open a checkpoint, or the newest one in a directory, of whose files only the sizes are checked."""
    folder = candidates_in(source)[0]
    found = read_manifest(folder)
    with Reader(folder, found.files) as reader:
        reader.check_sizes()
        yield folder, found, reader


def verify(source: str | os.PathLike[str]) -> int:
    """Check every byte of a checkpoint, or of the newest one in a directory; return the number of bytes.

    Args:
        source: a checkpoint, or a directory with several.

    Raises:
        CorruptCheckpointError: if a file is damaged, missing or too short; the message names the file.
    """
    with opened(source) as (folder, found, reader):
        for name in found.files:
            reader.opened(name)
        for name, entry in found.tensors.items():
            reader.read(name, entry, 0, entry.numel)
    return sum(file.size for file in found.files.values()) + (storage.size_of(folder / manifests.NAME) or 0)
