"""Optimizer state for torch.distributed.checkpoint (DCP): the functions that get and set it, for sharded optimizers.

A flat range of a tensor with n dimensions is at most 2n - 1 rectangles, and each rectangle is a view of the range. A
tensor subclass gives these rectangles to DCP's planner through the (private) protocol that DTensor uses. The public
protocol, ``torch.distributed.checkpoint.CheckpointableTensor``, is not used: torch 2.13 does not have it and would need
these methods all the same, and its parts are slices of one tensor, but the rectangles of a flat range are not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.common import nested_tensors
from onecopy.common.flat_views import flat_view
from onecopy.common.tensor_subclasses import is_composed
from onecopy.common.torch_private import ALIASING, NEW_EMPTY, bare_step, no_torch_function, tensor_without_memory
from onecopy.errors import CheckpointMismatchError
from onecopy.state_dict.gather import consolidate
from onecopy.state_dict.load import finish_load, load_inner, restored_on_failure
from onecopy.state_dict.shards import (
    OptimizerView,
    StateShard,
    named_groups,
    optimizer_views,
    owned_state,
    plain_state_dict,
    shown_kinds,
)
from onecopy.step import master_weights
from onecopy.step.engine import Engine, sharded_collectives
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import Group, options_of
from onecopy.step.several_classes import match_classes

StateDict = dict[str, Any]

GET = "get_optimizer_state_dict()"
SET = "set_optimizer_state_dict()"

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


def sharded_state_dict(engine: Engine, groups: Sequence[Group], names: Sequence[str], to_load: bool) -> StateDict:
    """Return the options and this rank's shards of the state by name; the tensors are views of the live state.

    Args:
        engine: the engine of a sharded optimizer.
        groups: the user's parameter groups.
        names: the parameters' names.
        to_load: for parameters that need a gradient and have no state or average yet, allocate memory to load into. The
            optimizer itself does not change.
    """
    state = {}
    for shard in owned_state(engine.inner, names, to_load):
        if not shard.state and to_load and shard.param.requires_grad:
            group = groups[engine.layout.params[shard.index].group]
            shard = replace(shard, state=_first_state(engine.inner, shard.tensor, group))
        values = shard.whole_state()
        if values:
            _check_types(values, shard.name)
            state[shard.name] = nested_tensors.map_tensors(values, functools.partial(_as_sharded, shard))
    return {"state": state, "param_groups": named_groups(groups, names)}


def _check_types(values: Mapping[Any, Any], name: str) -> None:
    """Raise if the state of a parameter has a tensor that DCP cannot save in parts and load in place."""
    for tensor in nested_tensors.tensors_in(values):
        if is_composed(tensor):
            raise TypeError(
                f"the state of parameter {name!r} is a {type(tensor).__qualname__}, which consists of other tensors: "
                "save it with onecopy.checkpoint.save, or ask for the full state (full_state_dict=True)"
            )


def _as_sharded(shard: StateShard, tensor: Tensor) -> Tensor:
    """Return a tensor of the state, as a :class:`ShardedState` if this rank has only a range of it."""
    if not shard.is_cut or tensor.shape != shard.tensor.shape:
        return tensor.detach()
    like = torch.empty_strided(shard.param.shape, shard.param.stride(), dtype=tensor.dtype, device="meta")
    return ShardedState(flat_view(tensor.detach()), shard.start, like)


def _first_state(local: InnerOptimizer, tensor: Tensor, group: Group) -> dict[Any, Any]:
    """Return the state that the class makes for a tensor, by a step of a second instance on zeros."""
    scratch = torch.zeros_like(tensor).requires_grad_()
    options = nested_tensors.map_tensors(options_of(group), torch.clone)
    inner = local.classes.construct([{**options, "params": [scratch]}])
    scratch.grad = torch.zeros_like(scratch)
    bare_step(inner)()
    state = dict(inner.state.get(scratch, {}))
    count = state.get("step")
    if isinstance(count, Tensor):
        count.zero_()
    elif isinstance(count, (int, float)):
        state["step"] = type(count)(0)
    return state


# The functions


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """Return the state of one or several optimizers by the model's parameter names; sharded optimizers do not change.

    By default each rank gets its shards, in tensors that ``torch.distributed.checkpoint`` saves and loads with any
    number of ranks. Parameters without state get memory to load it into. With ``full_state_dict`` every rank gets the
    full state; with ``cpu_offload`` as well only rank 0. All ranks make this call together, with the same options. If
    one rank fails, all ranks raise.

    Args:
        model: the model.
        optimizers: its optimizers; torch's function handles the plain ones.
        submodules: not supported for sharded optimizers.
        options: torch's options ``full_state_dict`` and ``cpu_offload``; others are not supported.
    """
    options = options or StateDictOptions()
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    collectives = sharded_collectives(given)
    if collectives is None:
        return torch_state_dict.get_optimizer_state_dict(model, given, submodules=submodules, options=options)
    with FailTogether(collectives, GET) as together:
        _check_supported(options, submodules)
        views = optimizer_views(model, given)
        for view in views:
            if view.engine is not None:
                view.check_state_keys()
        together.facts = _facts(model, views, options)
    found: StateDict = {"state": {}, "param_groups": []}
    for view in views:
        part: Mapping[str, Any]
        if view.engine is not None and options.full_state_dict:
            part = _full(view, view.engine, on_rank_0_only=options.cpu_offload)
        else:
            with FailTogether(collectives, GET):
                part = _local(model, view, options)
        found["state"].update(part.get("state", {}))
        found["param_groups"] += part.get("param_groups", [])
    only_rank_0 = options.full_state_dict and options.cpu_offload
    return {} if only_rank_0 and not found["param_groups"] else found


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a state dict of :func:`get_optimizer_state_dict`, or of torch's function of that name.

    All ranks make this call together, with the same options. If one rank fails, all ranks raise, and the optimizer that
    was being loaded has not changed; optimizers before it in the list have.

    Args:
        model: the model.
        optimizers: its optimizers; torch's function handles the plain ones.
        optim_state_dict: this optimizer's shards, or with ``full_state_dict`` the full state, on every rank.
        options: torch's options ``full_state_dict`` and ``cpu_offload``; others are not supported.
    """
    options = options or StateDictOptions()
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    collectives = sharded_collectives(given)
    if collectives is None:
        torch_state_dict.set_optimizer_state_dict(model, given, dict(optim_state_dict), options=options)
        return
    with FailTogether(collectives, SET) as together:
        _check_supported(options)
        views = optimizer_views(model, given)
        if not isinstance(optim_state_dict, Mapping) or not {"state", "param_groups"} <= set(optim_state_dict):
            raise TypeError(f"a state dict with 'state' and 'param_groups' is needed, got {optim_state_dict!r:.80}")
        state_dict = dict(optim_state_dict)
        together.facts = _facts(model, views, options)
    for view in views:
        if view.engine is not None:
            _load(view, view.engine, state_dict, options.full_state_dict)
            continue
        with FailTogether(collectives, SET):
            part = _restricted(state_dict, view)
            torch_state_dict.set_optimizer_state_dict(model, view.optimizer, part, options=StateDictOptions())


