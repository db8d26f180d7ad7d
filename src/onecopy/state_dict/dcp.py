"""Optimizer state for torch.distributed.checkpoint (DCP): the functions that get and set it, for sharded optimizers.

A flat range of a tensor with n dimensions is at most 2n - 1 rectangles, and each rectangle is a view of the range. A
tensor subclass gives these rectangles to DCP's planner through the (private) protocol that DTensor uses. The public
protocol, ``torch.distributed.checkpoint.CheckpointableTensor``, is not used: torch 2.13 does not have it and would need
these methods all the same, and its parts are slices of one tensor, but the rectangles of a flat range are not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from onecopy.comm.agreement import Fact, FailTogether, FirstFailure
from onecopy.comm.collectives import Collectives
from onecopy.common import nested_tensors, tagged_json
from onecopy.common.flat_views import flat_view
from onecopy.common.tensor_subclasses import is_composed
from onecopy.common.torch_private import ALIASING, NEW_EMPTY, bare_step, no_torch_function, tensor_without_memory
from onecopy.errors import CheckpointMismatchError
from onecopy.layout import Layout, ParamSpec
from onecopy.state_dict.gather import consolidate
from onecopy.state_dict.load import finish_load, load_owned_state, restored_on_failure
from onecopy.state_dict.shards import (
    OptimizerView,
    StateShard,
    named_groups,
    optimizer_views,
    plain_state_dict,
    shown_kinds,
    state_with_master,
)
from onecopy.step import master_weights
from onecopy.step.engine import Engine, sharded_collectives
from onecopy.step.gradients import OwnedShard
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import Group, options_of

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
        submodules: not supported.
        options: torch's options; ``ignore_frozen_params`` is not supported.
    """
    options = options or StateDictOptions()
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    with FailTogether(sharded_collectives(given), GET) as together:
        if submodules or options.ignore_frozen_params:
            raise ValueError("submodules and ignore_frozen_params are not supported for sharded optimizers")
        views = optimizer_views(model, given)
        for view in views:
            if view.engine is not None:
                view.check_state_keys()
        together.facts = _facts(model, views, options)
    found: StateDict = {"state": {}, "param_groups": []}
    failure = FirstFailure()
    for view in views:
        with failure:  # this rank goes on, because it must take part in the communication for the other optimizers
            part = _state_dict_of(model, view, options)
            found["state"].update(part.get("state", {}))
            found["param_groups"] += part.get("param_groups", [])
    with FailTogether(sharded_collectives(given), GET):
        failure.raise_if_any()
        if options.full_state_dict and options.cpu_offload and not found["param_groups"]:
            found = {}
        elif options.flatten_optimizer_state_dict:
            found = _flattened(found)
    return found


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
        optim_state_dict: the full state (on every rank, or with ``broadcast_from_rank0`` on rank 0), or this
            optimizer's shards.
        options: torch's options.
    """
    options = options or StateDictOptions()
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    collectives = sharded_collectives(given)
    with FailTogether(collectives, SET) as together:
        views = optimizer_views(model, given)
        if options.broadcast_from_rank0 and collectives is not None and collectives.world_size != dist.get_world_size():
            raise ValueError("broadcast_from_rank0 needs an optimizer on all ranks; give the full state on every rank")
        state_dict = dict(optim_state_dict)
        if collectives is not None and not options.broadcast_from_rank0:
            state_dict = _with_groups(state_dict, views)
        together.facts = _facts(model, views, options)
    if collectives is None:
        torch_state_dict.set_optimizer_state_dict(model, given, state_dict, options=options)
        return
    if options.broadcast_from_rank0:
        state_dict = _with_groups(_broadcast(Collectives(), state_dict), views)
    for view in views:
        if view.engine is not None:
            _load(view, view.engine, state_dict)
            continue
        with FailTogether(collectives, SET):
            part = _restricted(state_dict, view)
            torch_state_dict.set_optimizer_state_dict(model, view.optimizer, part, options=StateDictOptions())


def _facts(model: nn.Module | None, views: Sequence[OptimizerView], options: StateDictOptions) -> list[Fact]:
    """Return facts about the arguments that decide which messages are sent."""
    names = ("full_state_dict", "cpu_offload", "broadcast_from_rank0", "flatten_optimizer_state_dict")
    facts = [Fact("model", "None" if model is None else "given"), Fact("optimizer", shown_kinds(views))]
    return [*facts, *(Fact(name, str(bool(getattr(options, name)))) for name in names)]


def _state_dict_of(model: nn.Module, view: OptimizerView, options: StateDictOptions) -> Mapping[str, Any]:
    """Return the state of one optimizer by name."""
    if view.engine is None:
        plain = StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
        return torch_state_dict.get_optimizer_state_dict(model, view.optimizer, options=plain)
    if options.full_state_dict:
        return _full(view, view.engine, on_rank_0_only=options.cpu_offload)
    return _sharded(view, view.engine, options.cpu_offload)


def _sharded(view: OptimizerView, engine: Engine, on_cpu: bool) -> StateDict:
    """Return this rank's shards of the state, as copies on the CPU if asked for."""
    found = sharded_state_dict(engine.inner, engine.layout, view.optimizer.param_groups, view.names, to_load=True)

    def to_cpu(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedState):
            return ShardedState(tensor.flat.to("cpu", copy=True), tensor.start, tensor)
        return tensor.to("cpu", copy=True)

    return nested_tensors.map_tensors(found, to_cpu) if on_cpu else found


