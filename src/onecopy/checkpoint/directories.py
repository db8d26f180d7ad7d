"""Checkpoint directories under a root: their names, how to list them, and how to verify one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from onecopy.checkpoint import manifest as manifests
from onecopy.checkpoint.files import Reader
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.progress_bar import bar
from onecopy.errors import CorruptCheckpointError

DIGITS = 8
_COMMITTED = re.compile(r"step-(\d{8,})")


def folder_of(root: Path, step: int) -> Path:
    """Return the directory for the checkpoint of a step."""
    return root / f"step-{step:0{DIGITS}d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint directory."""
    return int(folder.name.removeprefix("step-"))


def committed(root: Path) -> list[Path]:
    """Return all complete checkpoints under a root, the newest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _COMMITTED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if (path / manifests.NAME).is_file()]


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; raise if the directory is not a complete checkpoint."""
    path = folder / manifests.NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing: {folder} is not a complete checkpoint") from None
    return manifests.parse(text, str(path))


def candidates_in(source: str | os.PathLike[str]) -> list[Path]:
    """Return the path itself if it is a checkpoint, else the checkpoints under it, the newest first."""
    path = Path(source)
    if (path / manifests.NAME).exists() or path.name.startswith("step-"):
        return [path]
    found = committed(path)
    if not found:
        raise FileNotFoundError(f"{path} is not a checkpoint, and has none in it")
    return found


def verify(source: str | os.PathLike[str]) -> int:
    """Check every byte of a checkpoint, or of the newest one in a directory; return the number of bytes.

    Args:
        source: a checkpoint, or a directory with several.

    Raises:
        CorruptCheckpointError: if a file is damaged, missing or too short; the message names the file.
    """
    folder = candidates_in(source)[0]
    found = read_manifest(folder)
    total = sum(entry.nbytes for entry in found.tensors.values())
    with Reader(folder, found.files) as reader, bar("checking", total) as advance:
        for name in found.files:
            reader.check_file(name)
        for key, entry in found.tensors.items():
            for _, _, part in reader.blocks(key, entry, 0, entry.numel):
                advance(part.numel() * part.element_size())
    return sum(file.size for file in found.files.values()) + (folder / manifests.NAME).stat().st_size
