"""Saves a checkpoint: every rank writes its file, and rank 0 commits all of them.

1. Each rank describes its part of the checkpoint. All ranks raise if their arguments, models or optimizers differ.
2. Rank 0 makes and locks a temporary directory beside the final one, after it has removed the leftovers of saves that
   died. A directory that another process has locked belongs to a save that is running.
3. Each rank writes one file into it and flushes it to the disk. All ranks raise if a rank failed.
4. Rank 0 writes and flushes the manifest, renames the directory, and flushes its parent. All ranks raise if it failed.
5. Rank 0 removes older checkpoints.

If anything fails on any rank, all ranks raise, and no committed directory has been touched.

On a remote store nothing is locked or renamed: the ranks write under the final prefix, and the manifest is the commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint import manifest
from onecopy.checkpoint.argument_comparison import argument_facts, replica_facts, trainable_facts
from onecopy.checkpoint.directories import committed, folder_name, step_of, verify
from onecopy.checkpoint.files import write_file
from onecopy.checkpoint.manifest import Entry, File, FrozenParam, Manifest, Piece, SavedOptimizer
from onecopy.checkpoint.manifest_checks import MAX_BYTES, is_count
from onecopy.checkpoint.optimizer_view import (
    Optimizers,
    OptimizerView,
    optimizer_views,
    unwrapped,
    wait_for_parameters,
)
from onecopy.checkpoint.ranks import Ranks, explained_os_errors
from onecopy.checkpoint.save_plan import PerRank, SavePlan, plan_save
from onecopy.checkpoint.signing import SigningKey, check_key
from onecopy.checkpoint.storage import EXISTS, Location, Storage, location_of, storage_of
from onecopy.comm.agreement import Fact
from onecopy.common import tagged_json
from onecopy.common.tensor_subclasses import leaves_of
from onecopy.errors import CheckpointError, CorruptCheckpointError, NonfiniteError
from onecopy.state_dict.owner_comparison import owners_differ
from onecopy.step.nonfinite import not_finite

logger = logging.getLogger(__name__)

CALL = "saving a checkpoint"

ONE_MODEL = (
    "Each optimizer is on a part of the ranks, and these parts have different parameters. If they train different "
    "models, save each with process_group= in a directory of its own."
)


@dataclass(slots=True)
class SaveJob:
    """A save whose arguments were compared on all ranks, and that can be written now or in a thread.

    Attributes:
        ranks: the ranks that save.
        root: the directory of all checkpoints.
        step: the step to save under.
        keep: how many checkpoints to keep, or None for all.
        plan: this rank's part.
        key: the key to sign the manifest with, or None.
        committed: on rank 0, whether the checkpoint exists.
    """

    ranks: Ranks
    root: Location
    step: int
    keep: int | None
    plan: SavePlan
    key: SigningKey | None = None
    committed: bool = field(default=False, init=False)

    @property
    def _storage(self) -> Storage[Any]:
        return storage_of(self.root)

    def run(self) -> Location:
        """Write and commit the checkpoint, on all ranks together; return its directory."""
        final = self.root / folder_name(self.step)
        with contextlib.ExitStack() as stack:
            folder = self._begin(final, stack)
            try:
                descriptions = self._write(folder)
                self._commit(folder, final, descriptions)
            except Exception:
                if self.ranks.rank == 0 and not self.committed:  # otherwise another rank died after the commit
                    self._storage.discard(folder)
                raise
        if self.ranks.rank == 0 and self.keep is not None:
            _prune(self.root, self.keep, self.step)
        return final

    def _begin(self, final: Location, stack: contextlib.ExitStack) -> Location:
        """Make the directory to write into on rank 0; return its path on all ranks."""
        folder = self._storage.place_for(final)
        with self.ranks.fail_together(CALL), explained_os_errors(f"making {folder}"):
            if self.ranks.rank == 0:
                self._storage.prepare_root(self.root)
                if self._storage.exists(final):
                    with explained_os_errors(f"checking {final}, which exists already,"):
                        _set_damaged_aside(final)
                self._storage.begin(folder, stack)
        return self.root / str(self.ranks.gather_json(CALL, tagged_json.dumps(folder.name))[0])

    def _write(self, folder: Location) -> list[Any]:
        """Write this rank's file; return the description of every rank's file."""
        path = folder / f"rank-{self.ranks.rank:05d}.safetensors"
        with self.ranks.fail_together(CALL), explained_os_errors(f"rank {self.ranks.rank}: writing {path}"):
            file, pieces = write_file(path, self.plan.pieces, signed=self.key is not None)
            text = tagged_json.dumps(self._describe(path.name, file, pieces))
        return self.ranks.gather_json(CALL, text)

    def _describe(self, name: str, file: File, pieces: Sequence[Piece]) -> list[Any]:
        """Return the JSON data from which rank 0 assembles the manifest; ``_assemble`` reads it."""
        rows = [
            [live.key, live.entry.dtype, live.entry.shape, live.entry.stride, *astuple(piece)[1:]]
            for live, piece in zip(self.plan.pieces, pieces, strict=True)
        ]
        states = [optimizer.state for optimizer in self.plan.optimizers]
        return [
            name,
            astuple(file),
            rows,
            states,
            self.plan.checksums,
            self.plan.per_rank,
            {name: astuple(param) for name, param in (self.plan.base or {}).items()},
        ]

    def _commit(self, folder: Location, final: Location, descriptions: Sequence[Any]) -> None:
        """Write the manifest and commit the checkpoint, on rank 0; all ranks raise if that fails."""
        with self.ranks.fail_together(CALL), explained_os_errors(f"committing {final}"):
            if self.ranks.rank == 0:
                made = _assemble(self, descriptions)
                text = manifest.dump(made, self.key)
                _check_loadable(text, final / manifest.NAME, self.key)
                _check_files(folder, made)
                with self._storage.create(folder / manifest.NAME) as write:
                    write(text)
                self._storage.commit(folder, final)
                self.committed = True


def prepare(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module | None,
    optimizer: Optimizers,
    extra: dict[str, Any] | None,
    keep: int | None,
    blocking: bool,
    trainable_only: bool,
    refuse_nonfinite: bool,
    key: SigningKey | None,
    process_group: Any,
) -> SaveJob:
    """Compare the arguments of a save on all ranks and describe this rank's part; nothing is written yet."""
    ranks = Ranks(process_group, CALL)
    with ranks.fail_together(CALL) as together:
        folder = location_of(root).absolute()  # the working directory may change during a save in the background
        storage_of(folder).check_supported()
        check_step(step)
        _check_keep(keep)
        check_key(key)
        if trainable_only and model is None:
            raise ValueError("trainable_only=True needs the model whose parameters are trainable: pass model=")
        views = optimizer_views(model, optimizer)
        owner_groups = [_owner_group(view, ranks) for view in views]
        wait_for_parameters(views, model)
        if refuse_nonfinite:
            _check_finite(views, model, ranks.rank)
        together.facts = [
            Fact("root", os.fspath(root)),
            Fact("step", str(step)),
            Fact("keep", str(keep)),
            Fact("blocking", str(bool(blocking))),
        ]
        together.facts += [Fact("trainable_only", str(bool(trainable_only)))]
        together.facts += [Fact("refuse_nonfinite", str(bool(refuse_nonfinite)))]
        together.facts.append(Fact("key", "None" if key is None else "given"))
        together.facts += [*argument_facts(model, views), Fact("PerRank values of extra", _per_rank_keys(extra))]
        if trainable_only and model is not None:
            together.facts += trainable_facts(model)
    _check_one_model(views, owner_groups, ranks)
    first_groups = ranks.gather_json(CALL, tagged_json.dumps(owner_groups))[0]
    with ranks.fail_together(CALL) as together:
        # Where several groups of ranks have replicas of the state, the group of the first rank writes it.
        writes_state = [mine == first for mine, first in zip(owner_groups, first_groups, strict=True)]
        plan = plan_save(model, views, writes_state, extra, ranks.rank, ranks.world_size, trainable_only)
        together.facts = [Fact("model and optimizers", plan.fingerprint())]
        together.facts += [Fact("options of the optimizers", plan.options_digest())]
    return SaveJob(ranks, folder, step, keep, plan, key)