def _full(view: OptimizerView, engine: Engine, on_rank_0_only: bool) -> StateDict:
    """Return the full state on every rank, or on rank 0 and an empty dict on the others."""
    groups = view.optimizer.param_groups
    found: dict[int, dict[Any, Any]] | None = None
    for rank in range(1 if on_rank_0_only else engine.collectives.world_size):
        state = consolidate(engine.collectives, engine.layout, engine.inner, groups, rank)
        found = state if state is not None else found
    if found is None:
        return {}
    by_name = {view.names[index]: values for index, values in found.items()}
    return {"state": by_name, "param_groups": nested_tensors.copy_tree(named_groups(groups, view.names))}


def _load(view: OptimizerView, engine: Engine, state_dict: StateDict) -> None:
    """Load a full or sharded state dict into one sharded optimizer, on all ranks together."""
    collectives = engine.collectives
    with FailTogether(collectives, SET) as together:
        options = _options_for(view, state_dict["param_groups"])
        names = set(view.names)
        state = {name: values for name, values in state_dict["state"].items() if name in names}
        together.flag = _is_full(state, view)
    if together.any_flag:
        with FailTogether(collectives, SET):
            members = view.split_by_group(view.names)
            groups = [{**values, "params": part} for values, part in zip(options, members, strict=True)]
            plain = plain_state_dict(state, groups)
        view.optimizer.load_state_dict(plain)
        return
    with FailTogether(collectives, SET) as together:
        states, masters = _owned_states(view, state)
        together.flag = bool(states)
    with restored_on_failure(engine, SET):
        load_owned_state(engine.inner, states, options)
    finish_load(engine, view.optimizer.param_groups, options, masters, has_state=together.any_flag)


def _is_full(state: Mapping[str, Any], view: OptimizerView) -> bool:
    """Whether this is a full state: it has plain tensors of parameters of which this rank does not own everything."""
    mine = {shard.name: shard for shard in view.state_shards()}
    tensors: dict[str, list[Tensor]] = {name: [] for name in state}
    for name, values in state.items():
        nested_tensors.map_tensors(values, tensors[name].append)
    if any(isinstance(tensor, ShardedState) for found in tensors.values() for tensor in found):
        return False
    cut = {name for name, shard in mine.items() if shard.is_cut}
    return any(
        name not in mine or (name in cut and any(tensor.dim() > 0 for tensor in found))
        for name, found in tensors.items()
    )


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
    return nested_tensors.copy_tree(found)  # type: ignore[no-any-return]


