"""Converts checkpoints to one ``torch.save`` file, and to a safetensors file of the model's weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint import storage
from onecopy.checkpoint.directories import opened
from onecopy.checkpoint.files import whole_tensor
from onecopy.checkpoint.manifest import SavedOptimizer, value_of
from onecopy.checkpoint.storage import RemotePath, location_of
from onecopy.state_dict.shards import plain_state_dict


def to_torch(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write one ``torch.save`` file with ``model``, ``optimizer`` (or a list of them), ``step`` and ``extra``.

    The optimizer's state dict is the plain optimizer's, with parameters by position. The whole checkpoint must fit into
    memory.

    Args:
        source: a checkpoint, or a directory with several.
        target: the file; it must not exist.
    """
    with opened(source) as (_, found, reader):
        tensors = {key: whole_tensor(reader, found, key) for key in found.tensors}
        content: dict[str, Any] = {"step": found.step, "extra": value_of(found.extra, tensors)}
        if found.model is not None:
            content["model"] = {name: value_of(tree, tensors) for name, tree in found.model.items()}
        optimizers = [_state_dict_of(saved, tensors) for saved in found.optimizers]
        if optimizers:
            content["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        with _atomic_file(_local_file(target)) as temporary:
            torch.save(content, temporary)


def to_safetensors(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write the model's tensors to one safetensors file, in the form that Hugging Face's tools read.

    Args:
        source: a checkpoint, or a directory with several.
        target: the file; it must not exist.
    """
    from safetensors.torch import save_file

    with opened(source) as (_, found, reader):
        if found.model is None:
            raise ValueError(f"{source} was saved without a model")
        weights = {
            name: whole_tensor(reader, found, tree[1]).contiguous()
            for name, tree in found.model.items()
            if isinstance(tree, list) and tree[0] == "tensor"
        }
        with _atomic_file(_local_file(target)) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})


def _local_file(given: str | os.PathLike[str]) -> Path:
    location = location_of(given)
    if isinstance(location, RemotePath):
        raise ValueError(f"{location} must be a local file: only checkpoints can be on a remote store")
    return location


@contextlib.contextmanager
def _atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path; flush the file there and rename it to the target when the block has ended."""
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    storage.make_directory(target.parent)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        yield temporary
        descriptor = storage.open_descriptor(temporary)
        try:
            storage.flush(descriptor)
        finally:
            os.close(descriptor)
        storage.rename(temporary, target)
        storage.flush_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _state_dict_of(saved: SavedOptimizer, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the plain optimizer's state dict of a saved optimizer, with ``param_names`` if its names are known."""
    groups = []
    for group in saved.groups:
        names = {"params": group.params, **({"param_names": list(group.params)} if saved.named else {})}
        groups.append({**value_of(group.options, tensors), **names})
    state = {name: value_of(tree, tensors) for name, tree in saved.state.items()}
    return plain_state_dict(state, groups)