def _check_one_model(views: Sequence[OptimizerView], owner_groups: Sequence[list[int]], ranks: Ranks) -> None:
    """Raise on all ranks if optimizers on a part of the ranks belong to different models, which nothing else shows."""
    parts = [view for view, group in zip(views, owner_groups, strict=True) if group != ranks.global_ranks]
    if parts:
        with ranks.fail_together(CALL, remedy=ONE_MODEL) as together:
            together.facts = [fact for view in parts for fact in replica_facts(view)]


def check_step(step: object) -> None:
    """Raise ``ValueError`` unless a step is a number from 0 on."""
    if not is_count(step):
        raise ValueError(f"step must be a number from 0 on, got {step!r:.60}")


def _check_keep(keep: int | None) -> None:
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a number from 1 on, or None to keep all, got {keep!r}")


def _check_finite(views: Sequence[OptimizerView], model: nn.Module | None, group_rank: int) -> None:
    """Raise if a parameter of the model, or without a model of an optimizer, has an infinity or a NaN.

    The integers and 8-bit floats of a quantised base are left out: training does not change them.
    """
    if model is not None:
        named: list[tuple[str, Tensor]] = [*unwrapped(model).named_parameters()]
    else:
        named = [pair for view in views for pair in zip(view.names, view.params, strict=True)]
    found = [(name, leaf) for name, param in named for leaf in leaves_of(param) if _may_be_infinite(leaf)]
    bad = not_finite([leaf for _, leaf in found], found[0][1].device).tolist() if found else []
    if any(bad):
        raise NonfiniteError(
            f"rank {group_rank}: parameter {found[bad.index(True)][0]!r} has an infinity or a NaN. Because of "
            "refuse_nonfinite=True nothing was saved, and older checkpoints have not changed: load one before going on"
        )


