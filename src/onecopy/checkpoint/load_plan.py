"""Plans which saved tensor is read into which live tensor, and checks that everything fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from onecopy.checkpoint.files import Reader, new_tensor, whole_tensor
from onecopy.checkpoint.manifest import Entry, Manifest, SavedOptimizer, keys_in, part_keys, value_of
from onecopy.common.flat_views import flat_like, flat_view, is_dense
from onecopy.data_parallel.wrapper import ShardedDataParallel
from onecopy.errors import CheckpointMismatchError
from onecopy.state_dict.shards import OptimizerView, StateShard, unwrapped
from onecopy.step import master_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """A planned read of elements ``[start, stop)`` of a saved tensor into memory."""

    key: str
    entry: Entry
    start: int
    stop: int
    target: Tensor
    like: Tensor  # has the shape of the saved tensor; its strides give the order of the elements

    @property
    def nbytes(self) -> int:
        """The number of bytes to read."""
        return (self.stop - self.start) * self.entry.torch_dtype.itemsize

    @property
    def _reordered(self) -> bool:
        return not _same_order(self.entry.shape, self.entry.stride, tuple(self.like.stride()))

    def check(self, reader: Reader) -> None:
        """Read every byte and compare it with its checksum."""
        start, stop = (0, self.entry.numel) if self._reordered else (self.start, self.stop)
        for _ in reader.blocks(self.key, self.entry, start, stop):
            pass

    def run(self, reader: Reader, manifest: Manifest) -> None:
        """Read the elements into the target."""
        if self._reordered or not is_dense(tuple(self.target.shape), self.target.stride()):
            whole = flat_like(whole_tensor(reader, manifest, self.key), self.like)[self.start : self.stop]
            self.target.copy_(whole.as_strided(self.target.shape, _dense_form(self.target).stride()))
            return
        try:
            reader.fill(flat_view(self.target), self.key, self.entry, self.start, self.stop)
        finally:
            increment_version(self.target)  # autograd does not see this write


def _same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides give the same memory order."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size != 1)


@dataclass(slots=True)
class ModelPlan:
    """The part of a load that concerns the model."""

    copies: list[Copy] = field(default_factory=list)  # what is read straight into place
    by_module: dict[str, Any] = field(default_factory=dict)  # trees that the module's own load_state_dict must load
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OptimizerPlan:
    """The part of a load that concerns one optimizer."""

    view: OptimizerView
    copies: list[Copy] = field(default_factory=list)  # what fills the tensors of states, and master weights
    states: dict[int, dict[Any, Any]] = field(default_factory=dict)  # of this rank's shards, by parameter
    options: list[Any] = field(default_factory=list)  # trees, by group
    loaded_masters: set[int] = field(default_factory=set)  # parameters whose master weights are among the copies
    has_state: bool = False


def plan_model(manifest: Manifest, model: nn.Module, views: Sequence[OptimizerView], strict: bool) -> ModelPlan:
    """Plan the load of a model; raise if names, shapes or dtypes do not fit (names only with ``strict``)."""
    module = unwrapped(model)
    if manifest.model is None:
        raise CheckpointMismatchError("the checkpoint was saved without a model")
    wanted = module.state_dict()
    plan = ModelPlan()
    live = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    base = manifest.base or {}
    plan.missing = [name for name in wanted if name not in manifest.model and name not in base]
    plan.unexpected = [name for name in manifest.model if name not in wanted]
    plan.unexpected += [name for name in base if name not in live]
    if strict and (plan.missing or plan.unexpected):
        raise CheckpointMismatchError(
            f"the checkpoint is of another model: it lacks {plan.missing[:5]} and has {plan.unexpected[:5]}, which the "
            "model does not; strict=False loads the names that both have"
        )
    # A tied parameter has several names; an optimizer uses the first.
    first_name = {id(param): name for name, param in module.named_parameters()}
    converts = isinstance(model, ShardedDataParallel) and model.mixed_precision.param_dtype is not None
    loaded_masters = {
        view.names[index] for view in views for index in range(len(view.params)) if view.uses_master(index)
    }
    for name, value in wanted.items():
        if name not in manifest.model:
            continue
        tree = manifest.model[name]
        kind = tree[0] if isinstance(tree, list) else None
        if isinstance(value, Tensor) and kind not in ("tensor", "subclass"):
            raise CheckpointMismatchError(f"{name!r} is a tensor in the model, and plain data in the checkpoint")
        if not isinstance(value, Tensor) or kind != "tensor":
            plan.by_module[name] = tree
            continue
        optimizer_name = first_name.get(id(live.get(name)), name)
        rounds = converts or optimizer_name in loaded_masters
        key, entry = _source_for(manifest, name, optimizer_name, tree[1], value, rounds)
        if not _is_same(value, live.get(name)):  # a hook of the module converts it for the state dict
            plan.by_module[name] = tree
            continue
        target = live[name].detach()
        plan.copies.append(Copy(key, entry, 0, entry.numel, target, _dense_form(target)))
    return plan


def _is_same(value: Tensor, live: Tensor | None) -> bool:
    """Whether a tensor of the state dict is the module's own tensor, not a copy or another view of it."""
    if live is None:
        return False
    one, other = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (value, live))
    return one == other


