"""What one rank writes of a model, its optimizers and other data: pieces of tensors, and trees of plain data."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint.files import LivePiece, check_storable
from onecopy.checkpoint.manifest import Entry, SavedOptimizer, SavedParam, names_of_tensors, with_keys
from onecopy.checkpoint.optimizer_view import OptimizerView, StateShard, is_per_element, state_with_master, unwrapped
from onecopy.common import tagged_json
from onecopy.common.flat_views import dense_copy, flat_view, to_bytes
from onecopy.layout import CUT_MULTIPLE


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value of ``extra`` that every rank has of its own, such as the state of its random numbers."""

    value: Any


@dataclass(slots=True)
class Contents:
    """One rank's part of a checkpoint.

    Attributes:
        pieces: the memory it writes.
        model: for each name of the state dict a tree; the same on all ranks.
        optimizers: what is the same on all ranks, with the state of those parameters of which this rank has some.
        owners: by optimizer and parameter, where this rank's part begins, and a checksum of what all owners share.
        extra: a tree; rank 0's counts.
        own: a tree of this rank's own.
        signature: names, shapes and types of the model's tensors, in text.
    """

    pieces: list[LivePiece] = field(default_factory=list)
    model: dict[str, Any] | None = None
    optimizers: list[SavedOptimizer] = field(default_factory=list)
    owners: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    extra: Any = None
    own: Any = None
    signature: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """Of the model's names, shapes and types, and the optimizers' classes, parameters and groups."""
        text = hashlib.blake2b(digest_size=16)
        text.update("\0".join(self.signature).encode())
        for optimizer in self.optimizers:
            members = [group["params"] for group in optimizer.groups]
            text.update(repr((optimizer.kind, asdict(replace(optimizer, state={}, groups=())), members)).encode())
        return text.hexdigest()

    def options(self) -> str:
        """Of the groups' options, which change from step to step."""
        trees = [group["options"] for optimizer in self.optimizers for group in optimizer.groups]
        return hashlib.blake2b(repr(trees).encode(), digest_size=8).hexdigest()

    def described(self) -> list[Any]:
        """What rank 0 needs to know, as JSON data, beside the pieces."""
        return [
            [optimizer.state for optimizer in self.optimizers],
            self.owners,
            self.own,
        ]

    def snapshot(self, memory: dict[str, Tensor]) -> None:
        """Copy everything, so that training can go on, into memory that an earlier snapshot has left, where it fits."""
        before = dict(memory)
        memory.clear()
        for number, piece in enumerate(self.pieces):
            home = before.get(piece.name)
            if home is None or (home.dtype, home.shape) != (piece.flat.dtype, piece.flat.shape):
                pinned = piece.flat.device.type != "cpu"
                home = torch.empty(piece.flat.shape, dtype=piece.flat.dtype, pin_memory=pinned)
            memory[piece.name] = home.copy_(piece.flat)
            self.pieces[number] = replace(piece, flat=home)


def collect(
    model: nn.Module | None,
    views: Sequence[OptimizerView],
    writes: Sequence[bool],
    extra: Mapping[str, Any] | None,
    rank: int,
    world_size: int,
) -> Contents:
    """Describe everything and pick out what this rank writes; nothing is copied that lies well in memory.

    Args:
        model: the model, wrapped or not.
        views: the optimizers.
        writes: for each of them, whether this rank's part of its state is to be written (there may be replicas).
        extra: other data.
        rank: this rank among those that save.
        world_size: how many save.
    """
    contents = Contents()
    replicated: list[tuple[str, Tensor]] = []
    if model is not None:
        module = unwrapped(model)
        contents.model = model_trees(module.state_dict(), replicated)
        contents.signature = [f"{key} {tensor.dtype} {tuple(tensor.shape)}" for key, tensor in replicated]
        # Ranks may have different buffers (running statistics); DDP goes on with those of rank 0.
        params = {param.data_ptr() for param in module.parameters()}
        buffers = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() not in params]
        replicated = [(key, tensor) for key, tensor in replicated if tensor.data_ptr() in params]
        if rank == 0:
            contents.pieces += _share_of(buffers, 0, 1)
    for number, (view, here) in enumerate(zip(views, writes, strict=True)):
        _add_optimizer(contents, number, view, here, replicated)
    add_extra(contents, extra, rank)
    contents.pieces += _share_of(replicated, rank, world_size)
    return contents


def model_trees(state_dict: Mapping[str, Any], replicated: list[tuple[str, Tensor]]) -> dict[str, Any]:
    """A tree for each name of a model's state dict; tensors are appended to ``replicated``, tied ones once."""
    trees: dict[str, Any] = {}
    known: dict[tuple[Any, ...], str] = {}
    for name, value in state_dict.items():
        where = f"{name!r} of the model's state dict"
        tensors: list[Tensor] = []
        tree = tagged_json.encode(value, tensors, where)
        keys = []
        for tensor, part in zip(tensors, names_of_tensors(tree, len(tensors)), strict=True):
            check_storable(tensor, where)
            same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            key = f"model/{name}" if isinstance(value, Tensor) else f"model/{name}/{part}"
            if tensor.numel() and same in known:
                keys.append(known[same])  # tied: one copy under both names
                continue
            known[same] = key
            keys.append(key)
            replicated.append((key, tensor))
        trees[name] = with_keys(tree, keys)
    return trees


