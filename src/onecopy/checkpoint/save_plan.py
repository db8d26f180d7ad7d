"""Plans the part of a checkpoint that one rank writes: pieces of tensors, and trees of plain data.

``saving.py`` carries the plan out, and ``files.py`` writes the bytes. ``PerRank``, the public mark for values that each
rank saves for itself, is here too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint.files import LivePiece, check_storable
from onecopy.checkpoint.frozen_base import describe_frozen, frozen_parameters
from onecopy.checkpoint.manifest import Entry, FrozenParam, SavedOptimizer, SavedParam, names_of_tensors, with_keys
from onecopy.checkpoint.optimizer_view import OptimizerView, StateShard, unwrapped
from onecopy.common import tagged_json
from onecopy.common.flat_views import dense_copy, flat_view
from onecopy.common.tensor_subclasses import check_not_cut, leaves_of
from onecopy.layout import CUT_MULTIPLE
from onecopy.state_dict.forms import state_with_master
from onecopy.state_dict.owner_comparison import checksum
from onecopy.step.parameter_groups import options_of

KeyedTensors = list[tuple[str, Tensor]]
"""Tensors with the keys under which a checkpoint stores them."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value of ``extra`` that each rank saves for itself, such as the state of its random number generators."""

    value: Any


@dataclass(slots=True)
class SavePlan:
    """One rank's part of a checkpoint.

    Attributes:
        pieces: the tensor data that this rank writes.
        model: a tree for each name of the model's state dict; equal on all ranks.
        optimizers: the optimizers, with state only for the parameters of which this rank has state.
        checksums: for each optimizer, by parameter name, a checksum of the state of which all owners have a copy.
        extra: the tree of ``extra``; rank 0's is saved.
        per_rank: the tree of this rank's :class:`PerRank` values.
        signature: names, shapes and dtypes of the model's tensors, as text.
        base: this rank's part of the descriptions of frozen parameters; None if their values are saved.
    """

    pieces: list[LivePiece] = field(default_factory=list)
    model: dict[str, Any] | None = None
    optimizers: list[SavedOptimizer] = field(default_factory=list)
    checksums: list[dict[str, int]] = field(default_factory=list)
    extra: Any = None
    per_rank: Any = None
    signature: list[str] = field(default_factory=list)
    base: dict[str, FrozenParam] | None = None

    def fingerprint(self) -> str:
        """Return a digest of the model's names, shapes and dtypes and of the optimizers' classes and groups."""
        text = hashlib.blake2b(digest_size=16)
        text.update("\0".join(self.signature).encode())
        for optimizer in self.optimizers:
            members = [group["params"] for group in optimizer.groups]
            text.update(repr((optimizer.kind, asdict(replace(optimizer, state={}, groups=())), members)).encode())
        return text.hexdigest()

    def options_digest(self) -> str:
        """Return a digest of the groups' options, which may change from step to step."""
        trees = [group["options"] for optimizer in self.optimizers for group in optimizer.groups]
        return hashlib.blake2b(repr(trees).encode(), digest_size=8).hexdigest()

    def snapshot(self, buffers: dict[str, Tensor]) -> None:
        """Replace every piece by a copy on the CPU, so that training can change the originals.

        Args:
            buffers: the copies of an earlier snapshot by name, which are reused where they fit; then the new copies.
        """
        reusable = dict(buffers)
        buffers.clear()
        for number, piece in enumerate(self.pieces):
            buffer = reusable.get(piece.name)
            if buffer is None or (buffer.dtype, buffer.shape) != (piece.flat.dtype, piece.flat.shape):
                pinned = piece.flat.device.type != "cpu"
                buffer = torch.empty(piece.flat.shape, dtype=piece.flat.dtype, pin_memory=pinned)
            buffers[piece.name] = buffer.copy_(piece.flat)
            self.pieces[number] = replace(piece, flat=buffer)


