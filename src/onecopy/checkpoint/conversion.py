"""Checkpoints from and to files that everyone reads: one ``torch.save`` file, or safetensors of the model's weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint import disk
from onecopy.checkpoint.contents import Contents, add_extra, entry_of, model_trees, name_of
from onecopy.checkpoint.directories import candidates_in, read_manifest
from onecopy.checkpoint.files import LivePiece, Reader, check_storable, whole_tensor
from onecopy.checkpoint.manifest import Manifest, SavedOptimizer, SavedParam, keys_in, names_of_tensors, with_keys
from onecopy.checkpoint.ranks import Ranks
from onecopy.checkpoint.saving import SaveJob
from onecopy.common import tagged_json
from onecopy.common.flat_views import dense_copy, flat_view
from onecopy.step import master_weights
from onecopy.step.group_options import NOT_OPTIONS

POSITIONS = "group{}[{}]"


def to_torch(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write one ``torch.save`` file with ``model``, ``optimizer`` (a list, if there are several), ``step``, ``extra``.

    The optimizer's state dict is the plain optimizer's, with parameters by position. Needs memory for all of it.

    Args:
        source: a checkpoint, or a directory with several.
        target: the file; it must not exist.
    """
    with _opened(source) as (found, reader):
        tensors = {key: whole_tensor(reader, found, key) for key in found.tensors}
        content: dict[str, Any] = {"step": found.step, "extra": tagged_json.decode(found.extra, tensors)}  # type: ignore[arg-type]
        if found.model is not None:
            content["model"] = {
                name: tagged_json.decode(tree, tensors)  # type: ignore[arg-type]
                for name, tree in found.model.items()
            }
        optimizers = [_plain_form(saved, tensors) for saved in found.optimizers]
        if optimizers:
            content["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        write_torch(content, target)


def write_torch(content: Any, target: str | os.PathLike[str]) -> None:
    """Write a ``torch.save`` file that exists only once all of it is on the disk.

    Args:
        content: what to save.
        target: the file; it must not exist.
    """
    with _whole_or_nothing(Path(target)) as temporary:
        torch.save(content, temporary)


def to_safetensors(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write the model's tensors to one safetensors file, as Hugging Face's tools read it.

    Args:
        source: a checkpoint, or a directory with several.
        target: the file; it must not exist.
    """
    from safetensors.torch import save_file

    with _opened(source) as (found, reader):
        if found.model is None:
            raise ValueError(f"{source} was saved without a model")
        weights = {
            name: whole_tensor(reader, found, tree[1]).contiguous()
            for name, tree in found.model.items()
            if isinstance(tree, list) and tree[0] == "tensor"
        }
        with _whole_or_nothing(Path(target)) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})


def from_torch(source: str | os.PathLike[str], root: str | os.PathLike[str], step: int | None = None) -> Path:
    """Make a checkpoint of a ``torch.save`` file, such as one with a consolidated state dict of torch's class.

    The file holds a dict with ``model`` and ``optimizer`` state dicts (or one of them), or one such state dict itself.
    Parameters of an optimizer are named as its groups' ``param_names`` say; if there are none, by their position, and
    then they are loaded by position.

    Args:
        source: the file; it is loaded with ``weights_only=True``.
        root: the directory for checkpoints.
        step: the number to save under; by default the file's own, or 0.
    """
    content = torch.load(source, weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(content, dict):
        raise ValueError(f"{source} does not hold a dict")
    if "param_groups" in content:
        content = {"optimizer": content}
    elif not {"model", "optimizer"} & set(content):
        content = {"model": content}
    contents = Contents()
    replicated: list[tuple[str, Tensor]] = []
    if "model" in content:
        contents.model = model_trees(content.pop("model"), replicated)
    given = content.pop("optimizer", [])
    for number, state_dict in enumerate(given if isinstance(given, list) else [given]):
        contents.optimizers.append(_named_form(state_dict, number, replicated))
        contents.owners.append(dict.fromkeys(contents.optimizers[-1].state, (0, 0)))
    given_step = content.pop("step", 0)
    step = given_step if step is None else step
    extra = content.pop("extra", {})
    add_extra(contents, {**content, **extra} if isinstance(extra, dict) else {**content, "extra": extra}, 0)
    for key, tensor in replicated:
        check_storable(tensor, key)
        dense = dense_copy(tensor)
        contents.pieces.append(LivePiece(key, entry_of(dense), 0, dense.numel(), flat_view(dense)))
    return SaveJob(Ranks.alone(), Path(root), step, None, contents).run()


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str]) -> Iterator[tuple[Manifest, Reader]]:
    folder = candidates_in(source)[0]
    found = read_manifest(folder)
    with Reader(folder, found.files) as reader:
        yield found, reader


@contextlib.contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """A place to write to, which becomes the target once everything is on the disk."""
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    disk.make_directory(target.parent)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            disk.flush(descriptor)
        finally:
            os.close(descriptor)
        disk.rename(temporary, target)
        disk.flush_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _plain_form(saved: SavedOptimizer, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A plain optimizer's state dict: parameters by position, names beside them if there are any."""
    names = list(chain.from_iterable(group["params"] for group in saved.groups))
    position_of = {name: position for position, name in enumerate(names)}
    groups = []
    for group in saved.groups:
        shown = tagged_json.decode(group["options"], tensors)  # type: ignore[arg-type]
        shown["params"] = [position_of[name] for name in group["params"]]
        if saved.named:
            shown["param_names"] = list(group["params"])
        groups.append(shown)
    state = {position_of[name]: tagged_json.decode(tree, tensors) for name, tree in saved.state.items()}  # type: ignore[arg-type]
    state, copies = master_weights.split_master_weights(state)
    form: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": groups}
    return {**form, master_weights.STATE_DICT_KEY: copies} if copies else form


def _named_form(state_dict: Mapping[str, Any], number: int, replicated: list[tuple[str, Tensor]]) -> SavedOptimizer:
    """A plain optimizer's state dict by name; tensors are appended to ``replicated``."""
    name_for: dict[Any, str] = {}
    groups = []
    named = all("param_names" in group for group in state_dict["param_groups"])
    for place, group in enumerate(state_dict["param_groups"]):
        names = group["param_names"] if named else [POSITIONS.format(place, n) for n in range(len(group["params"]))]
        name_for.update(zip(group["params"], names, strict=True))
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        tensors: list[Tensor] = []
        tree = tagged_json.encode(options, tensors, f"the options of group {place}")
        keys = [f"optimizer.{number}/group{place}/{name}" for name in names_of_tensors(tree, len(tensors))]
        replicated += zip(keys, tensors, strict=True)
        groups.append({"options": with_keys(tree, keys), "params": list(names)})
    state = {}
    for identity, name in name_for.items():
        values = dict(state_dict["state"].get(identity, {}))
        if identity in state_dict.get(master_weights.STATE_DICT_KEY, {}):
            values[master_weights.STATE_KEY] = state_dict[master_weights.STATE_DICT_KEY][identity]
        if values:
            tensors = []
            tree = tagged_json.encode(values, tensors, f"state of parameter {name!r}")
            keys = [f"optimizer.{number}/{name}/{part}" for part in names_of_tensors(tree, len(tensors))]
            replicated += zip(keys, tensors, strict=True)
            state[name] = with_keys(tree, keys)
    known = dict(replicated)
    params = {name: _param_from(state.get(name), known) for name in name_for.values()}
    return SavedOptimizer("", named, params, tuple(groups), state)


def _param_from(tree: Any, tensors: Mapping[str, Tensor]) -> SavedParam:
    """What the state of a parameter tells of it; its shape is unknown if tensors of the state have several."""
    found = [tensors[key] for key in keys_in(tree) if tensors[key].dim() > 0]
    if not found or any(tensor.shape != found[0].shape for tensor in found):
        return SavedParam(None, (), "")
    return SavedParam(tuple(found[0].shape), tuple(found[0].stride()), name_of(found[0].dtype))
