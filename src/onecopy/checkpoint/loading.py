"""Loads a checkpoint: every rank checks all bytes it needs, and only then copies them into place.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onecopy.checkpoint.argument_comparison import argument_facts, tensor_facts
from onecopy.checkpoint.directories import candidates_in, read_manifest
from onecopy.checkpoint.files import Reader, whole_tensor
from onecopy.checkpoint.frozen_base import compare_base
from onecopy.checkpoint.load_plan import Copy, ModelPlan, OptimizerPlan, decoded_options, plan_model, plan_optimizer
from onecopy.checkpoint.manifest import Manifest, keys_in, value_of
from onecopy.checkpoint.optimizer_view import (
    Optimizers,
    OptimizerView,
    optimizer_views,
    unwrapped,
    wait_for_parameters,
)
from onecopy.checkpoint.progress_bar import bar
from onecopy.checkpoint.ranks import Ranks, explained_os_errors
from onecopy.checkpoint.signing import SigningKey, check_key
from onecopy.checkpoint.storage import Location, location_of
from onecopy.comm.agreement import Fact
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from onecopy.optimizer import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)

CALL = "loading a checkpoint"


class _StepAndExtra(NamedTuple):
    """The two entries of :class:`Loaded`."""

    step: int
    extra: dict[str, Any]


class Loaded(_StepAndExtra):
    """The result of :func:`onecopy.checkpoint.load`: a tuple of ``step`` and ``extra`` that has further attributes.

    Attributes:
        step: the step of the checkpoint.
        extra: the saved ``extra``; this rank's :class:`PerRank` values are in it if as many ranks saved as load.
        path: the checkpoint's directory: a ``Path``, or an object whose ``str()`` is the URL.
        per_rank: the :class:`PerRank` values of every rank that saved.
        missing: with ``strict=False``, names of the model that the checkpoint does not have.
        unexpected: with ``strict=False``, names of the checkpoint that the model does not have.
    """

    path: Path | Any
    per_rank: list[dict[str, Any]]
    missing: list[str]
    unexpected: list[str]

    def __new__(
        cls,
        step: int,
        extra: dict[str, Any],
        path: Path | Any,
        per_rank: list[dict[str, Any]],
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
    ) -> Loaded:
        """Make the tuple, and set the attributes that are not in it."""
        made = super().__new__(cls, step, extra)
        made.path, made.per_rank = path, per_rank
        made.missing, made.unexpected = list(missing), list(unexpected)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """The arguments with which a copy is made."""
        return (self.step, self.extra, self.path, self.per_rank, self.missing, self.unexpected)


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
        return [*(key for tree in trees for key in keys_in(tree)), *sorted(self.model.by_module_keys)]

    @property
    def file_names(self) -> set[str]:
        """The files that have these tensors."""
        keys = {*self.whole_keys, *(copy.key for copy in self.copies)}
        return {piece.file for key in keys for piece in self.manifest.tensors[key].pieces}


def load(
    source: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizers,
    strict: bool,
    missing_ok: bool,
    check_base: bool,
    key: SigningKey | None,
    process_group: Any,
) -> Loaded | None:
    """Load on all ranks together; see :func:`onecopy.checkpoint.load`."""
    ranks = Ranks(process_group, CALL)
    with ranks.fail_together(CALL) as together:
        check_key(key)
        views = optimizer_views(model, optimizer)
        wait_for_parameters(views, model)
        together.facts = argument_facts(model, views)
        together.facts += [Fact("strict", str(bool(strict))), Fact("missing_ok", str(bool(missing_ok)))]
        together.facts += [Fact("check_base", str(bool(check_base)))]
        together.facts += [Fact("key", "None" if key is None else "given"), *tensor_facts(model, views)]
    damages: dict[str, str] = {}
    path = ""
    while True:
        with ranks.fail_together(CALL):
            listed = _candidate_paths(source, missing_ok or bool(damages)) if ranks.rank == 0 else []
        paths: list[str] = ranks.gather_json(CALL, tagged_json.dumps(listed))[0]
        untried = [each for each in paths if each not in damages]
        if not untried:
            break
        if path in paths:
            logger.warning("%s is damaged, so another one is loaded: %s", path, damages[path])
        path = untried[0]
        loaded = _load_from(location_of(path), model, views, strict, check_base, key, ranks)
        if isinstance(loaded, Loaded):
            return loaded
        damages[path] = loaded
    if damages:
        raise CorruptCheckpointError("; ".join(damages.values()))
    return None


def _candidate_paths(source: str | os.PathLike[str], missing_ok: bool) -> list[str]:
    """Return the paths of the checkpoints at ``source``, the newest first."""
    try:
        return [str(path) for path in candidates_in(source)]
    except FileNotFoundError:
        if missing_ok:
            return []
        raise


def _load_from(
    folder: Location,
    model: nn.Module | None,
    views: Sequence[OptimizerView],
    strict: bool,
    check_base: bool,
    key: SigningKey | None,
    ranks: Ranks,
) -> Loaded | str:
    """Load a checkpoint; if it is damaged, return on all ranks the first rank's description of the damage."""
    damage = ""
    with contextlib.ExitStack() as stack:
        with ranks.fail_together(CALL) as together, explained_os_errors(f"rank {ranks.rank}: reading {folder}"):
            try:
                manifest = read_manifest(folder, key)
                reader = stack.enter_context(Reader(folder, manifest.files, key is not None))
                reader.check_sizes()
                plan = _match(manifest, model, views, strict, check_base)
                reader.open_all(plan.file_names)
                with bar("checking", plan.nbytes, ranks.rank) as advance:
                    for copy in plan.copies:
                        copy.check(reader)
                        advance(copy.nbytes)
                tensors = {name: whole_tensor(reader, manifest, name) for name in plan.whole_keys}
                extra = value_of(manifest.extra, tensors)
                per_rank = [value_of(tree, tensors) for tree in manifest.per_rank]
            except CorruptCheckpointError as error:
                damage, together.flag = str(error), True
        if together.any_flag:
            return next(str(each) for each in ranks.gather_json(CALL, tagged_json.dumps(damage)) if each)
        _fill(plan, reader, tensors, folder, model, ranks)
    if manifest.world_size == ranks.world_size:
        extra = {**extra, **per_rank[ranks.rank]}
    return Loaded(manifest.step, extra, folder, per_rank, plan.model.missing, plan.model.unexpected)


