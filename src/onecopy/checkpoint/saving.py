"""Saves a checkpoint: every rank writes its file, and rank 0 commits all of them with one rename.

1. Each rank describes its part of the checkpoint. All ranks raise if their arguments, models or optimizers differ.
2. Rank 0 makes and locks a temporary directory beside the final one, after it has removed the leftovers of saves that
   died. A directory that another process has locked belongs to a save that is running.
3. Each rank writes one file into it and flushes it to the disk. All ranks raise if a rank failed.
4. Rank 0 writes and flushes the manifest, renames the directory, and flushes its parent. All ranks raise if it failed.
5. Rank 0 removes older checkpoints.

If anything fails on any rank, all ranks raise, and no committed directory has been touched.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint import disk, manifest
from onecopy.checkpoint.argument_comparison import argument_facts, trainable_facts
from onecopy.checkpoint.directories import committed, folder_of, step_of, verify
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
from onecopy.comm.agreement import Fact
from onecopy.common import tagged_json
from onecopy.common.tensor_subclasses import leaves_of
from onecopy.errors import CheckpointError, CorruptCheckpointError, NonfiniteError
from onecopy.state_dict.owner_comparison import owners_differ
from onecopy.step.nonfinite import not_finite

logger = logging.getLogger(__name__)

_UNFINISHED = re.compile(r"\.(step-\d{8,}|pruned)\.[0-9a-f]{8}\.tmp")

_EXISTS = (
    "{} exists already, and a checkpoint is never overwritten; save under another step or into another directory, or "
    "remove it"
)

CALL = "saving a checkpoint"

ATTEMPTS = 20
"""How often a temporary directory is made again if another process removes it."""


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
    """

    ranks: Ranks
    root: Path
    step: int
    keep: int | None
    plan: SavePlan
    key: SigningKey | None = None

    def run(self) -> Path:
        """Write and commit the checkpoint, on all ranks together; return its directory."""
        final = folder_of(self.root, self.step)
        with contextlib.ExitStack() as stack:
            temporary = self._make_temporary(final, stack)
            try:
                descriptions = self._write(temporary)
                self._commit(temporary, final, descriptions)
            except Exception:
                if self.ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
        if self.ranks.rank == 0 and self.keep is not None:
            _prune(self.root, self.keep, self.step)
        return final

    def _make_temporary(self, final: Path, stack: contextlib.ExitStack) -> Path:
        """Make and lock the temporary directory on rank 0; return its path on all ranks."""
        name = f".{final.name}.{secrets.token_hex(4)}.tmp"
        with self.ranks.fail_together(CALL), explained_os_errors(f"making {self.root / name}"):
            if self.ranks.rank == 0:
                disk.make_directory(self.root)
                disk.flush_directory(self.root.parent)
                if os.path.lexists(final):
                    with explained_os_errors(f"checking {final}, which exists already,"):
                        _rename_damaged(final)
                _remove_leftovers(self.root)
                for _ in range(ATTEMPTS):  # another save may take it for a leftover before it is locked
                    disk.make_directory(self.root / name)
                    if stack.enter_context(disk.locked(self.root / name)):
                        break
                else:
                    raise OSError("it was removed again and again before it could be locked")
        return self.root / str(self.ranks.gather_json(CALL, tagged_json.dumps(name))[0])

    def _write(self, temporary: Path) -> list[Any]:
        """Write this rank's file; return the description of every rank's file."""
        path = temporary / f"rank-{self.ranks.rank:05d}.safetensors"
        with self.ranks.fail_together(CALL), explained_os_errors(f"rank {self.ranks.rank}: writing {path}"):
            file, pieces = write_file(path, self.plan.pieces, signed=self.key is not None)
            disk.flush_directory(temporary)
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

    def _commit(self, temporary: Path, final: Path, descriptions: Sequence[Any]) -> None:
        """Write the manifest and rename the directory, on rank 0; all ranks raise if that fails."""
        with self.ranks.fail_together(CALL), explained_os_errors(f"committing {final}"):
            if self.ranks.rank == 0:
                made = _assemble(self, descriptions)
                text = manifest.dump(made, self.key)
                _check_loadable(text, final / manifest.NAME, self.key)
                _check_files(temporary, made)
                descriptor = disk.create(temporary / manifest.NAME)
                try:
                    disk.write(descriptor, text)
                    disk.flush(descriptor)
                finally:
                    os.close(descriptor)
                disk.flush_directory(temporary)
                try:
                    disk.rename(temporary, final)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                    raise CheckpointError(_EXISTS.format(final)) from None  # another process has just saved it
                try:
                    disk.flush_directory(self.root)
                except Exception:
                    disk.rename(final, temporary)  # all ranks raise, so the checkpoint must not exist
                    raise


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
        disk.check_supported()
        check_step(step)
        _check_keep(keep)
        check_key(key)
        if trainable_only and model is None:
            raise ValueError("trainable_only=True needs the model whose parameters are trainable: pass model=")
        folder = Path(root).absolute()  # the working directory may change during a save in the background
        views = optimizer_views(model, optimizer)
        owner_groups = [_owner_group(view, ranks) for view in views]
        wait_for_parameters(views, model)
        if refuse_nonfinite:
            _check_finite(views, model, ranks.rank)
        together.facts = [Fact("step", str(step)), Fact("keep", str(keep)), Fact("blocking", str(bool(blocking)))]
        together.facts += [Fact("trainable_only", str(bool(trainable_only)))]
        together.facts += [Fact("refuse_nonfinite", str(bool(refuse_nonfinite)))]
        together.facts.append(Fact("key", "None" if key is None else "given"))
        together.facts += [*argument_facts(model, views), Fact("PerRank values of extra", _per_rank_keys(extra))]
        if trainable_only and model is not None:
            together.facts += trainable_facts(model)
    first_groups = ranks.gather_json(CALL, tagged_json.dumps(owner_groups))[0]
    with ranks.fail_together(CALL) as together:
        # Where several groups of ranks have replicas of the state, the group of the first rank writes it.
        writes_state = [mine == first for mine, first in zip(owner_groups, first_groups, strict=True)]
        plan = plan_save(model, views, writes_state, extra, ranks.rank, ranks.world_size, trainable_only)
        together.facts = [Fact("model and optimizers", plan.fingerprint())]
        together.facts += [Fact("options of the optimizers", plan.options_digest())]
    return SaveJob(ranks, folder, step, keep, plan, key)


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


