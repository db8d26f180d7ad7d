"""Optimizer state by parameter name, of which each rank has its part, as torch.distributed.checkpoint can read it.

A flat range of a tensor with n dimensions is at most 2n - 1 rectangles, each a view of the range without a copy. A
tensor subclass shows these to the stock planner through the (private) protocol that DTensor uses. The public one,
``torch.distributed.checkpoint.CheckpointableTensor``, is not used: torch 2.13 does not have it and would need these
methods all the same, and its parts are slices of one tensor, which the rectangles of a flat range are not.
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

from onecopy.common import tagged_json
from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import ALIASING, NEW_EMPTY, bare_step, no_torch_function, tensor_without_memory
from onecopy.layout import Layout, ParamSpec
from onecopy.step import master_weights
from onecopy.step.group_options import options_of
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.owned_shards import OwnedShard
from onecopy.step.parameter_groups import Group, first_places

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and how large it is, in each dimension."""


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The elements ``[start, stop)`` of a row-major tensor as rectangles, in the order in which memory holds them."""
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

    first, last = start // inner, stop // inner  # rows in which it begins and ends
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
    """A tensor of the optimizer's state, of which this rank has the elements from ``start`` on, in :attr:`flat`.

    Attributes:
        flat: the values, in the memory order of the whole.
        start: where in the whole they begin.
    """

    flat: Tensor
    start: int

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, flat: Tensor, start: int, like: Tensor) -> ShardedState:
        """A tensor with the shape and strides of ``like``, without memory of its own."""
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
        if func in ALIASING or func is NEW_EMPTY:  # an empty one is then given a copy's values, by torch's stagers
            return ShardedState(args[0].flat, args[0].start, args[0])
        raise RuntimeError(
            f"{func} on sharded optimizer state: only this rank's range of it is here (.flat). Save it with "
            "torch.distributed.checkpoint, or ask for the full state"
        )

    def _parts(self) -> list[tuple[Rectangle, Tensor]]:
        """Rectangles of the whole, in its own dimensions, and views of what is here."""
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
        """What torch's planner writes."""
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
        """What torch's planner reads into."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for (offsets, sizes), _ in self._parts()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one rectangle."""
        for (offsets, _), view in self._parts():
            if index.offset is None or torch.Size(offsets) == index.offset:
                return view
        raise ValueError(f"rank has no part of {index.fqn!r} at {index.offset}")


def sharded_state_dict(
    local: InnerOptimizer, layout: Layout, groups: Sequence[Group], names: Sequence[str], to_load: bool
) -> dict[str, Any]:
    """Options, and what this rank owns of the state, by name; tensors are the live ones, or views of them.

    Args:
        local: this rank's optimizer.
        layout: who owns what.
        groups: the parameter groups that people see.
        names: the parameters' names.
        to_load: give parameters that need a gradient and have no state yet memory for it. The optimizer itself is left
            as it is.
    """
    state = {}
    for owned in local.owned:
        values = dict(local.optim.state.get(owned.tensor, {}))
        if not values and to_load and owned.param.requires_grad:
            values = _first_state(local, owned, groups[layout.params[owned.shard.param].group])
        if owned.param_view is not None:
            values[master_weights.STATE_KEY] = owned.tensor.detach()
        if values:
            spec = layout.params[owned.shard.param]
            state[names[spec.index]] = tagged_json.map_tensors(values, functools.partial(_shown, owned, spec))
    start, shown = 0, []
    for group in groups:
        count = len(first_places(group["params"]))
        shown.append({**options_of(group), "params": list(names[start : start + count])})
        start += count
    return {"state": state, "param_groups": shown}


def _shown(owned: OwnedShard, spec: ParamSpec, tensor: Tensor) -> Tensor:
    if not owned.is_cut or tensor.shape != owned.tensor.shape:
        return tensor.detach()
    like = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device="meta")
    return ShardedState(flat_view(tensor.detach()), owned.shard.start, like)


def _first_state(local: InnerOptimizer, owned: OwnedShard, shown: Group) -> dict[Any, Any]:
    """The state that the class makes for such a tensor, from a step of another instance of it on zeros."""
    scratch = torch.zeros_like(owned.tensor).requires_grad_()
    group = tagged_json.map_tensors(options_of(shown), torch.clone)
    inner = local.optimizer_class([{**group, "params": [scratch]}], **local.defaults)
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
    """State of one parameter with this rank's flat ranges in place of what stands for the whole."""

    def local(tensor: Tensor) -> Tensor:
        return tensor.flat if isinstance(tensor, ShardedState) else tensor

    values: dict[str, Any] = tagged_json.map_tensors(dict(state), local)
    return values