def _check_supported(options: StateDictOptions, submodules: object = None) -> None:
    unsupported = ("ignore_frozen_params", "flatten_optimizer_state_dict", "broadcast_from_rank0")
    wanted = [name for name in unsupported if getattr(options, name)] + ["submodules"] * bool(submodules)
    if wanted:
        raise ValueError(
            f"{wanted[0]} is not supported for sharded optimizers: use their shards, or with full_state_dict=True the "
            "full state on every rank"
        )


def _facts(model: nn.Module | None, views: Sequence[OptimizerView], options: StateDictOptions) -> list[Fact]:
    """Return facts about the arguments that decide which messages are sent."""
    facts = [Fact("model", "None" if model is None else "given"), Fact("optimizer", shown_kinds(views))]
    return [*facts, *(Fact(name, str(bool(getattr(options, name)))) for name in ("full_state_dict", "cpu_offload"))]


def _local(model: nn.Module, view: OptimizerView, options: StateDictOptions) -> Mapping[str, Any]:
    """Return the state of a plain optimizer, or this rank's shards, as copies on the CPU if asked for."""
    if view.engine is None:
        plain = StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
        return torch_state_dict.get_optimizer_state_dict(model, view.optimizer, options=plain)
    found = sharded_state_dict(view.engine, view.optimizer.param_groups, view.names, to_load=True)

    def to_cpu(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedState):
            return ShardedState(tensor.flat.to("cpu", copy=True), tensor.start, tensor)
        return tensor.to("cpu", copy=True)

    return nested_tensors.map_tensors(found, to_cpu) if options.cpu_offload else found


