"""Loading: check everything that this rank needs, vote, and only then copy, piece by piece, into place.

1. All ranks compare their arguments and take the same checkpoint; each matches it with what it was given and reads and
   checks every byte it needs.
2. All ranks vote; until here nothing has changed.
3. Each reads from the files that it has kept open straight into place, with no more memory than one block (or one
   tensor that lies otherwise in memory). All vote again. If one failed here, what was given is partly loaded, and its
   optimizers refuse to step until a load succeeds.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onecopy.checkpoint.directories import candidates_in, read_manifest
from onecopy.checkpoint.files import Reader, whole_tensor
from onecopy.checkpoint.load_plan import Copy, ModelPlan, OptimizerPlan, options_of, plan_model, plan_optimizer
from onecopy.checkpoint.manifest import Manifest, keys_in
from onecopy.checkpoint.optimizer_view import (
    Optimizers,
    OptimizerView,
    argument_facts,
    optimizer_views,
    tensor_facts,
    unwrapped,
    wait_for,
)
from onecopy.checkpoint.progress_bar import bar
from onecopy.checkpoint.ranks import Ranks, as_checkpoint_error
from onecopy.comm.agreement import Fact
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from onecopy.optimizer import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`onecopy.checkpoint.load` found; unpacks as ``step, extra``.

    Attributes:
        step: the number it was saved under.
        extra: what was saved beside model and optimizer; what ranks had of their own only if there were as many ranks.
        path: the checkpoint's directory.
        per_rank: what each rank had of its own, for all ranks that saved.
        missing: with ``strict=False``, names of the model that the checkpoint does not have.
        unexpected: with ``strict=False``, names of the checkpoint that the model does not have.
    """

    step: int
    extra: dict[str, Any]
    path: Path
    per_rank: list[dict[str, Any]]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.step, self.extra))


@dataclass(slots=True)
class _Plan:
    """Everything that one rank takes from a checkpoint."""

    found: Manifest
    model: ModelPlan
    optimizers: list[OptimizerPlan]

    @property
    def copies(self) -> list[Copy]:
        return [*self.model.copies, *(copy for plan in self.optimizers for copy in plan.copies)]

    @property
    def small_keys(self) -> list[str]:
        """Tensors that are read whole: options, what was saved beside, what the model loads by itself."""
        trees = [self.found.extra, *self.found.per_rank, *(tree for plan in self.optimizers for tree in plan.options)]
        return [*(key for tree in trees for key in keys_in(tree)), *sorted(self.model.late_keys)]


def load(
    source: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizers,
    strict: bool,
    missing_ok: bool,
    process_group: Any,
) -> Loaded | None:
    """Load on all ranks together; see :func:`onecopy.checkpoint.load`."""
    ranks = Ranks(process_group)
    failure: Exception | None = None
    views: list[OptimizerView] = []
    paths: list[str] = []
    facts: list[Fact] = []
    try:
        views = optimizer_views(model, optimizer)
        wait_for(views, model)
        facts = argument_facts(model, views)
        facts += [Fact("strict", str(bool(strict))), Fact("missing_ok", str(bool(missing_ok)))]
        facts += tensor_facts(model, views)
        if ranks.rank == 0:
            paths = [str(path) for path in candidates_in(source)]
    except FileNotFoundError as error:
        failure = None if missing_ok else error
    except Exception as error:
        failure = error
    paths = ranks.vote("loading a checkpoint", failure, paths, facts)[0]
    if not paths:
        return None
    for position, path in enumerate(paths):
        loaded = _load_from(Path(path), model, views, strict, ranks, last=position == len(paths) - 1)
        if loaded is not None:
            return loaded
    raise AssertionError("the last candidate is loaded, or it raises")


