"""Loads a checkpoint: every rank checks all bytes it needs, and only then reads them into place.

1. All ranks compare their arguments, and take the newest checkpoint that rank 0 found.
2. Each rank matches the manifest with its model and optimizers, compares frozen parameters with their digests if the
   checkpoint does not have their values, and reads and checks every byte it needs. All ranks raise if a rank failed. If
   this checkpoint is damaged, rank 0 lists the checkpoints again, because a save may have removed this one, and all
   ranks go on to the newest one that was not tried. Nothing has changed yet.
3. Each rank reads again, from the same open files, straight into place, and checks every byte there once more. This
   takes no more memory than one block, or one tensor whose strides differ. If a rank fails here, all ranks raise, and
   the optimizers refuse to step until a load succeeds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onecopy.checkpoint import directories
from onecopy.checkpoint.files import Reader, new_tensor, whole_tensor
from onecopy.checkpoint.frozen_base import compare_base
from onecopy.checkpoint.manifest import Entry, Manifest, SavedOptimizer, keys_in, part_keys, value_of
from onecopy.checkpoint.ranks import Ranks, described_tensors, explained_os_errors
from onecopy.checkpoint.saving import wait
from onecopy.checkpoint.storage import Location, location_of
from onecopy.common import tagged_json
from onecopy.common.flat_views import flat_like, flat_view, is_dense
from onecopy.data_parallel.wrapper import ShardedDataParallel
from onecopy.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from onecopy.state_dict.shards import Optimizers, OptimizerView, StateShard, optimizer_views, shown_kinds, unwrapped
from onecopy.step import master_weights
from onecopy.step.several_classes import KEY as CLASS_KEY
from onecopy.step.several_classes import match_classes

logger = logging.getLogger(__name__)

CALL = "loading a checkpoint"


@dataclass(frozen=True)
class Loaded:
    """The result of :func:`onecopy.checkpoint.load`. ``step, extra = checkpoint.load(...)`` works, too.

    Attributes:
        step: the step of the checkpoint.
        extra: the saved ``extra``; this rank's :class:`PerRank` values are in it if as many ranks saved as load.
        path: the checkpoint's directory: a ``Path``, or an object whose ``str()`` is the URL.
        per_rank: the :class:`PerRank` values of every rank that saved.
        missing: with ``strict=False``, names of the model that the checkpoint does not have.
        unexpected: with ``strict=False``, names of the checkpoint that the model does not have.
    """

    step: int
    extra: dict[str, Any]
    path: Path | Any
    per_rank: list[dict[str, Any]]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        """The step and the extra data."""
        return iter((self.step, self.extra))


@overload
def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: Literal[False] = False,
    check_base: bool = True,
    process_group: Any = None,
) -> Loaded: ...


@overload
def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: bool,
    check_base: bool = True,
    process_group: Any = None,
) -> Loaded | None: ...


def load(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    strict: bool = True,
    missing_ok: bool = False,
    check_base: bool = True,
    process_group: Any = None,
) -> Loaded | None:
    """Load a checkpoint that any number of ranks saved. All ranks make this call together, with the same arguments.

    Nothing changes before every rank has read and checked every byte it needs.

    Args:
        source: a checkpoint, or a directory with several: then the newest one that is not damaged. It may be a URL.
            Rank 0's path is used on all ranks.
        model: the model to load into, or None.
        optimizer: the optimizers to load into, in the order in which they were saved, or None.
        strict: whether the checkpoint must have exactly the names of the model's state dict.
        missing_ok: return None on all ranks if rank 0 finds no checkpoint, as at the start of a run.
        check_base: whether the frozen parameters must be those with which the checkpoint was saved, if it was saved
            with ``trainable_only``.
        process_group: the ranks that load (default: all ranks; without torch.distributed, this process).

    Returns:
        The step, the extra data and more.

    Raises:
        RanksDisagreeError: if ranks have different arguments or models; the message names the first difference.
        CorruptCheckpointError: if files are damaged; the message names the file and the tensor.
        CheckpointMismatchError: if the checkpoint does not fit; the message names the parameter.
    """
    wait()
    ranks = Ranks(process_group, CALL)
    with ranks.together() as together:
        views = optimizer_views(model, optimizer)
        together.must_equal({"model": "None" if model is None else "given", "optimizer": shown_kinds(views)})
        together.must_equal({"strict": bool(strict), "missing_ok": bool(missing_ok), "check_base": bool(check_base)})
        together.must_equal(described_tensors(model, views))
    match = partial(_match, model=model, views=views, strict=strict, check_base=check_base)
    damages: dict[str, str] = {}
    path = ""
    while True:
        with ranks.together():
            found = directories.candidates_in(source, missing_ok or bool(damages)) if ranks.group_rank == 0 else []
        paths: list[str] = ranks.gather_json(tagged_json.dumps(list(map(str, found))))[0]
        untried = [each for each in paths if each not in damages]
        if not untried:
            break
        if path in paths:
            logger.warning("%s is damaged, so another one is loaded: %s", path, damages[path])
        path = untried[0]
        loaded = _load_from(location_of(path), match, ranks)
        if isinstance(loaded, Loaded):
            return loaded
        damages[path] = loaded
    if damages:
        raise CorruptCheckpointError("; ".join(damages.values()))
    return None


# The plan: which saved tensor is read into which live tensor


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
    def _reordered(self) -> bool:
        return not _same_order(self.entry.shape, self.entry.stride, tuple(self.like.stride()))

    def check(self, reader: Reader) -> None:
        """Read every byte and compare it with its checksum."""
        start, stop = (0, self.entry.numel) if self._reordered else (self.start, self.stop)
        reader.read(self.key, self.entry, start, stop)

    def run(self, reader: Reader, manifest: Manifest) -> None:
        """Read the elements into the target."""
        if self._reordered or not is_dense(tuple(self.target.shape), self.target.stride()):
            whole = flat_like(whole_tensor(reader, manifest, self.key), self.like)[self.start : self.stop]
            self.target.copy_(whole.as_strided(self.target.shape, _dense_form(self.target).stride()))
            return
        try:
            reader.read(self.key, self.entry, self.start, self.stop, flat_view(self.target))
        finally:
            increment_version(self.target)  # autograd does not see this write


def _same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size != 1)


@dataclass(slots=True)
class ModelPlan:
    """The part of a load that concerns the model."""

    module: nn.Module | None = None
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


@dataclass(slots=True)
class _LoadPlan:
    manifest: Manifest
    model: ModelPlan
    optimizers: list[OptimizerPlan]

    @property
    def copies(self) -> list[Copy]:
        """The tensors that are read straight into place."""
        return [*self.model.copies, *(copy for plan in self.optimizers for copy in plan.copies)]

    @property
    def whole_keys(self) -> list[str]:
        """The tensors that are read into new memory: options, ``extra``, and entries for ``model.load_state_dict``."""
        saved = self.manifest
        trees = [saved.extra, *saved.per_rank, *(tree for plan in self.optimizers for tree in plan.options)]
        keys = (key for tree in [*trees, *self.model.by_module.values()] for key in keys_in(tree))
        return list(dict.fromkeys(keys))


def plan_model(manifest: Manifest, model: nn.Module, views: Sequence[OptimizerView], strict: bool) -> ModelPlan:
    """Plan the load of a model; raise if names, shapes or dtypes do not fit (names only with ``strict``)."""
    module = unwrapped(model)
    if manifest.model is None:
        raise CheckpointMismatchError("the checkpoint was saved without a model")
    wanted = module.state_dict()
    plan = ModelPlan(module)
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

    Optimizers may know it by another name. ``rounds`` allows to convert a floating-point tensor of another dtype.
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
    if saved.kind.rpartition(".")[2] != view.kind.rpartition(".")[2]:
        raise CheckpointMismatchError(f"optimizer {number} is a {view.kind}, but the checkpoint has a {saved.kind}")
    if saved.kind != view.kind:
        logger.warning("the checkpoint has a %s, which is taken for a %s", saved.kind, view.kind)
    if saved.named and not view.named:
        raise CheckpointMismatchError("the checkpoint names parameters as the model does: pass model= with optimizer=")
    names = view.names if saved.named else view.positions
    _check_params(saved, names, view)
    plan = OptimizerPlan(view, has_state=bool(saved.state))
    plan.options = [saved.groups[position].options for position in _match_groups(saved, names, view)]
    try:
        classes = [dict(pair for pair in tree[1] if pair[0] == CLASS_KEY) for tree in plan.options]
        match_classes(classes, view.optimizer.param_groups, view.kind)
    except ValueError as error:
        raise CheckpointMismatchError(f"optimizer {number}: {error}") from None
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
        if saved.params[name] != tuple(param.shape):
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
    match_classes(found, plan.view.optimizer.param_groups, plan.view.kind)
    return found


# Carrying it out


def _load_from(folder: Location, match: Callable[[Manifest], _LoadPlan], ranks: Ranks) -> Loaded | str:
    """Load a checkpoint; if it is damaged, return on all ranks the first rank's description of the damage."""
    damage = ""
    with contextlib.ExitStack() as stack:
        with ranks.together() as together, explained_os_errors(f"rank {ranks.group_rank}: reading {folder}"):
            try:
                manifest = directories.read_manifest(folder)
                reader = stack.enter_context(Reader(folder, manifest.files))
                reader.check_sizes()
                plan = match(manifest)
                for copy in plan.copies:
                    copy.check(reader)
                tensors = {name: whole_tensor(reader, manifest, name) for name in plan.whole_keys}
                extra = value_of(manifest.extra, tensors)
                per_rank = [value_of(tree, tensors) for tree in manifest.per_rank]
            except CorruptCheckpointError as error:
                damage, together.flag = str(error), True
        if together.any_flag:
            return next(str(each) for each in ranks.gather_json(tagged_json.dumps(damage)) if each)
        with _refusing_steps([each.view.optimizer for each in plan.optimizers], folder, ranks), torch.no_grad():
            _fill(plan, reader, tensors)
    if manifest.world_size == ranks.world_size:
        extra = {**extra, **per_rank[ranks.group_rank]}
    directories.note_known(folder)
    return Loaded(manifest.step, extra, folder, per_rank, plan.model.missing, plan.model.unexpected)


