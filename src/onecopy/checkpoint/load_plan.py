"""Where the tensors of a checkpoint go in a model and its optimizers, planned and checked before anything moves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from onecopy.checkpoint.files import Reader, whole_tensor
from onecopy.checkpoint.manifest import Entry, Manifest, SavedOptimizer, keys_in
from onecopy.checkpoint.optimizer_view import OptimizerView, StateShard, unwrapped
from onecopy.common import tagged_json
from onecopy.common.flat_views import flat_like, flat_view, is_dense
from onecopy.data_parallel.wrapper import ShardedDataParallel
from onecopy.errors import CheckpointMismatchError
from onecopy.step import master_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements ``[start, stop)`` of a saved tensor, in the order of ``like``, and the memory they go into."""

    key: str
    entry: Entry
    start: int
    stop: int
    target: Tensor
    like: Tensor

    @property
    def nbytes(self) -> int:
        """How much is read."""
        return (self.stop - self.start) * self.entry.torch_dtype.itemsize

    @property
    def _reordered(self) -> bool:
        return not _same_order(self.entry.shape, self.entry.stride, tuple(self.like.stride()))

    def check(self, reader: Reader) -> None:
        """Read and check every byte of it."""
        start, stop = (0, self.entry.numel) if self._reordered else (self.start, self.stop)
        for _ in reader.blocks(self.key, self.entry, start, stop):
            pass

    def run(self, reader: Reader, manifest: Manifest) -> None:
        """Read it again, from the same open files, into place."""
        if self._reordered or not is_dense(tuple(self.target.shape), self.target.stride()):
            whole = flat_like(whole_tensor(reader, manifest, self.key), self.like)[self.start : self.stop]
            self.target.copy_(whole.as_strided(self.target.shape, _dense_stride(self.target)))
            return
        try:
            reader.fill(flat_view(self.target), self.key, self.entry, self.start, self.stop)
        finally:
            increment_version(self.target)  # written behind autograd's back


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if is_dense(tuple(tensor.shape), tensor.stride()) else _row_major(tensor.shape)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two ways to lie in memory hold the elements in the same order."""
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size != 1)


@dataclass(slots=True)
class ModelPlan:
    """What goes into the model: copies in place, what its own method must load, and names that do not match."""

    copies: list[Copy] = field(default_factory=list)
    late: dict[str, Any] = field(default_factory=dict)
    late_keys: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(slots=True)
class OptimizerPlan:
    """What goes into one optimizer: copies, then state with the tensors they fill, options, and master weights."""

    view: OptimizerView
    copies: list[Copy] = field(default_factory=list)
    states: dict[int, dict[Any, Any]] = field(default_factory=dict)
    options: list[Any] = field(default_factory=list)
    mastered: set[int] = field(default_factory=set)
    has_state: bool = False


def plan_model(manifest: Manifest, model: nn.Module, views: Sequence[OptimizerView], strict: bool) -> ModelPlan:
    """Match names, shapes and types; raise if they do not fit (with ``strict``, also if names are left over)."""
    module = unwrapped(model)
    if manifest.model is None:
        raise CheckpointMismatchError("the checkpoint was saved without a model")
    wanted = module.state_dict()
    plan = ModelPlan()
    plan.missing = [name for name in wanted if name not in manifest.model]
    plan.unexpected = [name for name in manifest.model if name not in wanted]
    if strict and (plan.missing or plan.unexpected):
        raise CheckpointMismatchError(
            f"the checkpoint is of another model: it lacks {plan.missing[:5]} and has {plan.unexpected[:5]}, which the "
            "model does not; strict=False loads what both have"
        )
    live = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    # A tied parameter has several names; an optimizer knows it by the first.
    first = {id(param): name for name, param in module.named_parameters()}
    converts = isinstance(model, ShardedDataParallel) and model.mixed_precision.param_dtype is not None
    mastered = {view.names[index] for view in views for index in range(len(view.params)) if view.uses_master(index)}
    for name, value in wanted.items():
        if name not in manifest.model:
            continue
        tree = manifest.model[name]
        if not isinstance(value, Tensor) or tree[0] != "tensor":
            plan.late[name] = tree
            plan.late_keys.update(keys_in(tree))
            continue
        known = first.get(id(live.get(name)), name)
        rounds = converts or known in mastered
        key, entry = _source_for(manifest, name, known, tree[1], value, rounds)
        if not _is_same(value, live.get(name)):  # something between the module and its state dict converts it
            plan.late[name] = tree
            plan.late_keys.add(tree[1])
            continue
        target = live[name].detach()
        plan.copies.append(Copy(key, entry, 0, entry.numel, target, _ordered(target)))
    return plan


def _is_same(value: Tensor, live: Tensor | None) -> bool:
    """Whether a state dict's tensor is the module's own, not a copy or another view of it."""
    if live is None:
        return False
    one, other = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in (value, live))
    return one == other


def _ordered(tensor: Tensor) -> Tensor:
    """A tensor whose strides say in which order memory is filled, where the target's own would leave holes."""
    if is_dense(tuple(tensor.shape), tensor.stride()):
        return tensor
    return torch.empty_strided(tensor.shape, _row_major(tensor.shape), dtype=tensor.dtype, device="meta")


