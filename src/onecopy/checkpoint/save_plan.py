"""Plans the part of a checkpoint that one rank writes: pieces of tensors, and a manifest with trees of plain data.

``saving.py`` carries the plan out, and ``files.py`` writes the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import onecopy
from onecopy.checkpoint.files import LivePiece
from onecopy.checkpoint.frozen_base import describe_frozen, frozen_parameters
from onecopy.checkpoint.manifest import (
    DTYPE_NAMES,
    Entry,
    Manifest,
    SavedGroup,
    SavedOptimizer,
    keys_in,
    names_of_tensors,
    with_keys,
)
from onecopy.checkpoint.ranks import Ranks
from onecopy.checkpoint.training_state import PerRank
from onecopy.common import tagged_json
from onecopy.common.flat_views import dense_copy
from onecopy.common.tensor_subclasses import leaves_of
from onecopy.layout import CUT_MULTIPLE
from onecopy.state_dict.shards import OptimizerView, WrittenState, unwrapped, written_states
from onecopy.step.parameter_groups import options_of

KeyedTensors = list[tuple[str, Tensor]]
"""Tensors with the keys under which a checkpoint stores them."""


def plan_save(
    step: int,
    model: nn.Module | None,
    views: Sequence[OptimizerView],
    writes_state: Sequence[bool],  # for each optimizer, whether this rank writes its state, or another replica
    extra: Mapping[str, Any] | None,
    ranks: Ranks,
    trainable_only: bool,
) -> tuple[list[LivePiece], Manifest]:
    """Return the pieces of tensors that this rank writes, without copies of dense ones, and the rest of its part.

    The rest is a manifest without files and tensors. Rank 0's has everything that is equal on all ranks. The state of a
    parameter is a pair: its tree, and the checksum of what all owners must have.
    """
    pieces: list[LivePiece] = []
    replicated: KeyedTensors = []
    frozen: dict[str, Tensor] = {}
    trees, base, is_first = None, None, ranks.group_rank == 0
    if model is not None:
        module = unwrapped(model)
        if trainable_only:
            frozen = frozen_parameters(model)
            base = describe_frozen(frozen, ranks.group_rank, ranks.world_size)
        saved = {name: value for name, value in module.state_dict().items() if name not in frozen}
        trees = model_trees(saved, replicated)
        # Buffers (running statistics) may differ between ranks; DDP continues with the buffers of rank 0.
        params = {part.data_ptr() for param in module.parameters() for part in leaves_of(param)}
        buffers = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() not in params]
        replicated = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() in params]
        if is_first:
            pieces += [whole_piece(key, tensor) for key, tensor in buffers]
    optimizers = [
        _describe_optimizer(pieces, number, view, writes, replicated, frozen)
        for number, (view, writes) in enumerate(zip(views, writes_state, strict=True))
    ]
    if extra is not None and type(extra) is not dict:
        raise TypeError(f"extra must be a dict, got {type(extra).__qualname__}")
    of_rank_0 = {key: value for key, value in (extra or {}).items() if not isinstance(value, PerRank)}
    per_rank = {key: value.value for key, value in (extra or {}).items() if isinstance(value, PerRank)}
    extra_tree = _tree_of(of_rank_0, "extra", pieces if is_first else None)
    rank_tree = _tree_of(per_rank, f"rank{ranks.group_rank}", pieces)
    pieces += _pieces_of_rank(replicated, ranks.group_rank, ranks.world_size)
    if not is_first:
        trees = extra_tree = None
        optimizers = [replace(each, params={}, groups=()) for each in optimizers]
    part = Manifest(
        step=step,
        world_size=ranks.world_size,
        written_by={"onecopy": onecopy.__version__, "torch": str(torch.__version__)},
        files={},
        tensors={},
        model=trees,
        optimizers=tuple(optimizers),
        extra=extra_tree,
        per_rank=(rank_tree,),
        base=base,
    )
    return pieces, part


def _tree_of(values: Mapping[str, Any], prefix: str, pieces: list[LivePiece] | None) -> Any:
    """Return the tree of some values of ``extra``; add its tensors to the pieces of the rank that writes them."""
    tensors: list[Tensor] = []
    tree = tagged_json.encode(values, tensors, "extra")
    keys = [f"{prefix}/{number}" for number in range(len(tensors))]
    if pieces is not None:
        check_storable([("a tensor in extra", tensor) for tensor in tensors])
        pieces += map(whole_piece, keys, tensors)
    return with_keys(tree, keys)


def check_storable(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ``TypeError`` if a tensor cannot be saved; the message has the text beside it."""
    for where, tensor in named:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise TypeError(f"{where} is a {tensor.layout} tensor on {tensor.device}, which cannot be saved")
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{where} is a tensor of type {tensor.dtype}, which cannot be saved")