def _dense_form(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its memory is dense, else a row-major tensor of its shape without memory."""
    if is_dense(tuple(tensor.shape), tensor.stride()):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _source_for(
    manifest: Manifest, name: str, optimizer_name: str, key: str, value: Tensor, rounds: bool
) -> tuple[str, Entry]:
    """Return the saved tensor for one of the model's tensors: its own, or a master weight if that has the right dtype.

    Args:
        manifest: the checkpoint.
        name: the tensor's name in the model.
        optimizer_name: the name by which optimizers know it.
        key: the key of the saved tensor of this name.
        value: the model's tensor.
        rounds: whether a floating-point tensor of another dtype may be converted.
    """
    entry = manifest.tensors[key]
    if entry.shape != tuple(value.shape):
        raise CheckpointMismatchError(
            f"{name!r} has shape {entry.shape} in the checkpoint and {tuple(value.shape)} in the model"
        )
    if entry.torch_dtype == value.dtype:
        return key, entry
    for number, optimizer in enumerate(manifest.optimizers):
        master_key = f"optimizer.{number}/{optimizer_name}/{master_weights.STATE_KEY}"
        master = manifest.tensors.get(master_key) if optimizer_name in optimizer.params else None
        if master is not None and master.torch_dtype == value.dtype:
            return master_key, master
    if rounds and entry.torch_dtype.is_floating_point and value.is_floating_point():
        return key, entry
    raise CheckpointMismatchError(
        f"{name!r} is {entry.dtype} in the checkpoint and {str(value.dtype).removeprefix('torch.')} in the model: "
        "convert the model before loading or after it, or use an optimizer with master weights"
    )


def plan_optimizer(manifest: Manifest, number: int, view: OptimizerView) -> OptimizerPlan:
    """Plan the load of one optimizer; raise if its class, names, shapes or groups do not fit."""
    saved = manifest.optimizers[number]
    if saved.kind and saved.kind.rpartition(".")[2] != view.kind.rpartition(".")[2]:
        raise CheckpointMismatchError(f"optimizer {number} is a {view.kind}, but the checkpoint has a {saved.kind}")
    if saved.kind not in ("", view.kind):
        logger.warning("the checkpoint has a %s, which is taken for a %s", saved.kind, view.kind)
    if saved.named and not view.named:
        raise CheckpointMismatchError("the checkpoint names parameters as the model does: pass model= with optimizer=")
    names = view.names if saved.named else view.positions
    _check_params(saved, names, view)
    plan = OptimizerPlan(view, has_state=bool(saved.state))
    plan.options = [saved.groups[position].options for position in _match_groups(saved, names, view)]
    for shard in view.state_shards():
        _plan_param(manifest, saved, plan, names[shard.index], shard)
    return plan


def _check_params(saved: SavedOptimizer, names: Sequence[str], view: OptimizerView) -> None:
    """Raise if the saved parameters have other names or shapes."""
    missing = [name for name in names if name not in saved.params]
    unexpected = [name for name in saved.params if name not in set(names)]
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"the checkpoint's {saved.kind} is for other parameters: it lacks {missing[:5]} and has {unexpected[:5]}, "
            "which this one does not"
        )
    for name, param in zip(names, view.params, strict=True):
        if saved.params[name] not in (None, tuple(param.shape)):
            raise CheckpointMismatchError(
                f"parameter {name!r} has shape {saved.params[name]} in the checkpoint's {saved.kind} and "
                f"{tuple(param.shape)} in this one"
            )


def _match_groups(saved: SavedOptimizer, names: Sequence[str], view: OptimizerView) -> list[int]:
    """Return for each group the position of the saved group with the same parameters, in any order."""
    found = []
    left = {position: frozenset(group.params) for position, group in enumerate(saved.groups)}
    for position, mine in enumerate(map(frozenset, view.split_by_group(names))):
        same = [other for other, members in left.items() if members == mine]
        if not same:
            where = {name: other for other, saved_group in enumerate(saved.groups) for name in saved_group.params}
            misplaced = next((name for name in sorted(mine) if where[name] != position), next(iter(mine), ""))
            raise CheckpointMismatchError(
                f"the parameters are grouped otherwise: {misplaced!r} is in group {position}, but in the checkpoint "
                f"it is in group {where.get(misplaced)}, with other parameters"
            )
        found.append(position if position in same else same[0])
        del left[found[-1]]
    return found


def _plan_param(manifest: Manifest, saved: SavedOptimizer, plan: OptimizerPlan, name: str, shard: StateShard) -> None:
    """Plan the load of one parameter's state and master weight."""
    tree = saved.state.get(name)
    targets: dict[str, Tensor] = {}
    parts = part_keys(tree)
    for key in keys_in(tree) if tree is not None else ():
        part = key.rpartition("/")[2]
        if part == master_weights.STATE_KEY:
            if shard.param_view is not None:
                plan.copies.append(_copy_to(manifest, key, name, shard, shard.tensor.detach()))
                plan.loaded_masters.add(shard.index)
            targets[key] = shard.tensor
            continue
        if key in parts:
            plan.copies.append(_copy_of_part(manifest, key, name, shard))
            targets[key] = plan.copies[-1].target
            continue
        targets[key] = _target(key, manifest.tensors[key], name, shard, shard.state.get(part))
        plan.copies.append(_copy_to(manifest, key, name, shard, targets[key]))
    if tree is not None:
        state = value_of(tree, targets)
        state.pop(master_weights.STATE_KEY, None)
        if state:
            plan.states[shard.index] = state
    weight = (manifest.model or {}).get(name)
    without_master = shard.param_view is not None and shard.index not in plan.loaded_masters
    if without_master and isinstance(weight, list) and weight[0] == "tensor":
        # Without a saved master weight, a saved parameter of its dtype is as precise.
        entry = manifest.tensors[weight[1]]
        if entry.torch_dtype == shard.tensor.dtype and entry.shape == tuple(shard.param.shape):
            plan.copies.append(_copy_to(manifest, weight[1], name, shard, shard.tensor.detach()))
            plan.loaded_masters.add(shard.index)


def _target(key: str, entry: Entry, name: str, shard: StateShard, current: Any) -> Tensor:
    """Return memory for one tensor of the state: the current tensor if it fits, else a new one."""
    shape, stride, param_shape = entry.shape, entry.stride, tuple(shard.param.shape)
    if shard.is_cut and entry.shape == param_shape:
        shape, stride = (shard.numel,), (1,)
    elif shard.is_cut and entry.shape:
        raise CheckpointMismatchError(
            f"parameter {name!r} is cut among ranks, but its saved state has a tensor of shape {entry.shape} instead "
            f"of {param_shape}; keep parameters whole with elementwise=False"
        )
    elif entry.shape == param_shape and entry.shape:
        stride = tuple(_dense_form(shard.param.detach()).stride())
    fits = isinstance(current, Tensor) and (tuple(current.shape), current.dtype) == (shape, entry.torch_dtype)
    if fits and is_dense(shape, current.stride()) and _same_order(shape, stride, current.stride()):
        reused: Tensor = current.detach()
        return reused
    device = shard.tensor.device if entry.shape else torch.device("cpu")
    return new_tensor(shape, stride, entry.torch_dtype, device, key)


def _copy_of_part(manifest: Manifest, key: str, name: str, shard: StateShard) -> Copy:
    """Plan the read of a part of a tensor of a subclass into new memory, with the strides that were saved."""
    entry = manifest.tensors[key]
    if shard.is_cut:
        raise CheckpointMismatchError(
            f"parameter {name!r} is cut among ranks, but {key!r} in the checkpoint is part of a tensor of a subclass, "
            "of which a rank cannot have a range; keep parameters whole with elementwise=False"
        )
    target = new_tensor(entry.shape, entry.stride, entry.torch_dtype, shard.tensor.device, key)
    return Copy(key, entry, 0, entry.numel, target, target)


def _copy_to(manifest: Manifest, key: str, name: str, shard: StateShard, target: Tensor) -> Copy:
    """Plan the read of one tensor of the state: this rank's range if it is per element, else the whole tensor."""
    entry, param_shape = manifest.tensors[key], tuple(shard.param.shape)
    if entry.shape == param_shape and target.numel() == shard.numel:
        like = _dense_form(shard.param.detach()) if entry.shape else target
        return Copy(key, entry, shard.start, shard.stop, target, like)
    if entry.shape != tuple(target.shape):
        raise CheckpointMismatchError(f"{key!r} does not fit parameter {name!r}: {entry.shape}, {param_shape}")
    return Copy(key, entry, 0, entry.numel, target, target)


def decoded_options(plan: OptimizerPlan, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the options of all groups, with their tensors in place of the keys."""
    found = []
    for tree, group in zip(plan.options, plan.view.optimizer.param_groups, strict=True):
        options = value_of(tree, tensors)
        for key, value in options.items():
            current = group.get(key)
            if isinstance(value, Tensor) and isinstance(current, Tensor):
                options[key] = value.to(current.device)  # a capturable learning rate
        found.append(options)
    return found