def _full(view: OptimizerView, engine: Engine, on_rank_0_only: bool) -> StateDict:
    """Return the full state on every rank, or on rank 0 and an empty dict on the others."""
    groups = view.optimizer.param_groups
    found: dict[int, dict[Any, Any]] | None = None
    for rank in range(1 if on_rank_0_only else engine.collectives.world_size):
        state = consolidate(engine, groups, rank)
        found = state if state is not None else found
    if found is None:
        return {}
    by_name = {view.names[index]: values for index, values in found.items()}
    return {"state": by_name, "param_groups": nested_tensors.copy_tree(named_groups(groups, view.names))}


def _load(view: OptimizerView, engine: Engine, state_dict: StateDict, is_full: bool) -> None:
    with FailTogether(engine.collectives, SET) as together:
        options = _options_for(view, state_dict["param_groups"])
        names = set(view.names)
        state = {name: values for name, values in state_dict["state"].items() if name in names}
        if is_full:
            members = view.split_by_group(view.names)
            groups = [{**values, "params": part} for values, part in zip(options, members, strict=True)]
            plain = plain_state_dict(state, groups)
        else:
            states, masters = _owned_states(view, state)
            together.flag = bool(states)
    if is_full:
        view.optimizer.load_state_dict(plain)
        return
    with restored_on_failure(engine, SET):
        load_inner(engine.inner, states, options, as_saved=True)
    finish_load(engine, view.optimizer.param_groups, options, masters, has_state=together.any_flag)
    engine.allow_steps()


def _options_for(view: OptimizerView, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved options for each of an optimizer's groups, found by the names of its parameters."""
    by_name = {name: group for group in groups for name in group["params"]}
    found = []
    for position, names in enumerate(view.split_by_group(view.names)):
        missing = [name for name in names if name not in by_name]
        if missing:
            raise CheckpointMismatchError(f"the state dict has no parameter {missing[0]!r} of group {position}")
        saved = by_name[names[0]] if names else {}
        misplaced = [name for name in names if by_name[name] is not saved]
        if misplaced:
            raise CheckpointMismatchError(
                f"{names[0]!r} and {misplaced[0]!r} are in different groups of the state dict"
            )
        found.append(options_of(dict(saved)))
    match_classes(found, view.optimizer.param_groups, view.kind)
    return nested_tensors.copy_tree(found)  # type: ignore[no-any-return]


def _owned_states(
    view: OptimizerView, state: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[int, dict[Any, Any]], dict[int, Tensor]]:
    """Return the state of this rank's shards and its master weights, by parameter; raise if the shards are others."""
    states, masters = {}, {}
    shards = {shard.name: shard for shard in view.state_shards()}
    for name, saved in state.items():
        if name not in shards:
            raise _other_range(name)
        values = _local_values(saved, shards[name])
        master = values.pop(master_weights.STATE_KEY, None)
        if master is not None:
            masters[shards[name].index] = master.view(shards[name].tensor.shape)
        if values:
            states[shards[name].index] = values
    return states, masters


def _local_values(saved: Mapping[str, Any], shard: StateShard) -> dict[str, Any]:
    """Return the state of one shard with this rank's flat range in place of each :class:`ShardedState`."""

    def local(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedState):
            return tensor
        if (tensor.start, tensor.flat.numel(), tensor.shape) != (shard.start, shard.numel, shard.param.shape):
            raise _other_range(shard.name)
        return tensor.flat

    values: dict[str, Any] = nested_tensors.map_tensors(dict(saved), local)
    for key, value in values.items():
        is_per_element = isinstance(value, Tensor) and (
            key == master_weights.STATE_KEY or (shard.is_cut and value.dim() > 0)
        )
        if is_per_element and value.numel() != shard.numel:
            raise _other_range(shard.name)
    return values


def _other_range(name: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"there is state of parameter {name!r} in another range than this rank owns: load the checkpoint into what "
        "get_optimizer_state_dict() returns for this optimizer, or pass the full state and full_state_dict=True"
    )


def _restricted(state_dict: StateDict, view: OptimizerView) -> StateDict:
    names = set(view.names)
    return {
        "state": {name: values for name, values in state_dict["state"].items() if name in names},
        "param_groups": [group for group in state_dict["param_groups"] if names.intersection(group["params"])],
    }
