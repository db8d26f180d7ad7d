"""Checkpoints that any number of ranks can load, that survive crashes, and that are checked byte by byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from onecopy.checkpoint import directories, loading, saving
from onecopy.checkpoint.background_save import Background
from onecopy.checkpoint.contents import PerRank
from onecopy.checkpoint.dcp import get_optimizer_state_dict, set_optimizer_state_dict
from onecopy.checkpoint.directories import verify
from onecopy.checkpoint.loading import Loaded
from onecopy.checkpoint.optimizer_view import Optimizers
from onecopy.checkpoint.training_state import capture, restore

__all__ = [
    "Loaded",
    "PerRank",
    "capture",
    "get_optimizer_state_dict",
    "latest",
    "load",
    "restore",
    "save",
    "set_optimizer_state_dict",
    "verify",
    "wait",
]

_background = Background()


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    blocking: bool = True,
    process_group: Any = None,
) -> Path:
    """Save to ``root/step-...``; all ranks make this call together, with the same arguments, and each writes its part.

    If anything fails on any rank, all ranks raise, and what was saved before is as it was.

    Args:
        root: the directory that holds the checkpoints of a run, on a file system that all ranks see.
        step: the number to save under; a checkpoint that exists is never overwritten.
        model: the model, in DDP, ShardedDataParallel or neither.
        optimizer: one or several optimizers, of any class.
        extra: plain data and tensors to be loaded with it, rank 0's; :class:`PerRank` marks what each rank has of its
            own, under the same keys on all ranks. See :func:`capture`.
        keep: remove all but so many of the newest checkpoints, once this one is there.
        blocking: write before returning. Otherwise copy everything, and write in the background while training goes
            on; what goes wrong then is raised by the next call here.
        process_group: the ranks that save (default: all; without torch.distributed, this process).

    Returns:
        The checkpoint's directory.
    """
    _background.finish()
    job = saving.prepare(root, step, model, optimizer, extra, keep, blocking, process_group)
    if blocking:
        return job.run()
    _background.start(job)
    return directories.folder_of(Path(root), step)


def wait() -> None:
    """Wait for a save in the background; raise what went wrong in it."""
    _background.finish()


@overload
def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: Literal[False] = False,
    process_group: Any = None,
) -> Loaded: ...


@overload
def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: bool,
    process_group: Any = None,
) -> Loaded | None: ...


def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: bool = False,
    process_group: Any = None,
) -> Loaded | None:
    """Load a checkpoint that any number of ranks saved; all ranks make this call together, with the same arguments.

    Nothing changes before every rank has read and checked every byte it needs.

    Args:
        source: a checkpoint, or a directory with several: then the newest one that is not damaged. Rank 0's
            counts.
        model: what to load the model's state into; None leaves it out.
        optimizer: what to load the optimizers' state into, in the order in which they were saved; None leaves it out.
        strict: whether the model's names must all be in the checkpoint, and no others.
        missing_ok: return None on all ranks if rank 0 sees no checkpoint, as in a run that has just begun.
        process_group: the ranks that load (default: all; without torch.distributed, this process).

    Returns:
        The step and the extra data, among others.

    Raises:
        RanksDisagreeError: if ranks were given different arguments or models; the message names the first difference.
        CorruptCheckpointError: if files are damaged; the message names the file and the tensor.
        CheckpointMismatchError: if it does not fit; the message names the parameter.
    """
    _background.finish()
    return loading.load(source, model, optimizer, strict, missing_ok, process_group)


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint under a root, or None.

    Args:
        root: the directory that was given to :func:`save`.
    """
    found = directories.committed(Path(root))
    return found[0] if found else None