def _match(
    manifest: Manifest,
    model: nn.Module | None,
    views: Sequence[OptimizerView],
    strict: bool,
    check_base: bool,
) -> _LoadPlan:
    """Match a checkpoint with the model and the optimizers; raise if it does not fit."""
    if views and len(manifest.optimizers) != len(views):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(manifest.optimizers)} optimizers, and {len(views)} were given to load into"
        )
    model_plan = plan_model(manifest, model, views, strict) if model is not None else ModelPlan()
    if model is not None and manifest.base is not None and check_base:
        compare_base(manifest, model)
    return _LoadPlan(
        manifest, model_plan, [plan_optimizer(manifest, number, view) for number, view in enumerate(views)]
    )


def _fill(
    plan: _LoadPlan,
    reader: Reader,
    tensors: Mapping[str, Tensor],
    folder: Location,
    model: nn.Module | None,
    ranks: Ranks,
) -> None:
    """Read everything into place, on all ranks together; ``tensors`` were read whole before."""
    optimizers = [each.view.optimizer for each in plan.optimizers]
    _refuse_steps(optimizers, folder)
    with ranks.fail_together(CALL):
        try:
            _fill_model_and_optimizers(plan, reader, tensors, model, ranks.rank)
        except Exception as error:
            raise CheckpointError(
                f"rank {ranks.rank}: loading {folder} failed after some of it had been loaded, and the optimizers "
                f"refuse to step until a load succeeds: {error}"
            ) from error
    _allow_steps(optimizers)


def _fill_model_and_optimizers(
    plan: _LoadPlan, reader: Reader, tensors: Mapping[str, Tensor], model: nn.Module | None, rank: int
) -> None:
    """Read all tensors into place, and load the options and the remaining entries."""
    with torch.no_grad(), bar("loading", plan.nbytes, rank) as advance:
        for copy in plan.copies:
            copy.run(reader, plan.manifest)
            advance(copy.nbytes)
        if model is not None and plan.model.by_module:
            entries = {name: value_of(tree, tensors) for name, tree in plan.model.by_module.items()}
            unwrapped(model).load_state_dict(entries, strict=False)
        for each in plan.optimizers:
            each.view.install(each.states, decoded_options(each, tensors), each.loaded_masters, each.has_state)


_refusing: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""Optimizers of other classes that a failed load has changed in part, with the hook that refuses their steps."""


def _refuse_steps(optimizers: Sequence[Optimizer], folder: Location) -> None:
    """Make ``step()`` raise, in case the load fails half way."""
    refusal = CheckpointError(
        f"loading {folder} has failed half way, so that this optimizer's state is partly old and partly new: load a "
        "checkpoint before the next step"
    )

    def refuse(*_: Any) -> None:
        raise refusal

    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.engine.step_refusal = refusal
        elif optimizer not in _refusing:
            _refusing[optimizer] = optimizer.register_step_pre_hook(refuse)


def _allow_steps(optimizers: Sequence[Optimizer]) -> None:
    """Let ``step()`` work again after a load."""
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.engine.allow_steps()
        handle = _refusing.pop(optimizer, None)
        if handle is not None:
            handle.remove()
