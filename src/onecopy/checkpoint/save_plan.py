"""Plans the part of a checkpoint that one rank writes: pieces of tensors, and trees of plain data.

``saving.py`` carries the plan out, and ``files.py`` writes the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint.files import LivePiece
from onecopy.checkpoint.frozen_base import describe_frozen, frozen_parameters
from onecopy.checkpoint.manifest import (
    DTYPE_NAMES,
    Entry,
    FrozenParam,
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


@dataclass(slots=True)
class SavePlan:
    """One rank's part of a checkpoint."""

    pieces: list[LivePiece] = field(default_factory=list)  # the tensor data that this rank writes
    model: dict[str, Any] | None = None  # a tree for each name of the state dict; equal on all ranks
    optimizers: list[SavedOptimizer] = field(default_factory=list)  # with the state that this rank has
    checksums: list[dict[str, int]] = field(default_factory=list)  # by parameter, of state that all owners have
    extra: Any = None  # a tree; rank 0's is saved
    per_rank: Any = None  # the tree of this rank's PerRank values
    base: dict[str, FrozenParam] | None = None  # this rank's part; None if the values of frozen parameters are saved

    def add_extra(self, extra: Mapping[str, Any] | None, group_rank: int) -> None:
        """Add ``extra``: the values of rank 0, and the :class:`PerRank` values of every rank."""
        if extra is not None and type(extra) is not dict:
            raise TypeError(f"extra must be a dict, got {type(extra).__qualname__}")
        of_rank_0 = {key: value for key, value in (extra or {}).items() if not isinstance(value, PerRank)}
        per_rank = {key: value.value for key, value in (extra or {}).items() if isinstance(value, PerRank)}
        self.extra = self._add_values(of_rank_0, "extra", writes=group_rank == 0)
        self.per_rank = self._add_values(per_rank, f"rank{group_rank}", writes=True)

    def _add_values(self, values: Mapping[str, Any], prefix: str, writes: bool) -> Any:
        tensors: list[Tensor] = []
        tree = tagged_json.encode(values, tensors, "extra")
        keys = [f"{prefix}/{number}" for number in range(len(tensors))]
        if writes:
            check_storable([("a tensor in extra", tensor) for tensor in tensors])
            self.pieces += map(whole_piece, keys, tensors)
        return with_keys(tree, keys)


def plan_save(
    model: nn.Module | None,
    views: Sequence[OptimizerView],
    writes_state: Sequence[bool],
    extra: Mapping[str, Any] | None,
    ranks: Ranks,
    trainable_only: bool,
) -> SavePlan:
    """Describe the model, the optimizers and ``extra``, and choose this rank's pieces; dense tensors are not copied.

    ``writes_state`` tells for each optimizer whether this rank writes its state, or another replica.
    """
    plan = SavePlan()
    replicated: KeyedTensors = []
    frozen: dict[str, Tensor] = {}
    if model is not None:
        module = unwrapped(model)
        if trainable_only:
            frozen = frozen_parameters(model)
            plan.base = describe_frozen(frozen, ranks.group_rank, ranks.world_size)
        saved = {name: value for name, value in module.state_dict().items() if name not in frozen}
        plan.model = model_trees(saved, replicated)
        # Buffers (running statistics) may differ between ranks; DDP continues with the buffers of rank 0.
        params = {part.data_ptr() for param in module.parameters() for part in _leaves(param)}
        buffers = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() not in params]
        replicated = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() in params]
        if ranks.group_rank == 0:
            plan.pieces += [whole_piece(key, tensor) for key, tensor in buffers]
    for number, (view, writes) in enumerate(zip(views, writes_state, strict=True)):
        _add_optimizer(plan, number, view, writes, replicated, frozen)
    plan.add_extra(extra, ranks.group_rank)
    plan.pieces += _pieces_of_rank(replicated, ranks.group_rank, ranks.world_size)
    return plan


def _leaves(param: Tensor) -> list[Tensor]:
    return [param] if type(param) is nn.Parameter else leaves_of(param)


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


def _add_optimizer(
    plan: SavePlan,
    number: int,
    view: OptimizerView,
    writes: bool,
    replicated: KeyedTensors,
    frozen: Collection[str],
) -> None:
    """Describe one optimizer; add the tensors that all ranks have to ``replicated``, and sharded ones as pieces.

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
    checksums: dict[str, int] = {}
    shards = view.state_shards() if writes else []
    has_values = [
        each
        for each in shards
        if each.state or each.averages or (each.param_view is not None and each.name not in frozen)
    ]
    for written in written_states(has_values):
        name = written.shard.name
        state[name], keys = keyed(written.tree, f"optimizer.{number}/{name}")
        check_storable([(f"state of parameter {name!r}", tensor) for tensor in written.tensors])
        if view.engine is None:
            replicated += zip(keys, written.tensors, strict=True)
        else:
            plan.pieces += _pieces_of_shard(written, keys)
            checksums[name] = written.checksum
    plan.optimizers.append(SavedOptimizer(view.kind, view.named, params, tuple(groups), state))
    plan.checksums.append(checksums)


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