def _load_from(
    folder: Path, model: nn.Module | None, views: Sequence[OptimizerView], strict: bool, ranks: Ranks, last: bool
) -> Loaded | None:
    """Load from one directory; None on all ranks if it is damaged and there is an older one."""
    failure: Exception | None = None
    plan: _Plan | None = None
    reader: Reader | None = None
    small: dict[str, Tensor] = {}
    try:
        found = read_manifest(folder)
        reader = Reader(folder, found.files)
        plan = _match(found, model, views, strict)
        with bar("checking", sum(copy.nbytes for copy in plan.copies), ranks.rank) as advance:
            for copy in plan.copies:
                copy.check(reader)
                advance(copy.nbytes)
        small = {key: whole_tensor(reader, found, key) for key in plan.small_keys}
    except Exception as error:
        failure = as_checkpoint_error(f"rank {ranks.rank}: reading {folder}", error)
    try:
        failures = [failed for failed in ranks.gather("loading a checkpoint", _kind_of(failure)) if failed]
        if failures and not last and all(kind == "corrupt" for kind, _ in failures):
            logger.warning("%s is damaged, so an older one is loaded: %s", folder, failures[0][1])
            return None
        ranks.agree("loading a checkpoint", [], failure)
        assert plan is not None
        assert reader is not None
        return _fill(plan, reader, small, folder, model, ranks)
    finally:
        if reader is not None:
            reader.__exit__(None, None, None)


def _kind_of(failure: Exception | None) -> list[str] | None:
    if failure is None:
        return None
    return ["corrupt" if isinstance(failure, CorruptCheckpointError) else "other", str(failure)]


def _match(found: Manifest, model: nn.Module | None, views: Sequence[OptimizerView], strict: bool) -> _Plan:
    if views and len(found.optimizers) != len(views):
        raise CheckpointMismatchError(
            f"the checkpoint has {len(found.optimizers)} optimizers, and {len(views)} were given to load into"
        )
    return _Plan(
        found,
        plan_model(found, model, views, strict) if model is not None else ModelPlan(),
        [plan_optimizer(found, number, view) for number, view in enumerate(views)],
    )


def _fill(
    plan: _Plan,
    reader: Reader,
    small: Mapping[str, Tensor],
    folder: Path,
    model: nn.Module | None,
    ranks: Ranks,
) -> Loaded:
    optimizers = [each.view.optimizer for each in plan.optimizers]
    failure: Exception | None = None
    _refuse_to_step(optimizers, folder)
    try:
        with torch.no_grad(), bar("loading", sum(copy.nbytes for copy in plan.copies), ranks.rank) as advance:
            for copy in plan.copies:
                copy.run(reader, plan.found)
                advance(copy.nbytes)
            if model is not None and plan.model.late:
                late = {name: tagged_json.decode(tree, small) for name, tree in plan.model.late.items()}  # type: ignore[arg-type]
                unwrapped(model).load_state_dict(late, strict=False)
            for each in plan.optimizers:
                each.view.install(each.states, options_of(each, small), each.mastered, each.has_state)
    except Exception as error:
        failure = CheckpointError(
            f"rank {ranks.rank}: loading {folder} failed after some of it had been loaded, and the optimizers refuse "
            f"to step until a load succeeds: {error}"
        )
        failure.__cause__ = error
    ranks.agree("loading a checkpoint", [], failure)
    _let_step(optimizers)
    extra = tagged_json.decode(plan.found.extra, small)  # type: ignore[arg-type]
    per_rank = [tagged_json.decode(tree, small) for tree in plan.found.per_rank]  # type: ignore[arg-type]
    if plan.found.world_size == ranks.world_size:
        extra = {**extra, **per_rank[ranks.rank]}
    return Loaded(plan.found.step, extra, folder, per_rank, plan.model.missing, plan.model.unexpected)


_refusing: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""Optimizers, other than ours, that a failed load has left half changed."""


def _refuse_to_step(optimizers: Sequence[Optimizer], folder: Path) -> None:
    why = CheckpointError(
        f"loading {folder} has failed half way, so that this optimizer's state is partly old and partly new: load a "
        "checkpoint before the next step"
    )

    def refuse(*_: Any) -> None:
        raise why

    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.engine.step_refusal = why
        elif optimizer not in _refusing:
            _refusing[optimizer] = optimizer.register_step_pre_hook(refuse)


def _let_step(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.engine.allow_steps()
        handle = _refusing.pop(optimizer, None)
        if handle is not None:
            handle.remove()
