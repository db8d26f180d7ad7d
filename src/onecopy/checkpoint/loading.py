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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onecopy.checkpoint import directories
from onecopy.checkpoint.files import Reader, progress_bar, whole_tensor
from onecopy.checkpoint.frozen_base import compare_base
from onecopy.checkpoint.load_plan import Copy, ModelPlan, OptimizerPlan, decoded_options, plan_model, plan_optimizer
from onecopy.checkpoint.manifest import Manifest, keys_in, value_of
from onecopy.checkpoint.ranks import Ranks, described_tensors, explained_os_errors
from onecopy.checkpoint.saving import wait
from onecopy.checkpoint.storage import Location, location_of
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from onecopy.state_dict.shards import Optimizers, OptimizerView, optimizer_views, shown_kinds, unwrapped

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
    target = _Target(model, views, strict, check_base)
    damages: dict[str, str] = {}
    path = ""
    while True:
        with ranks.together():
            listed = _candidate_paths(source, missing_ok or bool(damages)) if ranks.group_rank == 0 else []
        paths: list[str] = ranks.gather_json(tagged_json.dumps(listed))[0]
        untried = [each for each in paths if each not in damages]
        if not untried:
            break
        if path in paths:
            logger.warning("%s is damaged, so another one is loaded: %s", path, damages[path])
        path = untried[0]
        loaded = _load_from(location_of(path), target, ranks)
        if isinstance(loaded, Loaded):
            return loaded
        damages[path] = loaded
    if damages:
        raise CorruptCheckpointError("; ".join(damages.values()))
    return None


def _candidate_paths(source: str | os.PathLike[str], missing_ok: bool) -> list[str]:
    """Return the paths of the checkpoints at ``source``, the newest first."""
    try:
        return [str(path) for path in directories.candidates_in(source)]
    except FileNotFoundError:
        if missing_ok:
            return []
        raise


@dataclass(frozen=True, slots=True)
class _Target:
    """What is loaded into, and how strictly."""

    model: nn.Module | None
    views: Sequence[OptimizerView]
    strict: bool
    check_base: bool


@dataclass(slots=True)
class _LoadPlan:
    """Everything that one rank loads from a checkpoint."""

    manifest: Manifest
    model: ModelPlan
    optimizers: list[OptimizerPlan]

    @property
    def copies(self) -> list[Copy]:
        """The tensors that are read straight into place."""
        return [*self.model.copies, *(copy for plan in self.optimizers for copy in plan.copies)]

    @property
    def nbytes(self) -> int:
        """The number of bytes of :attr:`copies`."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def whole_keys(self) -> list[str]:
        """The tensors that are read into new memory: options, ``extra``, and entries for ``model.load_state_dict``."""
        saved = self.manifest
        trees = [saved.extra, *saved.per_rank, *(tree for plan in self.optimizers for tree in plan.options)]
        keys = (key for tree in [*trees, *self.model.by_module.values()] for key in keys_in(tree))
        return list(dict.fromkeys(keys))

    @property
    def file_names(self) -> set[str]:
        """The files that have these tensors."""
        keys = {*self.whole_keys, *(copy.key for copy in self.copies)}
        return {piece.file for key in keys for piece in self.manifest.tensors[key].pieces}


def _load_from(folder: Location, target: _Target, ranks: Ranks) -> Loaded | str:
    """Load a checkpoint; if it is damaged, return on all ranks the first rank's description of the damage."""
    damage = ""
    with contextlib.ExitStack() as stack:
        with ranks.together() as together, explained_os_errors(f"rank {ranks.group_rank}: reading {folder}"):
            try:
                manifest = directories.read_manifest(folder)
                reader = stack.enter_context(Reader(folder, manifest.files))
                reader.check_sizes()
                plan = _match(manifest, target)
                reader.open_all(plan.file_names)
                with progress_bar("checking", plan.nbytes, ranks.group_rank) as advance:
                    for copy in plan.copies:
                        copy.check(reader)
                        advance(copy.nbytes)
                tensors = {name: whole_tensor(reader, manifest, name) for name in plan.whole_keys}
                extra = value_of(manifest.extra, tensors)
                per_rank = [value_of(tree, tensors) for tree in manifest.per_rank]
            except CorruptCheckpointError as error:
                damage, together.flag = str(error), True
        if together.any_flag:
            return next(str(each) for each in ranks.gather_json(tagged_json.dumps(damage)) if each)
        with _refusing_steps([view.optimizer for view in target.views], folder, ranks), torch.no_grad():
            _fill(plan, reader, tensors, target.model, ranks.group_rank)
    if manifest.world_size == ranks.world_size:
        extra = {**extra, **per_rank[ranks.group_rank]}
    directories.note_known(folder)
    return Loaded(manifest.step, extra, folder, per_rank, plan.model.missing, plan.model.unexpected)


def _match(manifest: Manifest, target: _Target) -> _LoadPlan:
    """Match a checkpoint with the model and the optimizers; raise if it does not fit."""
    model, views = target.model, target.views
    if views and len(manifest.optimizers) != len(views):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(manifest.optimizers)} optimizers, and {len(views)} were given to load into"
        )
    model_plan = plan_model(manifest, model, views, target.strict) if model is not None else ModelPlan()
    if model is not None and manifest.base is not None and target.check_base:
        compare_base(manifest, model)
    return _LoadPlan(
        manifest, model_plan, [plan_optimizer(manifest, number, view) for number, view in enumerate(views)]
    )


def _fill(
    plan: _LoadPlan, reader: Reader, tensors: Mapping[str, Tensor], model: nn.Module | None, group_rank: int
) -> None:
    """Read all tensors into place, and load the options and the remaining entries; ``tensors`` were read before."""
    with progress_bar("loading", plan.nbytes, group_rank) as advance:
        for copy in plan.copies:
            copy.run(reader, plan.manifest)
            advance(copy.nbytes)
    if model is not None and plan.model.by_module:
        entries = {name: value_of(tree, tensors) for name, tree in plan.model.by_module.items()}
        unwrapped(model).load_state_dict(entries, strict=False)
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