def model_trees(state_dict: Mapping[str, Any], replicated: KeyedTensors) -> dict[str, Any]:
    """Return a tree for each name of a model's state dict; append the tensors to ``replicated``, tied ones once."""
    tensors: list[Tensor] = []
    known: dict[tuple[Any, ...], str] = {}
    keys: list[str] = []
    encoded = tagged_json.encode(dict(state_dict), tensors, "the model's state dict")
    for name, tree in encoded[1]:
        found = keys_in(tree)
        is_tensor = type(tree) is list and tree[0] == "tensor"
        for part in [""] if is_tensor else [f"/#{number}" for number in range(len(found))]:
            tensor = tensors[len(keys)]
            identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if tensor.numel() and identity in known:
                keys.append(known[identity])  # tied: one copy under both names
                continue
            known[identity] = f"model/{name}{part}"
            keys.append(f"model/{name}{part}")
            replicated.append((f"model/{name}{part}", tensor))
    check_storable(
        [(f"{key.removeprefix('model/')!r} of the model's state dict", tensor) for key, tensor in replicated]
    )
    return {name: with_keys(tree, keys) for name, tree in encoded[1]}


def keyed(tree: Any, prefix: str) -> tuple[Any, list[str]]:
    """Return a tree of ``tagged_json.encode`` with keys in place of tensors, and the keys."""
    keys = [f"{prefix}/{name}" for name in names_of_tensors(tree)]
    return with_keys(tree, keys), keys


def _describe_optimizer(
    pieces: list[LivePiece],
    number: int,
    view: OptimizerView,
    writes: bool,
    replicated: KeyedTensors,
    frozen: Collection[str],
) -> SavedOptimizer:
    """Describe one optimizer; add the tensors that all ranks have to ``replicated``, and sharded ones to the pieces.

    Nothing is written for a parameter in ``frozen`` that has no state, because its master weight is its value.
    """
    view.check_state_keys()
    params = {name: tuple(param.shape) for name, param in zip(view.names, view.params, strict=True)}
    groups = []
    members = view.split_by_group(view.names)
    for position, (group, names) in enumerate(zip(view.optimizer.param_groups, members, strict=True)):
        tensors: list[Tensor] = []
        what = f"the options of group {position} of optimizer {number}"
        tree, keys = keyed(tagged_json.encode(options_of(group), tensors, what), f"optimizer.{number}/group{position}")
        groups.append(SavedGroup(tree, tuple(names)))
        replicated += zip(keys, tensors, strict=True)
    state: dict[str, Any] = {}
    shards = view.state_shards() if writes else []
    has_values = [each for each in shards if each.state or (each.param_view is not None and each.name not in frozen)]
    for written in written_states(has_values):
        name = written.shard.name
        tree, keys = keyed(written.tree, f"optimizer.{number}/{name}")
        state[name] = [tree, written.checksum]
        check_storable([(f"state of parameter {name!r}", tensor) for tensor in written.tensors])
        if view.engine is None:
            replicated += zip(keys, written.tensors, strict=True)
        else:
            pieces += _pieces_of_shard(written, keys)
    return SavedOptimizer(view.kind, view.named, params, tuple(groups), state)


def _pieces_of_shard(written: WrittenState, keys: Sequence[str]) -> list[LivePiece]:
    """Return the pieces of one parameter's state that this rank writes: its range, and what the first owner has."""
    pieces, shard = [], written.shard
    shape, stride = tuple(shard.param.shape), tuple(shard.param.stride())
    for key, tensor, per_element in zip(keys, written.tensors, written.per_element, strict=True):
        if per_element:
            entry = Entry(DTYPE_NAMES[tensor.dtype], shape, stride)
            pieces.append(LivePiece(key, entry, shard.start, shard.stop, _flat(tensor)))
        elif shard.start == 0:
            pieces.append(whole_piece(key, tensor))
    return pieces


def whole_piece(key: str, tensor: Tensor) -> LivePiece:
    """Return a whole tensor as one piece."""
    dense = tensor if tensor.is_contiguous() else dense_copy(tensor)
    return LivePiece(key, _entry_of(dense), 0, dense.numel(), _flat(dense))


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def _entry_of(dense: Tensor) -> Entry:
    return Entry(DTYPE_NAMES[dense.dtype], tuple(dense.shape), tuple(dense.stride()))


def _pieces_of_rank(replicated: KeyedTensors, group_rank: int, world_size: int) -> list[LivePiece]:
    """Return this rank's pieces of tensors that are equal on all ranks: an equal part of the bytes for each rank."""
    sizes = [(tensor.numel(), tensor.element_size()) for _, tensor in replicated]
    pieces = []
    for (key, tensor), (start, stop) in zip(replicated, divide(sizes, group_rank, world_size), strict=True):
        if start < stop or (tensor.numel() == 0 and group_rank == 0):
            whole = whole_piece(key, tensor)
            pieces.append(replace(whole, start=start, stop=stop, flat=whole.flat[start:stop]))
    return pieces


def divide(sizes: Sequence[tuple[int, int]], group_rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the range ``(start, stop)`` of each tensor that one rank writes; the ranges of all ranks cover everything.

    ``sizes`` has for each tensor the number of elements and the bytes of an element.
    """
    total = sum(count * size for count, size in sizes)
    ranges, offset = [], 0
    for count, size in sizes:
        cuts = []
        for rank in (group_rank, group_rank + 1):
            element = (rank * total // world_size - offset) // size
            cuts.append(max(0, element // CUT_MULTIPLE * CUT_MULTIPLE) if element < count else count)
        start = cuts[0] if group_rank else 0
        ranges.append((start, count if group_rank == world_size - 1 else cuts[1]))
        offset += count * size
    return ranges
