"""Checkpoint directories under a root: their names, how to list them, and how to verify one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from onecopy.checkpoint import manifest as manifests
from onecopy.checkpoint.files import Reader, read_whole
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.manifest_checks import MAX_BYTES
from onecopy.checkpoint.progress_bar import bar
from onecopy.checkpoint.signing import SigningKey, check_key
from onecopy.checkpoint.storage import Location, location_of, storage_of
from onecopy.errors import CorruptCheckpointError

Result = TypeVar("Result")

DIGITS = 8


def folder_name(step: int) -> str:
    """Return the name of the directory for the checkpoint of a step."""
    return f"step-{step:0{DIGITS}d}"


def step_of(folder: Location) -> int:
    """Return the step of a checkpoint directory."""
    return int(folder.name.removeprefix("step-"))


def committed(root: Location) -> list[Location]:
    """Return all complete checkpoints under a root, the newest first."""
    found, before = _listed(root), None
    while found != before:  # another process may have renamed some while they were listed
        found, before = _listed(root), found
    return found


def _listed(root: Location) -> list[Location]:
    names = storage_of(root).names_in(root)
    found = [(int(match[1]), root / name) for name in names if (match := manifests.FOLDER_NAME.fullmatch(name))]
    return [path for _, path in sorted(found, reverse=True) if _has_manifest(path)]


def _has_manifest(folder: Location) -> bool:
    return storage_of(folder).exists(folder / manifests.NAME)


def read_manifest(folder: Location, key: SigningKey | None = None) -> Manifest:
    """Read the manifest of a checkpoint; raise if the directory is not a complete checkpoint.

    Args:
        folder: the checkpoint.
        key: the key with which it must have been signed, or None.
    """
    return manifests.parse(_manifest_text(folder), str(folder / manifests.NAME), key)


def _manifest_text(folder: Location) -> bytes:
    path = folder / manifests.NAME
    if not _has_manifest(folder):
        raise CorruptCheckpointError(f"{path} is missing: {folder} is not a complete checkpoint")
    return read_whole(path, MAX_BYTES)


def with_newest(source: str | os.PathLike[str], action: Callable[[Location], Result]) -> Result:
    """Call a function with the path of a checkpoint, or of the newest one in a directory; return its result.

    If it finds the checkpoint damaged and another one is the newest by then, a save has removed the first one.
    """
    folder = candidates_in(source)[0]
    try:
        return action(folder)
    except CorruptCheckpointError:
        if candidates_in(source)[0] == folder:
            raise
    return with_newest(source, action)


def candidates_in(source: str | os.PathLike[str]) -> list[Location]:
    """Return the path itself if it is a checkpoint, else the checkpoints under it, the newest first."""
    path = location_of(source)
    if _has_manifest(path) or path.name.startswith("step-"):
        return [path]
    found = committed(path)
    if not found:
        raise FileNotFoundError(f"{path} is not a checkpoint, and has none in it")
    return found


def verify(source: str | os.PathLike[str], *, key: SigningKey | None = None) -> int:
    """Check every byte of a checkpoint, or of the newest one in a directory; return the number of bytes.

    Args:
        source: a checkpoint, or a directory with several.
        key: the key with which it must have been signed; None checks no signature.

    Raises:
        CorruptCheckpointError: if a file is damaged, missing or too short; the message names the file.
    """
    check_key(key)
    return with_newest(source, lambda folder: _verify(folder, key))


def _verify(folder: Location, key: SigningKey | None) -> int:
    text = _manifest_text(folder)
    found = manifests.parse(text, str(folder / manifests.NAME), key)
    total = sum(entry.nbytes for entry in found.tensors.values())
    with Reader(folder, found.files, key is not None) as reader, bar("checking", total) as advance:
        reader.check_sizes()
        reader.open_all(found.files)
        for name, entry in found.tensors.items():
            for _, _, part in reader.blocks(name, entry, 0, entry.numel):
                advance(part.numel() * part.element_size())
    return sum(file.size for file in found.files.values()) + len(text)