def _add_optimizer(
    contents: Contents, number: int, view: OptimizerView, here: bool, replicated: list[tuple[str, Tensor]]
) -> None:
    view.check_state_keys()
    params = {
        name: SavedParam(tuple(param.shape), tuple(param.stride()), name_of(param.dtype))
        for name, param in zip(view.names, view.params, strict=True)
    }
    groups = []
    for position, (options, names) in enumerate(view.groups()):
        tensors: list[Tensor] = []
        tree = tagged_json.encode(options, tensors, f"the options of group {position} of {view.kind}")
        keys = [f"optimizer.{number}/group{position}/{name}" for name in names_of_tensors(tree, len(tensors))]
        replicated += zip(keys, tensors, strict=True)
        groups.append({"options": with_keys(tree, keys), "params": names})
    state: dict[str, Any] = {}
    owners: dict[str, tuple[int, int]] = {}
    for shard in view.state_shards():
        values = state_with_master(shard)
        if not values or not here:
            continue
        name, param = view.names[shard.index], view.params[shard.index]
        tensors = []
        where = f"state of parameter {name!r}"
        tree = tagged_json.encode(values, tensors, where)
        keys = [f"optimizer.{number}/{name}/{part}" for part in names_of_tensors(tree, len(tensors))]
        state[name] = with_keys(tree, keys)
        shared = 0
        for key, tensor in zip(keys, tensors, strict=True):
            check_storable(tensor, where)
            if view.zero is None:
                replicated.append((key, tensor))
                continue
            shared = _add_owned(contents, key, tensor, shard, param, shared)
        owners[name] = (shard.start, shared)
    contents.optimizers.append(SavedOptimizer(view.kind, view.named, params, tuple(groups), state))
    contents.owners.append(owners)


def _add_owned(contents: Contents, key: str, tensor: Tensor, shard: StateShard, param: Tensor, shared: int) -> int:
    """Add a tensor of sharded state; return the checksum of what owners share, with it if they share it."""
    whole = shard.stop - shard.start == param.numel()
    dense = dense_copy(tensor)
    if whole or not is_per_element(tensor, shard):
        if not whole:
            shared = zlib.crc32(to_bytes(flat_view(dense).view(torch.uint8)), shared)
        if shard.start == 0:
            entry = entry_of(dense)
            contents.pieces.append(LivePiece(key, entry, 0, entry.numel, flat_view(dense)))
    else:
        entry = Entry(name_of(tensor.dtype), tuple(param.shape), tuple(param.stride()))
        contents.pieces.append(LivePiece(key, entry, shard.start, shard.stop, flat_view(dense)))
    return shared


def add_extra(contents: Contents, extra: Mapping[str, Any] | None, rank: int) -> None:
    """Add other data: rank 0's, and what each rank has of its own."""
    if extra is not None and type(extra) is not dict:
        raise TypeError(f"extra must be a dict, got {type(extra).__qualname__}")
    shared = {key: value for key, value in (extra or {}).items() if not isinstance(value, PerRank)}
    own = {key: value.value for key, value in (extra or {}).items() if isinstance(value, PerRank)}
    trees = []
    for place, values in (("extra", shared), (f"rank{rank}", own)):
        tensors: list[Tensor] = []
        tree = tagged_json.encode(values, tensors, "extra")
        keys = [f"{place}/{number}" for number in range(len(tensors))]
        if rank == 0 or values is own:
            for key, tensor in zip(keys, tensors, strict=True):
                check_storable(tensor, "a tensor in extra")
                dense = dense_copy(tensor)
                entry = entry_of(dense)
                contents.pieces.append(LivePiece(key, entry, 0, entry.numel, flat_view(dense)))
        trees.append(with_keys(tree, keys))
    contents.extra, contents.own = trees


def _share_of(replicated: Iterable[tuple[str, Tensor]], rank: int, world_size: int) -> list[LivePiece]:
    """This rank's part of what all ranks hold alike: an equal share of the bytes."""
    found = [(key, dense_copy(tensor)) for key, tensor in replicated]
    ranges = divide([(tensor.numel(), tensor.element_size()) for _, tensor in found], rank, world_size)
    pieces = []
    for (key, tensor), (start, stop) in zip(found, ranges, strict=True):
        if start < stop or (tensor.numel() == 0 and rank == 0):
            pieces.append(LivePiece(key, entry_of(tensor), start, stop, flat_view(tensor)[start:stop]))
    return pieces


def divide(sizes: Sequence[tuple[int, int]], rank: int, world_size: int) -> list[tuple[int, int]]:
    """The elements of each of some tensors (count and size of an element) that one rank writes; all ranks cover all."""
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
    """A dense tensor's description, without pieces yet."""
    return Entry(name_of(dense.dtype), tuple(dense.shape), tuple(dense.stride()))


def name_of(dtype: torch.dtype) -> str:
    """A data type's name."""
    return str(dtype).removeprefix("torch.")