def _source_for(manifest: Manifest, name: str, known: str, key: str, value: Tensor, rounds: bool) -> tuple[str, Entry]:
    """The saved tensor for one of the model's: its own, or the finer master weight where the model is that fine."""
    entry = manifest.tensors[key]
    if entry.shape != tuple(value.shape):
        raise CheckpointMismatchError(
            f"{name!r} has shape {entry.shape} in the checkpoint and {tuple(value.shape)} in the model"
        )
    if entry.torch_dtype == value.dtype:
        return key, entry
    for number, optimizer in enumerate(manifest.optimizers):
        finer = f"optimizer.{number}/{known}/{master_weights.STATE_KEY}"
        found = manifest.tensors.get(finer) if known in optimizer.params else None
        if found is not None and found.torch_dtype == value.dtype:
            return finer, found
    if rounds and entry.torch_dtype.is_floating_point and value.is_floating_point():
        return key, entry
    raise CheckpointMismatchError(
        f"{name!r} is {entry.dtype} in the checkpoint and {str(value.dtype).removeprefix('torch.')} in the model: "
        "convert the model before loading or after it, or use an optimizer with master weights"
    )


def plan_optimizer(manifest: Manifest, number: int, view: OptimizerView) -> OptimizerPlan:
    """Match class, names, shapes and groups of one optimizer; raise if they do not fit."""
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
    plan.options = [saved.groups[position]["options"] for position in _match_groups(saved, names, view)]
    for shard in view.state_shards():
        _plan_param(manifest, saved, plan, names[shard.index], shard)
    return plan


def _check_params(saved: SavedOptimizer, names: Sequence[str], view: OptimizerView) -> None:
    missing = [name for name in names if name not in saved.params]
    unexpected = [name for name in saved.params if name not in set(names)]
    if missing or unexpected:
        raise CheckpointMismatchError(
            f"the checkpoint's {saved.kind} is for other parameters: it lacks {missing[:5]} and has {unexpected[:5]}, "
            "which this one does not"
        )
    for name, param in zip(names, view.params, strict=True):
        if saved.params[name].shape not in (None, tuple(param.shape)):
            raise CheckpointMismatchError(
                f"parameter {name!r} has shape {saved.params[name].shape} in the checkpoint's {saved.kind} and "
                f"{tuple(param.shape)} in this one"
            )


def _match_groups(saved: SavedOptimizer, names: Sequence[str], view: OptimizerView) -> list[int]:
    """For each group the saved one with the same parameters, in whatever order."""
    start, found = 0, []
    left = {position: frozenset(group["params"]) for position, group in enumerate(saved.groups)}
    for position, group in enumerate(view.optimizer.param_groups):
        mine = frozenset(names[start : start + len(group["params"])])
        start += len(group["params"])
        same = [other for other, members in left.items() if members == mine]
        if not same:
            where = {name: other for other, saved_group in enumerate(saved.groups) for name in saved_group["params"]}
            odd = next((name for name in sorted(mine) if where[name] != position), next(iter(mine), ""))
            raise CheckpointMismatchError(
                f"the parameters are grouped otherwise: {odd!r} is in group {position}, and in the checkpoint in group "
                f"{where.get(odd)}, with other parameters"
            )
        found.append(position if position in same else same[0])
        del left[found[-1]]
    return found