def plan_save(
    model: nn.Module | None,
    views: Sequence[OptimizerView],
    writes_state: Sequence[bool],
    extra: Mapping[str, Any] | None,
    rank: int,
    world_size: int,
    trainable_only: bool,
) -> SavePlan:
    """Describe the model, the optimizers and ``extra``, and choose this rank's pieces; dense tensors are not copied.

    Args:
        model: the model, wrapped or not.
        views: the optimizers.
        writes_state: for each optimizer, whether this rank writes its state (another replica may write it).
        extra: further data.
        rank: this rank among the ranks that save.
        world_size: the number of ranks that save.
        trainable_only: whether to leave out the values of frozen parameters.
    """
    plan = SavePlan()
    replicated: KeyedTensors = []
    frozen: dict[str, Tensor] = {}
    if model is not None:
        module = unwrapped(model)
        if trainable_only:
            frozen = frozen_parameters(model)
            plan.base = describe_frozen(frozen, rank, world_size)
        saved = {name: value for name, value in module.state_dict().items() if name not in frozen}
        plan.model = model_trees(saved, replicated)
        plan.signature = [f"{key} {tensor.dtype} {tuple(tensor.shape)}" for key, tensor in replicated]
        plan.signature += [f"frozen {name} {param.dtype} {tuple(param.shape)}" for name, param in frozen.items()]
        # Buffers (running statistics) may differ between ranks; DDP continues with the buffers of rank 0.
        params = {part.data_ptr() for param in module.parameters() for part in leaves_of(param)}
        buffers = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() not in params]
        replicated = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() in params]
        if rank == 0:
            plan.pieces += [whole_piece(key, tensor) for key, tensor in buffers]
    for number, (view, writes) in enumerate(zip(views, writes_state, strict=True)):
        _add_optimizer(plan, number, view, writes, replicated, frozen)
    add_extra(plan, extra, rank)
    plan.pieces += _pieces_of_rank(replicated, rank, world_size)
    return plan


def model_trees(state_dict: Mapping[str, Any], replicated: KeyedTensors) -> dict[str, Any]:
    """Return a tree for each name of a model's state dict; append the tensors to ``replicated``, tied ones once."""
    trees: dict[str, Any] = {}
    known: dict[tuple[Any, ...], str] = {}
    for name, value in state_dict.items():
        where = f"{name!r} of the model's state dict"
        tensors: list[Tensor] = []
        tree = tagged_json.encode(value, tensors, where)
        keys = []
        for tensor, part in zip(tensors, names_of_tensors(tree, len(tensors)), strict=True):
            check_storable(tensor, where)
            identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            key = f"model/{name}" if tree[0] == "tensor" else f"model/{name}/{part}"
            if tensor.numel() and identity in known:
                keys.append(known[identity])  # tied: one copy under both names
                continue
            known[identity] = key
            keys.append(key)
            replicated.append((key, tensor))
        trees[name] = with_keys(tree, keys)
    return trees


def keyed_tree(values: Mapping[Any, Any], prefix: str, where: str) -> tuple[Any, KeyedTensors]:
    """Return a dict as a tree with keys in place of tensors, and the tensors with these keys.

    Args:
        values: plain data and tensors.
        prefix: the beginning of every key.
        where: a description of the values, for error messages.
    """
    tensors: list[Tensor] = []
    tree = tagged_json.encode(values, tensors, where)
    keys = [f"{prefix}/{name}" for name in names_of_tensors(tree, len(tensors))]
    return with_keys(tree, keys), list(zip(keys, tensors, strict=True))


def group_tree(
    options: Mapping[str, Any], names: Sequence[str], number: int, position: int
) -> tuple[Any, KeyedTensors]:
    """Return one parameter group as the manifest stores it, and the tensors among its options.

    Args:
        options: the group's options.
        names: the names of its parameters.
        number: the number of the optimizer.
        position: the position of the group in the optimizer.
    """
    where = f"the options of group {position} of optimizer {number}"
    tree, tensors = keyed_tree(options, f"optimizer.{number}/group{position}", where)
    return {"options": tree, "params": list(names)}, tensors


def state_tree(values: Mapping[Any, Any], number: int, name: str) -> tuple[Any, KeyedTensors]:
    """Return the state of one parameter as a tree, and its tensors."""
    return keyed_tree(values, f"optimizer.{number}/{name}", f"state of parameter {name!r}")


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
    params = {
        name: SavedParam(tuple(param.shape), tuple(param.stride()), tagged_json.dtype_name(param.dtype))
        for name, param in zip(view.names, view.params, strict=True)
    }
    groups = []
    members = view.split_by_group(view.names)
    for position, (group, names) in enumerate(zip(view.optimizer.param_groups, members, strict=True)):
        tree, tensors = group_tree(options_of(group), names, number, position)
        groups.append(tree)
        replicated += tensors
    state: dict[str, Any] = {}
    checksums: dict[str, int] = {}
    for shard in view.state_shards() if writes else ():
        name = view.names[shard.index]
        values = state_with_master(shard.state, shard.tensor, shard.param_view)
        if not values or (name in frozen and not shard.state):
            continue
        if shard.is_cut:
            check_not_cut(values, name)
        state[name], tensors = state_tree(values, number, name)
        for _, tensor in tensors:
            check_storable(tensor, f"state of parameter {name!r}")
        if view.zero is None:
            replicated += tensors
        else:
            checksums[name] = _add_shard(plan, shard, tensors)
    plan.optimizers.append(SavedOptimizer(view.kind, view.named, params, tuple(groups), state))
    plan.checksums.append(checksums)