def _match(
    manifest: Manifest, model: nn.Module | None, views: Sequence[OptimizerView], strict: bool, check_base: bool
) -> _LoadPlan:
    if views and len(manifest.optimizers) != len(views):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(manifest.optimizers)} optimizers, and {len(views)} were given to load into"
        )
    model_plan = ModelPlan() if model is None else plan_model(manifest, model, views, strict)
    if model is not None and manifest.base is not None and check_base:
        compare_base(manifest, model)
    return _LoadPlan(
        manifest, model_plan, [plan_optimizer(manifest, number, view) for number, view in enumerate(views)]
    )


def _fill(plan: _LoadPlan, reader: Reader, tensors: Mapping[str, Tensor]) -> None:
    """Read all tensors into place, and load the options and the remaining entries; ``tensors`` were read before."""
    for copy in plan.copies:
        copy.run(reader, plan.manifest)
    if plan.model.module is not None and plan.model.by_module:
        entries = {name: value_of(tree, tensors) for name, tree in plan.model.by_module.items()}
        plan.model.module.load_state_dict(entries, strict=False)
    for each in plan.optimizers:
        each.view.install(each.states, decoded_options(each, tensors), each.loaded_masters, each.has_state)


_refusals: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""Optimizers that a failed load has changed in part, with the hook that refuses their steps."""


@contextlib.contextmanager
def _refusing_steps(optimizers: Sequence[Optimizer], folder: Location, ranks: Ranks) -> Iterator[None]:
    """Run a block that loads, on all ranks together; if it fails on one, the optimizers refuse to step from then on."""
    refusal = CheckpointError(
        f"loading {folder} has failed half way, so that this optimizer's state is partly old and partly new: load a "
        "checkpoint before the next step"
    )

    def refuse(*_: Any) -> None:
        raise refusal

    for optimizer in optimizers:
        engine = getattr(optimizer, "engine", None)
        if engine is not None:
            engine.step_refusal = refusal
        elif optimizer not in _refusals:
            _refusals[optimizer] = optimizer.register_step_pre_hook(refuse)
    with ranks.together():
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"rank {ranks.group_rank}: loading {folder} failed after some of it had been loaded, and the "
                f"optimizers refuse to step until a load succeeds: {error}"
            ) from error
    for optimizer in optimizers:
        engine = getattr(optimizer, "engine", None)
        if engine is not None:
            engine.allow_steps()
        elif (handle := _refusals.pop(optimizer, None)) is not None:
            handle.remove()