def _may_be_infinite(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() or leaf.is_complex()) and leaf.element_size() > 1 and not leaf.is_meta


def _per_rank_keys(extra: object) -> str:
    """Return the keys of the :class:`PerRank` values as text; all ranks must have the same."""
    items = extra.items() if isinstance(extra, dict) else ()
    return ", ".join(sorted(repr(key) for key, value in items if isinstance(value, PerRank))) or "none"


def _owner_group(view: OptimizerView, ranks: Ranks) -> list[int]:
    """Return the global ranks among which an optimizer's state is divided."""
    if view.zero is None:
        return ranks.global_ranks
    members = torch.distributed.get_process_group_ranks(view.zero.process_group)
    if not set(members) <= set(ranks.global_ranks):
        raise ValueError(
            f"the state of {view.kind} is divided among ranks {members}, but only {ranks.global_ranks} save: pass "
            "a process_group with all of them"
        )
    return members


def _assemble(job: SaveJob, descriptions: Sequence[Any]) -> Manifest:
    """Make the manifest from the descriptions of all ranks' files."""
    plan = job.plan
    files: dict[str, File] = {}
    entries: dict[str, Entry] = {}
    pieces: dict[str, list[Piece]] = {}
    per_rank = []
    base: dict[str, FrozenParam] = {}
    for name, file, rows, _, _, values, frozen in descriptions:
        files[name] = File(*file)
        per_rank.append(values)
        base.update((key, FrozenParam(dtype, tuple(shape), digest)) for key, (dtype, shape, digest) in frozen.items())
        for key, dtype, shape, stride, offset, start, stop, checksums, digests in rows:
            entries.setdefault(key, Entry(dtype, tuple(shape), tuple(stride)))
            pieces.setdefault(key, []).append(Piece(name, offset, start, stop, tuple(checksums), tuple(digests)))
    tensors = {
        key: replace(entry, pieces=tuple(sorted(pieces[key], key=lambda piece: piece.start)))
        for key, entry in entries.items()
    }
    optimizers = [
        replace(optimizer, state=_merged_state(number, optimizer, descriptions))
        for number, optimizer in enumerate(plan.optimizers)
    ]
    return Manifest(
        step=job.step,
        world_size=job.ranks.world_size,
        written_by={"onecopy": version("onecopy"), "torch": str(torch.__version__)},
        fingerprint=plan.fingerprint(),
        files=files,
        tensors=tensors,
        model=plan.model,
        optimizers=tuple(optimizers),
        extra=plan.extra,
        per_rank=tuple(per_rank),
        base=None if plan.base is None else dict(sorted(base.items())),
    )


def _merged_state(number: int, optimizer: SavedOptimizer, descriptions: Sequence[Any]) -> dict[str, Any]:
    """Return the state trees of one optimizer by parameter; raise if the owners of a cut parameter differ."""
    found: dict[str, tuple[Any, int]] = {}
    for _, _, _, states, checksums, *_ in descriptions:
        for name, tree in states[number].items():
            state = tree, checksums[number].get(name, 0)
            if found.setdefault(name, state) != state:
                raise CheckpointError(owners_differ(name, "its owners"))
    return {name: found[name][0] for name in optimizer.params if name in found}


def _check_loadable(text: bytes, path: Location, key: SigningKey | None) -> None:
    """Raise if a load would refuse the manifest."""
    try:
        manifest.parse(text, str(path), key)
        if len(text) > MAX_BYTES:
            raise CorruptCheckpointError(f"{path} has {len(text)} bytes, and at most {MAX_BYTES} are read")
    except CorruptCheckpointError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error


def _check_files(folder: Location, made: Manifest) -> None:
    """Raise if rank 0 does not see every rank's file with the size that was written."""
    for name, file in made.files.items():
        path = folder / name
        try:
            size = storage_of(path).size_of(path)
        except FileNotFoundError:
            size = None
        if size != file.size:
            raise CheckpointError(
                f"rank 0 does not see {path} as it was written by another rank: all ranks must save to one file system"
            )


def _set_damaged_aside(final: Location) -> None:
    """Make room for a checkpoint if the one in its place is damaged; raise :class:`CheckpointError` if it is not.

    A run that fell back to an older checkpoint comes to this step again and must be able to save.
    """
    try:
        verify(final)
    except CorruptCheckpointError as error:
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            logger.warning("%s is damaged, and %s: %s", final, storage_of(final).set_aside(final), error)
        return
    raise CheckpointError(EXISTS.format(final))


def _prune(root: Location, keep: int, step: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to this step; checkpoints of later steps stay."""
    try:
        for path in [path for path in committed(root) if step_of(path) <= step][keep:]:
            storage_of(root).remove(path)
    except (OSError, CheckpointError) as error:
        logger.warning("an older checkpoint could not be removed: %s", error)
