"""Converts checkpoints to and from one ``torch.save`` file, and to a safetensors file of the model's weights."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint import storage
from onecopy.checkpoint.directories import read_manifest, with_newest
from onecopy.checkpoint.files import Reader, whole_tensor
from onecopy.checkpoint.manifest import Manifest, SavedOptimizer, keys_in, value_of
from onecopy.checkpoint.ranks import Ranks
from onecopy.checkpoint.save_plan import (
    KeyedTensors,
    SavePlan,
    check_storable,
    group_tree,
    keyed,
    model_trees,
    whole_piece,
)
from onecopy.checkpoint.saving import CALL, SaveJob, check_step
from onecopy.checkpoint.storage import Location, RemotePath, location_of
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError
from onecopy.state_dict.shards import POSITION_NAME, plain_state_dict
from onecopy.step import master_weights
from onecopy.step.parameter_groups import options_of

GROWTH = 4
EXTRA_BYTES = 16 << 20
EXTRA_VALUES = 100_000
"""The values of a file that is converted take at most this many times its size, and this many bytes and values more."""


def to_torch(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write one ``torch.save`` file with ``model``, ``optimizer`` (or a list of them), ``step`` and ``extra``.

    The optimizer's state dict is the plain optimizer's, with parameters by position. The whole checkpoint must fit into
    memory.

    Args:
        source: a checkpoint, or a directory with several.
        target: the file; it must not exist.
    """
    with _opened(source) as (found, reader):
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

    with _opened(source) as (found, reader):
        if found.model is None:
            raise ValueError(f"{source} was saved without a model")
        weights = {
            name: whole_tensor(reader, found, tree[1]).contiguous()
            for name, tree in found.model.items()
            if isinstance(tree, list) and tree[0] == "tensor"
        }
        with _atomic_file(_local_file(target)) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})


def from_torch(source: str | os.PathLike[str], root: str | os.PathLike[str], step: int | None = None) -> Location:
    """Convert a ``torch.save`` file to a checkpoint, for example one with a consolidated state dict of torch's ZeRO.

    The file has a dict with ``model`` and ``optimizer`` state dicts (or one of them), or one such state dict itself.
    The names of an optimizer's parameters are its groups' ``param_names``. Without them parameters are saved, and later
    loaded, by position.

    Args:
        source: the file; it is loaded with ``weights_only=True``.
        root: the directory or URL for checkpoints.
        step: the number to save under; by default the file's own, or 0.

    Raises:
        CheckpointError: if the file cannot be read, or if its values are much larger than the file.
    """
    content = _load_torch_file(_local_file(source))
    try:
        plan, given_step = _plan_of(content)
    except (TypeError, ValueError):
        raise
    except Exception as error:  # the file may hold anything
        raise CheckpointError(f"{source} does not hold state dicts: {type(error).__name__}: {error}") from error
    step = given_step if step is None else step
    check_step(step)
    job = SaveJob(Ranks.single(CALL), location_of(root), step, plan=plan)
    job.look_for_existing()
    return job.run()


def _plan_of(content: Any) -> tuple[SavePlan, Any]:
    """Plan a checkpoint with the content of a ``torch.save`` file; return the plan and the step in the file."""
    if not isinstance(content, dict):
        raise ValueError("the file does not hold a dict")
    if "param_groups" in content:
        content = {"optimizer": content}
    elif not {"model", "optimizer"} & set(content):
        content = {"model": content}
    plan = SavePlan()
    tensors: KeyedTensors = []
    if "model" in content:
        plan.model = model_trees(content.pop("model"), tensors)
    given = content.pop("optimizer", [])
    for number, state_dict in enumerate(given if isinstance(given, list) else [given]):
        plan.optimizers.append(_saved_optimizer(state_dict, number, tensors))
        plan.checksums.append({})
    step = content.pop("step", 0)
    extra = content.pop("extra", {})
    plan.add_extra({**content, **extra} if isinstance(extra, dict) else {**content, "extra": extra}, 0)
    check_storable(tensors)
    plan.pieces += [whole_piece(key, tensor) for key, tensor in tensors]
    return plan, step