def _check_loadable(text: bytes, path: Path, key: SigningKey | None) -> None:
    """Raise if a load would refuse the manifest."""
    try:
        manifest.parse(text, str(path), key)
        if len(text) > MAX_BYTES:
            raise CorruptCheckpointError(f"{path} has {len(text)} bytes, and at most {MAX_BYTES} are read")
    except CorruptCheckpointError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error


def _check_files(temporary: Path, made: Manifest) -> None:
    """Raise if rank 0 does not see every rank's file with the size that was written."""
    for name, file in made.files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"rank 0 does not see {path} as it was written by another rank: all ranks must save to one file system"
            )


def _remove_leftovers(root: Path) -> None:
    """Remove temporary directories of saves that died; other files and the directories of running saves stay."""
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            with disk.locked(path, wait=False, without_locks=False) as has_lock:
                if has_lock:
                    # A save that was about to lock an empty one makes it again.
                    level = logging.WARNING if any(path.iterdir()) else logging.DEBUG
                    logger.log(level, "removing %s, a leftover of a save that died", path)
                    disk.remove(path)


def _rename_damaged(final: Path) -> None:
    """Rename an existing checkpoint if it is damaged; raise :class:`CheckpointError` if it is not.

    A run that fell back to an older checkpoint comes to this step again and must be able to save.
    """
    try:
        verify(final)
    except CorruptCheckpointError as error:
        renamed = final.with_name(f"damaged-{final.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            disk.rename(final, renamed)
            logger.warning("%s is damaged, and is now %s: %s", final, renamed.name, error)
        return
    raise CheckpointError(_EXISTS.format(final))


def _prune(root: Path, keep: int, step: int) -> None:
    """Remove all but the newest ``keep`` checkpoints up to this step; checkpoints of later steps stay.

    Each one is locked, so that another save does not take it for a leftover, and renamed, so that no reader sees a part
    of it.
    """
    try:
        for path in [path for path in committed(root) if step_of(path) <= step][keep:]:
            with disk.locked(path, wait=False) as has_lock:
                if has_lock:
                    hidden = root / f".pruned.{secrets.token_hex(4)}.tmp"
                    disk.rename(path, hidden)
                    disk.remove(hidden)
    except OSError as error:
        logger.warning("an older checkpoint could not be removed: %s", error)
