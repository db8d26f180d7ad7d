"""Sharded optimizer state by parameter name, in tensors that torch.distributed.checkpoint (DCP) can save and load.

A flat range of a tensor with n dimensions is at most 2n - 1 rectangles, and each rectangle is a view of the range. A
tensor subclass gives these rectangles to DCP's planner through the (private) protocol that DTensor uses. The public
protocol, ``torch.distributed.checkpoint.CheckpointableTensor``, is not used: torch 2.13 does not have it and would need
these methods all the same, and its parts are slices of one tensor, but the rectangles of a flat range are not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from onecopy.common import nested_tensors
from onecopy.common.flat_views import flat_view
from onecopy.common.tensor_subclasses import is_composed
from onecopy.common.torch_private import ALIASING, NEW_EMPTY, bare_step, no_torch_function, tensor_without_memory
from onecopy.layout import Layout, ParamSpec
from onecopy.state_dict.forms import named_groups, state_with_master
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.owned_shards import OwnedShard
from onecopy.step.parameter_groups import Group, options_of

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset and the size in each dimension."""


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Divide the elements ``[start, stop)`` of a row-major tensor into rectangles, in memory order."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if (start, stop) == (0, prod(shape)):
        return [((0,) * len(shape), tuple(shape))]
    inner = prod(shape[1:])
    found: list[Rectangle] = []

    def within(row: int, low: int, high: int) -> None:
        found.extend(((row, *offsets), (1, *sizes)) for offsets, sizes in rectangles(shape[1:], low, high))

    first, last = start // inner, stop // inner  # the rows of the first element and of the end
    if first == last:
        within(first, start - first * inner, stop - first * inner)
        return found
    if start % inner:
        within(first, start - first * inner, inner)
        first += 1
    if first < last:
        found.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if stop % inner:
        within(last, 0, stop - last * inner)
    return found


class ShardedState(Tensor):
    """A tensor of optimizer state of which this rank has one flat range.

    Attributes:
        flat: the values of the range, in the memory order of the full tensor.
        start: the offset of the range in the full tensor.
    """

    flat: Tensor
    start: int

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, flat: Tensor, start: int, like: Tensor) -> ShardedState:
        """Make a tensor with the shape and strides of the full tensor ``like``; it has no memory but ``flat``."""
        made = tensor_without_memory(cls, like, flat.device)
        made.flat = flat
        made.start = start
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedState({self.flat.numel()} of {self.numel()} elements from {self.start} on, {self.flat})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation leaves the function out
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ALIASING or func is NEW_EMPTY:  # DCP's stagers then replace ``flat`` of an empty one by a copy
            return ShardedState(args[0].flat, args[0].start, args[0])
        raise RuntimeError(
            f"{func} on sharded optimizer state: only this rank's range of it is here (.flat). Save it with "
            "torch.distributed.checkpoint, or ask for the full state"
        )

    def _parts(self) -> list[tuple[Rectangle, Tensor]]:
        """Return the rectangles of the full tensor that this rank has, each with a view of its values."""
        strides = self.stride()
        order = sorted(range(self.dim()), key=lambda dim: (-strides[dim], dim))
        back = [order.index(dim) for dim in range(self.dim())]
        parts, position = [], 0
        for offsets, sizes in rectangles(
            [self.shape[dim] for dim in order], self.start, self.start + self.flat.numel()
        ):
            count = prod(sizes)
            view = self.flat[position : position + count].view(sizes).permute(back)
            parts.append(((tuple(offsets[place] for place in back), tuple(sizes[place] for place in back)), view))
            position += count
        return parts

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        """Return the rectangles that DCP's planner writes."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the rectangles into which DCP's planner reads."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for (offsets, sizes), _ in self._parts()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the view of one rectangle."""
        for (offsets, _), view in self._parts():
            if index.offset is None or torch.Size(offsets) == index.offset:
                return view
        raise ValueError(f"this rank has no part of {index.fqn!r} at {index.offset}")


def sharded_state_dict(
    local: InnerOptimizer, layout: Layout, groups: Sequence[Group], names: Sequence[str], to_load: bool
) -> dict[str, Any]:
    """Return the options and this rank's shards of the state by name; the tensors are views of the live state.

    Args:
        local: this rank's inner optimizer.
        layout: which rank owns which shard.
        groups: the user's parameter groups.
        names: the parameters' names.
        to_load: for parameters that need a gradient and have no state yet, allocate state to load into. The optimizer
            itself does not change.
    """
    state = {}
    for owned in local.owned:
        values = dict(local.optim.state.get(owned.tensor, {}))
        if not values and to_load and owned.param.requires_grad:
            values = _first_state(local, owned, groups[layout.params[owned.shard.param].group])
        values = state_with_master(values, owned.tensor, owned.param_view)
        if values:
            spec = layout.params[owned.shard.param]
            _check_types(values, names[spec.index])
            state[names[spec.index]] = nested_tensors.map_tensors(values, functools.partial(_as_sharded, owned, spec))
    return {"state": state, "param_groups": named_groups(groups, names)}


def _check_types(values: Mapping[Any, Any], name: str) -> None:
    """Raise if the state of a parameter has a tensor that DCP cannot save in parts and load in place."""
    for tensor in nested_tensors.tensors_in(values):
        if is_composed(tensor):
            raise TypeError(
                f"the state of parameter {name!r} is a {type(tensor).__qualname__}, which consists of other tensors: "
                "save it with onecopy.checkpoint.save, or ask for the full state (full_state_dict=True)"
            )


def _as_sharded(owned: OwnedShard, spec: ParamSpec, tensor: Tensor) -> Tensor:
    """Return a tensor of the state, as a :class:`ShardedState` if this rank has only a range of it."""
    if not owned.is_cut or tensor.shape != owned.tensor.shape:
        return tensor.detach()
    like = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device="meta")
    return ShardedState(flat_view(tensor.detach()), owned.shard.start, like)


def _first_state(local: InnerOptimizer, owned: OwnedShard, group: Group) -> dict[Any, Any]:
    """Return the state that the class makes for a tensor, by a step of a second instance on zeros."""
    scratch = torch.zeros_like(owned.tensor).requires_grad_()
    options = nested_tensors.map_tensors(options_of(group), torch.clone)
    inner = local.optimizer_class([{**options, "params": [scratch]}], **local.defaults)
    scratch.grad = torch.zeros_like(scratch)
    bare_step(inner)()
    state = dict(inner.state.get(scratch, {}))
    count = state.get("step")
    if isinstance(count, Tensor):
        count.zero_()
    elif isinstance(count, (int, float)):
        state["step"] = type(count)(0)
    return state


def local_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter with this rank's flat range in place of each :class:`ShardedState`."""

    def local(tensor: Tensor) -> Tensor:
        return tensor.flat if isinstance(tensor, ShardedState) else tensor

    values: dict[str, Any] = nested_tensors.map_tensors(dict(state), local)
    return values