def _plan_param(manifest: Manifest, saved: SavedOptimizer, plan: OptimizerPlan, name: str, shard: StateShard) -> None:
    tree = saved.state.get(name)
    param = plan.view.params[shard.index]
    targets: dict[str, Tensor] = {}
    for key in keys_in(tree) if tree is not None else ():
        part = key.rpartition("/")[2]
        if part == master_weights.STATE_KEY:
            if shard.param_view is not None:
                plan.copies.append(_copy_to(manifest, key, name, shard, param, shard.tensor.detach()))
                plan.mastered.add(shard.index)
            targets[key] = shard.tensor
            continue
        targets[key] = _target(manifest.tensors[key], name, shard, param, shard.state.get(part))
        plan.copies.append(_copy_to(manifest, key, name, shard, param, targets[key]))
    if tree is not None:
        state = tagged_json.decode(tree, targets)  # type: ignore[arg-type]  # keys stand where positions do
        state.pop(master_weights.STATE_KEY, None)
        if state:
            plan.states[shard.index] = state
    finest = (manifest.model or {}).get(name)
    if shard.param_view is not None and shard.index not in plan.mastered and finest is not None:
        entry = manifest.tensors[finest[1]]
        if entry.torch_dtype == shard.tensor.dtype and entry.shape == tuple(param.shape):
            plan.copies.append(_copy_to(manifest, finest[1], name, shard, param, shard.tensor.detach()))
            plan.mastered.add(shard.index)


def _is_cut(shard: StateShard, param: Tensor) -> bool:
    return shard.stop - shard.start != param.numel()


def _target(entry: Entry, name: str, shard: StateShard, param: Tensor, current: Any) -> Tensor:
    """Memory for one tensor of the state: what is there already, if it fits, else new."""
    shape, stride = entry.shape, entry.stride
    if _is_cut(shard, param) and entry.shape == tuple(param.shape):
        shape, stride = (shard.stop - shard.start,), (1,)
    elif _is_cut(shard, param) and entry.shape:
        raise CheckpointMismatchError(
            f"parameter {name!r} is cut among ranks, but its saved state has a tensor of shape {entry.shape} instead "
            f"of {tuple(param.shape)}; keep parameters whole with elementwise=False"
        )
    elif entry.shape == tuple(param.shape) and entry.shape:
        stride = tuple(_ordered(param.detach()).stride())
    fits = isinstance(current, Tensor) and (tuple(current.shape), current.dtype) == (shape, entry.torch_dtype)
    if fits and is_dense(shape, current.stride()) and _same_order(shape, stride, current.stride()):
        there: Tensor = current.detach()
        return there
    device = shard.tensor.device if entry.shape else torch.device("cpu")
    return torch.empty_strided(shape, stride, dtype=entry.torch_dtype, device=device)


def _copy_to(manifest: Manifest, key: str, name: str, shard: StateShard, param: Tensor, target: Tensor) -> Copy:
    entry = manifest.tensors[key]
    if entry.shape == tuple(param.shape) and target.numel() == shard.stop - shard.start:
        like = _ordered(param.detach()) if entry.shape else target
        return Copy(key, entry, shard.start, shard.stop, target, like)
    if entry.shape != tuple(target.shape):
        raise CheckpointMismatchError(f"{key!r} does not fit parameter {name!r}: {entry.shape}, {tuple(param.shape)}")
    return Copy(key, entry, 0, entry.numel, target, target)


def options_of(plan: OptimizerPlan, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The options of all groups, with their tensors."""
    found = []
    for tree, group in zip(plan.options, plan.view.optimizer.param_groups, strict=True):
        options = tagged_json.decode(tree, tensors)  # type: ignore[arg-type]
        for key, value in options.items():
            current = group.get(key)
            if isinstance(value, Tensor) and isinstance(current, Tensor):
                options[key] = value.to(current.device)  # a capturable learning rate
        found.append(options)
    return found