def _load_torch_file(path: Path) -> Any:
    """Return the content of a ``torch.save`` file that anybody may have written.

    Raises:
        CheckpointError: if it is not such a file, or if its values are much larger than the file.
    """
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [each.filename for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"{packed[0]!r} in it is compressed")
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {error}") from error
    _check_expansion(content, size, path)
    return content


def _check_expansion(content: Any, size: int, path: Path) -> None:
    """Raise if the values of a file would be much larger as a checkpoint than the file is.

    A tensor of a few bytes can be expanded to any size, and a list can be in another one many times.
    """
    values, nbytes = size + EXTRA_VALUES, GROWTH * size + EXTRA_BYTES + _shared_bytes(content)
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            nbytes -= value.numel() * value.element_size()
        elif isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
            values -= 2 * len(value)
        elif isinstance(value, (list, tuple, set)):
            pending += value
            values -= len(value)
        elif isinstance(value, (str, bytes, bytearray)):
            nbytes -= len(value)
        if values < 0 or nbytes < 0:
            raise CheckpointError(
                f"{path} has {size} bytes, and its values are many times as large: it is not converted"
            )


def _shared_bytes(content: Any) -> int:
    """Return the bytes that names of the model share with other names; a checkpoint has them once."""
    model = content.get("model", content) if isinstance(content, dict) else None
    known, total = set(), 0
    for value in model.values() if isinstance(model, dict) else ():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            identity = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            total += value.numel() * value.element_size() if identity in known else 0
            known.add(identity)
    return total


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str]) -> Iterator[tuple[Manifest, Reader]]:
    """Open a checkpoint for reading."""
    with contextlib.ExitStack() as stack:

        def opened(folder: Location) -> tuple[Manifest, Reader]:
            found = read_manifest(folder)
            reader = stack.enter_context(Reader(folder, found.files))
            reader.check_sizes()
            reader.open_all(found.files)
            return found, reader

        yield with_newest(source, opened)


def _local_file(given: str | os.PathLike[str]) -> Path:
    """Return the path of a file; raise ``ValueError`` if it is a URL."""
    location = location_of(given)
    if isinstance(location, RemotePath):
        raise ValueError(f"{location} must be a local file: only checkpoints of onecopy can be on a remote store")
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


def _saved_optimizer(state_dict: Mapping[str, Any], number: int, tensors: KeyedTensors) -> SavedOptimizer:
    """Return a plain optimizer's state dict in the manifest's form; append its tensors to ``tensors``."""
    name_of_id: dict[Any, str] = {}
    groups = []
    named = all("param_names" in group for group in state_dict["param_groups"])
    for position, group in enumerate(state_dict["param_groups"]):
        by_position = [POSITION_NAME.format(position, place) for place in range(len(group["params"]))]
        names = group["param_names"] if named else by_position
        name_of_id.update(zip(group["params"], names, strict=True))
        tree, options = group_tree(options_of(group), names, number, position)
        groups.append(tree)
        tensors += options
    state = {}
    for param_id, name in name_of_id.items():
        values = dict(state_dict["state"].get(param_id, {}))
        if param_id in state_dict.get(master_weights.STATE_DICT_KEY, {}):
            values[master_weights.STATE_KEY] = state_dict[master_weights.STATE_DICT_KEY][param_id]
        if values:
            found = list[Tensor]()
            tree = tagged_json.encode(values, found, f"state of parameter {name!r}")
            state[name], keys = keyed(tree, f"optimizer.{number}/{name}")
            tensors += zip(keys, found, strict=True)
    known = dict(tensors)
    params = {name: _shape_from(state.get(name), known) for name in name_of_id.values()}
    return SavedOptimizer("", named, params, tuple(groups), state)


def _shape_from(tree: Any, tensors: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """Derive a parameter's shape from its state; None if the state's tensors have different shapes."""
    shapes = {tuple(tensors[key].shape) for key in keys_in(tree) if tensors[key].dim() > 0}
    return shapes.pop() if len(shapes) == 1 else None
