"""Saves and loads checkpoints that any number of ranks can load, with checksums and an atomic commit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from onecopy.checkpoint import directories, loading, saving
from onecopy.checkpoint.background_save import BackgroundSave
from onecopy.checkpoint.dcp import get_optimizer_state_dict, set_optimizer_state_dict
from onecopy.checkpoint.directories import verify
from onecopy.checkpoint.loading import Loaded
from onecopy.checkpoint.optimizer_view import Optimizers
from onecopy.checkpoint.resumable_sampler import ResumableSampler
from onecopy.checkpoint.save_plan import PerRank
from onecopy.checkpoint.signing import SigningKey
from onecopy.checkpoint.storage import location_of
from onecopy.checkpoint.training_state import capture, restore

__all__ = [
    "Loaded",
    "PerRank",
    "ResumableSampler",
    "SigningKey",
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

_background = BackgroundSave()


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    blocking: bool = True,
    trainable_only: bool = False,
    refuse_nonfinite: bool = False,
    key: SigningKey | None = None,
    process_group: Any = None,
) -> Path | Any:
    """Save a checkpoint to ``root/step-...``. All ranks make this call together, and each rank writes its part.

    All ranks give the same arguments. If anything fails on any rank, all ranks raise, and older checkpoints have not
    changed.

    Args:
        root: the directory for the checkpoints of a run, on a file system that all ranks see; or a URL of fsspec, for
            example ``s3://bucket/run``.
        step: the step to save under; an existing checkpoint is never overwritten.
        model: the model, with or without DDP or ShardedDataParallel around it.
        optimizer: one or several optimizers, of any class.
        extra: plain data and tensors to save as well. Rank 0's values are saved; a value in :class:`PerRank` is saved
            for each rank, under the same keys on all ranks. See :func:`capture`.
        keep: when this checkpoint is complete, remove all but this many of the newest ones.
        blocking: whether to write before returning. Otherwise this call copies everything, and a thread writes it; an
            error of the thread is raised by the next call of this module.
        trainable_only: whether to save digests of the frozen parameters (``requires_grad=False``) instead of their
            values, for adapters (LoRA). :func:`load` then needs a model with the same frozen parameters.
        refuse_nonfinite: raise ``NonfiniteError`` on all ranks if a parameter has an infinity or a NaN. Then nothing is
            saved, and ``keep`` does not remove the last good checkpoint.
        key: sign the checkpoint, so that :func:`load` with the same key refuses checkpoints that others have written.
        process_group: the ranks that save (default: all ranks; without torch.distributed, this process).

    Returns:
        The checkpoint's directory: a ``Path``, or for a URL an object whose ``str()`` is the checkpoint's URL.
    """
    _background.finish()
    job = saving.prepare(
        root, step, model, optimizer, extra, keep, blocking, trainable_only, refuse_nonfinite, key, process_group
    )
    if blocking:
        return job.run()
    _background.start(job)
    return location_of(root) / directories.folder_name(step)


def wait() -> None:
    """Wait for a save in the background, and raise its exception if it failed."""
    _background.finish()


@overload
def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: Literal[False] = False,
    check_base: bool = True,
    key: SigningKey | None = None,
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
    check_base: bool = True,
    key: SigningKey | None = None,
    process_group: Any = None,
) -> Loaded | None: ...


def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: bool = False,
    check_base: bool = True,
    key: SigningKey | None = None,
    process_group: Any = None,
) -> Loaded | None:
    """Load a checkpoint that any number of ranks saved. All ranks make this call together, with the same arguments.

    Nothing changes before every rank has read and checked every byte it needs.

    Args:
        source: a checkpoint, or a directory with several: then the newest one that is not damaged. It may be a URL.
            Rank 0's path is used on all ranks.
        model: the model to load into, or None.
        optimizer: the optimizers to load into, in the order in which they were saved, or None.
        strict: whether the checkpoint must have exactly the names of the model's state dict.
        missing_ok: return None on all ranks if rank 0 finds no checkpoint, as at the start of a run.
        check_base: whether the frozen parameters must be those with which the checkpoint was saved, if it was saved
            with ``trainable_only``.
        key: load only a checkpoint that was signed with this key; None checks no signature.
        process_group: the ranks that load (default: all ranks; without torch.distributed, this process).

    Returns:
        The step, the extra data and more.

    Raises:
        RanksDisagreeError: if ranks have different arguments or models; the message names the first difference.
        CorruptCheckpointError: if files are damaged; the message names the file and the tensor.
        CheckpointMismatchError: if the checkpoint does not fit; the message names the parameter.
    """
    _background.finish()
    return loading.load(source, model, optimizer, strict, missing_ok, check_base, key, process_group)


def latest(root: str | os.PathLike[str]) -> Path | Any | None:
    """Return the newest complete checkpoint under a root, or None.

    Args:
        root: the directory or URL that was given to :func:`save`.
    """
    found = directories.committed(location_of(root))
    return found[0] if found else None