def _owned_states(
    view: OptimizerView, state: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[int, dict[Any, Any]], dict[int, Tensor]]:
    """Return the state of this rank's shards and its master weights, by parameter; raise if the shards are others."""
    states, masters = {}, {}
    foreign = set(state) - {shard.name for shard in view.state_shards()}
    if foreign:
        raise CheckpointMismatchError(
            f"there is state of parameter {min(foreign)!r}, which has another range than this rank owns: load the "
            "checkpoint into the state dict that get_optimizer_state_dict() returns for this optimizer"
        )
    for shard in view.state_shards():
        name = shard.name
        if name not in state:
            continue
        for key, value in state[name].items():
            if isinstance(value, ShardedState) and (
                (value.start, value.flat.numel(), value.shape) != (shard.start, shard.numel, shard.param.shape)
            ):
                raise CheckpointMismatchError(
                    f"state {key!r} of parameter {name!r} is another range than this rank owns: load the checkpoint "
                    "into the state dict that get_optimizer_state_dict() returns for this optimizer"
                )
        values = local_values(state[name])
        _check_sizes(values, name, shard)
        master = values.pop(master_weights.STATE_KEY, None)
        if master is not None:
            masters[shard.index] = master.view(shard.tensor.shape)
        if values:
            states[shard.index] = values
    return states, masters


def _check_sizes(values: Mapping[str, Any], name: str, shard: StateShard) -> None:
    """Raise if a tensor that must be per element has another number of elements than this rank's shard."""
    for key, value in values.items():
        if not isinstance(value, Tensor) or value.numel() == shard.numel:
            continue
        if key == master_weights.STATE_KEY or (shard.is_cut and value.dim() > 0):
            raise CheckpointMismatchError(
                f"state {key!r} of parameter {name!r} has {value.numel()} elements, but this rank owns {shard.numel}"
            )


def _restricted(state_dict: StateDict, view: OptimizerView) -> StateDict:
    """Return the part of a state dict that belongs to one optimizer."""
    names = set(view.names)
    return {
        "state": {name: values for name, values in state_dict["state"].items() if name in names},
        "param_groups": [group for group in state_dict["param_groups"] if names.intersection(group["params"])],
    }


def _broadcast(collectives: Collectives, state_dict: StateDict) -> StateDict:
    """Return rank 0's full state dict on every rank, with tensors on the CPU."""
    tensors: list[Tensor] = []
    tree: Any = None
    text: bytes | None = None
    call = f"{SET} from rank 0"
    with FailTogether(collectives, call):
        if collectives.group_rank == 0:
            tree = tagged_json.encode(state_dict, tensors, "the state dict")
            tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
            text = tagged_json.dumps([tree, [tagged_json.describe_tensor(tensor) for tensor in tensors]])
    received = collectives.broadcast_bytes(text, 0, call)
    with FailTogether(collectives, call):  # every rank has memory for the tensors before one is sent
        if collectives.group_rank != 0:
            tree, described = tagged_json.loads(received)
            tensors = [tagged_json.empty_from(description) for description in described]
    for tensor in tensors:
        buffer = tensor.to(collectives.control_device)
        collectives.broadcast(buffer, 0, call).wait()
        if buffer is not tensor:
            tensor.copy_(buffer)
    decoded: StateDict = tagged_json.decode(tree, tensors)
    return decoded


def _flattened(state_dict: StateDict) -> StateDict:
    """Return one level of keys as torch does: ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<option>``."""
    flat: StateDict = {}
    for name, values in state_dict["state"].items():
        for key, value in values.items():
            if not isinstance(key, str) or isinstance(value, (dict, list)):
                raise ValueError(f"state {key!r} of parameter {name!r} cannot be flattened")
            flat[f"state.{name}.{key}"] = value
    for group in state_dict["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        flat.update({f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()})
    return flat


def _with_groups(state_dict: StateDict, views: Sequence[OptimizerView]) -> StateDict:
    """Return a state dict with ``state`` and ``param_groups``, also from a flattened one."""
    return state_dict if "param_groups" in state_dict else _unflattened(state_dict, views)


def _unflattened(flat: Mapping[str, Any], views: Sequence[OptimizerView]) -> StateDict:
    """Invert :func:`_flattened`."""

    def entries_under(prefix: str) -> dict[str, Any]:
        return {key[len(prefix) :]: value for key, value in flat.items() if key.startswith(prefix)}

    state: dict[str, dict[str, Any]] = {}
    groups = []
    for view in views:
        for name in view.names:
            values = entries_under(f"state.{name}.")
            if values:
                state[name] = values
        for names in view.split_by_group(view.names):
            options = entries_under(f"param_groups.{names[0]}.") if names else {}
            groups.append({**options, "params": names})
    return {"state": state, "param_groups": groups}