def _add_shard(plan: SavePlan, shard: StateShard, tensors: KeyedTensors) -> int:
    """Add this rank's pieces of one parameter's state; return a checksum of the tensors that each owner has whole."""
    copies: list[Tensor] = []
    for key, tensor in tensors:
        if shard.is_cut and tensor.shape == shard.tensor.shape:
            entry = Entry(tagged_json.dtype_name(tensor.dtype), tuple(shard.param.shape), tuple(shard.param.stride()))
            plan.pieces.append(LivePiece(key, entry, shard.start, shard.stop, flat_view(dense_copy(tensor))))
            continue
        if shard.is_cut:
            copies.append(dense_copy(tensor))
        if shard.start == 0:
            plan.pieces.append(whole_piece(key, tensor))
    return checksum(copies)


def add_extra(plan: SavePlan, extra: Mapping[str, Any] | None, rank: int) -> None:
    """Add ``extra``: the values of rank 0, and the :class:`PerRank` values of every rank."""
    if extra is not None and type(extra) is not dict:
        raise TypeError(f"extra must be a dict, got {type(extra).__qualname__}")
    of_rank_0 = {key: value for key, value in (extra or {}).items() if not isinstance(value, PerRank)}
    per_rank = {key: value.value for key, value in (extra or {}).items() if isinstance(value, PerRank)}
    plan.extra = _add_values(plan, of_rank_0, "extra", writes=rank == 0)
    plan.per_rank = _add_values(plan, per_rank, f"rank{rank}", writes=True)


def _add_values(plan: SavePlan, values: Mapping[str, Any], prefix: str, writes: bool) -> Any:
    """Return values of ``extra`` as a tree; add their tensors as pieces if this rank writes them."""
    tensors: list[Tensor] = []
    tree = tagged_json.encode(values, tensors, "extra")
    keys = [f"{prefix}/{number}" for number in range(len(tensors))]
    for key, tensor in zip(keys, tensors, strict=True) if writes else ():
        check_storable(tensor, "a tensor in extra")
        plan.pieces.append(whole_piece(key, tensor))
    return with_keys(tree, keys)


def whole_piece(key: str, tensor: Tensor) -> LivePiece:
    """Return a whole tensor as one piece."""
    dense = dense_copy(tensor)
    return LivePiece(key, entry_of(dense), 0, dense.numel(), flat_view(dense))


def _pieces_of_rank(replicated: Iterable[tuple[str, Tensor]], rank: int, world_size: int) -> list[LivePiece]:
    """Return this rank's pieces of tensors that are equal on all ranks: an equal part of the bytes for each rank."""
    found = [(key, dense_copy(tensor)) for key, tensor in replicated]
    ranges = divide([(tensor.numel(), tensor.element_size()) for _, tensor in found], rank, world_size)
    pieces = []
    for (key, tensor), (start, stop) in zip(found, ranges, strict=True):
        if start < stop or (tensor.numel() == 0 and rank == 0):
            pieces.append(LivePiece(key, entry_of(tensor), start, stop, flat_view(tensor)[start:stop]))
    return pieces


def divide(sizes: Sequence[tuple[int, int]], rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the range ``(start, stop)`` of each tensor that one rank writes; the ranges of all ranks cover everything.

    Args:
        sizes: for each tensor the number of elements and the bytes of an element.
        rank: the rank that writes.
        world_size: the number of ranks.
    """
    total = sum(count * size for count, size in sizes)
    low, high = rank * total // world_size, (rank + 1) * total // world_size
    ranges, offset = [], 0
    for count, size in sizes:

        def place(cut: int, offset: int = offset, count: int = count, size: int = size) -> int:
            element = (cut - offset) // size
            return count if element >= count else max(0, element // CUT_MULTIPLE * CUT_MULTIPLE)

        stop = count if rank == world_size - 1 else place(high)
        ranges.append((place(low) if rank else 0, stop))
        offset += count * size
    return ranges


def entry_of(dense: Tensor) -> Entry:
    """Return the description of a dense tensor, without pieces yet."""
    return Entry(tagged_json.dtype_name(dense.dtype), tuple(dense.shape), tuple(dense.stride()))
