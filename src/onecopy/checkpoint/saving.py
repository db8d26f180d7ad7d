"""Saves a checkpoint: every rank writes its file, and rank 0 commits all of them.

1. All ranks compare their arguments, models and optimizers. Rank 0 looks whether the step was saved before.
2. Each rank describes its part: trees of plain data, and pieces of tensors. With ``blocking=False`` each rank copies
   its part, the call returns, and a thread does the rest.
3. Rank 0 makes a temporary directory beside the final one.
4. Each rank writes one file into it and flushes it to the disk.
5. Rank 0 writes and flushes the manifest, renames the directory, and flushes its parent: this is the commit.
6. Rank 0 removes older checkpoints (``keep``).

Each of the steps 1 to 5 ends with a vote: if it fails on any rank, all ranks raise. Then rank 0 removes what was
written, and no committed checkpoint has been touched.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint import directories, manifest, storage
from onecopy.checkpoint.files import LivePiece, write_file
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.ranks import Ranks, described_tensors, explained_os_errors, parameter_checksums
from onecopy.checkpoint.save_plan import plan_save
from onecopy.checkpoint.storage import Location, RemotePath
from onecopy.checkpoint.training_state import PerRank
from onecopy.comm.agreement import REMEDY
from onecopy.common import tagged_json
from onecopy.common.tensor_subclasses import leaves_of
from onecopy.errors import CheckpointError, CorruptCheckpointError, NonfiniteError
from onecopy.state_dict.shards import (
    Optimizers,
    OptimizerView,
    optimizer_views,
    owners_differ,
    shown_kinds,
    unwrapped,
)
from onecopy.step.consistency import group_facts
from onecopy.step.nonfinite import not_finite

logger = logging.getLogger(__name__)

CALL = "saving a checkpoint"

ONE_MODEL = (
    "Each optimizer is on a part of the ranks, and these parts have different parameters. If they train different "
    "models, save each with process_group= in a directory of its own."
)


def save(
    root: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizers = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    blocking: bool = True,
    trainable_only: bool = False,
    refuse_nonfinite: bool = False,
    process_group: Any = None,
) -> Path | Any:
    """Save a checkpoint to ``root/step-...``. All ranks make this call together, and each rank writes its part.

    All ranks give the same arguments. If anything fails on any rank, all ranks raise, and older checkpoints have not
    changed.

    Args:
        root: the directory for the checkpoints of a run, on a file system that all ranks see; or a URL of fsspec, for
            example ``s3://bucket/run``.
        step: the step to save under.
        model: the model, with or without DDP or ShardedDataParallel around it.
        optimizer: one or several optimizers, of any class.
        extra: plain data and tensors to save as well. Rank 0's values are saved; a value in :class:`PerRank` is saved
            for each rank, under the same keys on all ranks. See :func:`capture`.
        keep: when this checkpoint is complete, remove all but this many of the newest ones.
        overwrite: replace a checkpoint of this step, when the new one is complete. Otherwise the call raises before it
            copies or writes anything.
        blocking: whether to write before returning. Otherwise this call copies everything, and a thread writes it; an
            error of the thread is raised by the next call of this module.
        trainable_only: whether to save digests of the frozen parameters (``requires_grad=False``) instead of their
            values, for adapters (LoRA). :func:`load` then needs a model with the same frozen parameters.
        refuse_nonfinite: raise ``NonfiniteError`` on all ranks if a parameter has an infinity or a NaN. Then nothing is
            saved, and ``keep`` does not remove the last good checkpoint.
        process_group: the ranks that save (default: all ranks; without torch.distributed, this process).

    Returns:
        The checkpoint's directory: a ``Path``, or for a URL an object whose ``str()`` is the checkpoint's URL.
    """
    _background.finish()
    ranks = Ranks(process_group, CALL)
    with ranks.together() as together:
        # 1. the arguments. The working directory may change during a save in the background.
        folder = storage.location_of(root).absolute()
        storage.check_supported(folder)
        if not manifest.is_count(step):
            raise ValueError(f"step must be a number from 0 on, got {step!r:.60}")
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be a number from 1 on, or None to keep all, got {keep!r}")
        if trainable_only and model is None:
            raise ValueError("trainable_only=True needs the model whose parameters are trainable: pass model=")
        views = optimizer_views(model, optimizer)
        owner_groups = [_owner_group(view, ranks) for view in views]
        if refuse_nonfinite:
            _check_finite(views, model, ranks.group_rank)
        together.must_equal({"root": os.fspath(root), "step": step, "keep": keep, "overwrite": bool(overwrite)})
        together.must_equal({"blocking": bool(blocking), "trainable_only": bool(trainable_only)})
        together.must_equal({"refuse_nonfinite": bool(refuse_nonfinite), "model": "None" if model is None else "given"})
        together.must_equal({"optimizer": shown_kinds(views), "PerRank values of extra": _per_rank_keys(extra)})
        together.must_equal(described_tensors(model, views))
        for view in views:
            together.facts += group_facts(view.optimizer.param_groups)
        if ranks.group_rank == 0 and not overwrite:
            overwrite = _was_damaged(folder / directories.folder_name(step), folder)
    # Optimizers on a part of the ranks may belong to different models, which nothing else shows.
    parts = [view for view, group in zip(views, owner_groups, strict=True) if group != ranks.global_ranks]
    with ranks.together(ONE_MODEL if parts else REMEDY) as together:
        # 2. the description
        for view in parts:
            together.must_equal(parameter_checksums(view))
        # Where several groups of ranks have replicas of the state, the group of the first rank writes it.
        writes_state = [ranks.global_ranks[0] in group for group in owner_groups]
        pieces, part = plan_save(step, model, views, writes_state, extra, ranks, trainable_only)
    job = SaveJob(ranks, folder, keep, overwrite, pieces, part)
    if blocking:
        return job.run()
    _background.start(job)
    return job.final


def wait() -> None:
    """Wait for a save in the background, and raise its exception if it failed."""
    _background.finish()


def _owner_group(view: OptimizerView, ranks: Ranks) -> list[int]:
    if view.engine is None:
        return ranks.global_ranks
    members = torch.distributed.get_process_group_ranks(view.engine.collectives.process_group)
    if not set(members) <= set(ranks.global_ranks):
        raise ValueError(
            f"the state of {view.kind} is divided among ranks {members}, but only {ranks.global_ranks} save: pass "
            "a process_group with all of them"
        )
    return members


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


def _was_damaged(final: Location, root: Location) -> bool:
    """On rank 0: raise if this step was saved before, unless that checkpoint is damaged; return whether it is.

    It is replaced then: a run that fell back to an older one comes to this step again.
    """
    with explained_os_errors(f"looking for checkpoints in {root}"):
        directories.warn_of_later_steps(final, root)
        was_saved = directories.has_manifest(final)
        if not was_saved and not (isinstance(final, Path) and storage.exists(final)):
            return False
    if was_saved:
        with explained_os_errors(f"checking {final}, which exists already,"):
            try:
                directories.verify(final)
            except CorruptCheckpointError as error:
                logger.warning("%s is damaged, and is replaced: %s", final, error)
                return True
    raise CheckpointError(storage.EXISTS.format(final))


# Steps 3 to 6


@dataclass(slots=True)
class SaveJob:
    """A save whose arguments were compared on all ranks, and that can be written now or in a thread."""

    ranks: Ranks
    root: Location
    keep: int | None
    overwrite: bool
    pieces: list[LivePiece]  # of tensors, which this rank writes
    part: Manifest  # of this rank, without files and tensors
    committed: bool = field(default=False, init=False)  # on rank 0

    @property
    def final(self) -> Location:
        """The directory of the checkpoint."""
        return self.root / directories.folder_name(self.part.step)

    def run(self) -> Location:
        """Write and commit the checkpoint, on all ranks together; return its directory."""
        token = self._begin()
        folder = storage.place_for(self.final, token)
        try:
            self._commit(folder, self._write(folder, token))
        except Exception:
            if self.ranks.group_rank == 0 and not self.committed:  # otherwise another rank died after the commit
                storage.discard(folder, token)
            raise
        if self.ranks.group_rank == 0:
            self._prune(folder, token)
        return self.final

    def _begin(self) -> str:
        """Make the directory to write into on rank 0; return on all ranks the text that is in all its names."""
        token = secrets.token_hex(4)
        folder = storage.place_for(self.final, token)
        with self.ranks.together(), explained_os_errors(f"making {folder}"):
            if self.ranks.group_rank == 0:
                storage.prepare_root(self.root)
                if isinstance(folder, Path):
                    storage.make_directory(folder)
        return str(self.ranks.gather_json(tagged_json.dumps(token))[0])

    def _write(self, folder: Location, token: str) -> list[Any]:
        """Write this rank's file; return the manifest of every rank's part, as JSON data."""
        path = folder / storage.file_name(folder, self.ranks.group_rank, token)
        with self.ranks.together(), explained_os_errors(f"rank {self.ranks.group_rank}: writing {path}"):
            file, written = write_file(path, self.pieces)
            tensors = {
                live.key: replace(live.entry, pieces=(piece,)) for live, piece in zip(self.pieces, written, strict=True)
            }
            text = manifest.dump(replace(self.part, files={path.name: file}, tensors=tensors))
        return self.ranks.gather_json(text)

    def _commit(self, folder: Location, parts: Sequence[Any]) -> None:
        final = self.final
        with self.ranks.together(), explained_os_errors(f"committing {final}"):
            if self.ranks.group_rank != 0:
                return
            text = manifest.dump(_merged(parts))
            _check_files(folder, _loadable(text, final / manifest.NAME))
            if isinstance(final, RemotePath) and not self.overwrite and directories.has_manifest(final):
                raise CheckpointError(storage.EXISTS.format(final))  # another process has just saved it
            with storage.create(folder / manifest.NAME) as write:
                write(text)
            storage.commit(folder, final, self.overwrite)
            self.committed = True

    def _prune(self, folder: Location, token: str) -> None:
        """Remove what was replaced, and all but the newest ``keep`` checkpoints up to this step; later ones stay."""
        try:
            if isinstance(folder, RemotePath) and self.overwrite:
                storage.remove_files(folder, lambda name: token not in name)
            if self.keep is not None:
                found = [
                    path for path in directories.committed(self.root) if directories.step_of(path) <= self.part.step
                ]
                for path in found[self.keep :]:
                    storage.remove_checkpoint(path)
        except (OSError, CheckpointError) as error:
            logger.warning("an older checkpoint could not be removed: %s", error)


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest that has these parts, as JSON data; raise if the owners of a cut parameter differ."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for key, entry in part["tensors"].items():
            tensors.setdefault(key, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    for entry in tensors.values():
        entry["pieces"].sort(key=lambda piece: piece["start"])
    for optimizer, *others in zip(*(part["optimizers"] for part in parts), strict=True):
        states: dict[str, Any] = {}
        for each in (optimizer, *others):
            for name, state in each["state"].items():
                if states.setdefault(name, state) != state:
                    raise CheckpointError(owners_differ(name, "its owners"))
        optimizer["state"] = {name: states[name][0] for name in optimizer["params"] if name in states}
    merged = {name: value for name, value in parts[0].items() if name != "crc32"}
    merged["files"] = {name: file for part in parts for name, file in part["files"].items()}
    merged["tensors"] = tensors
    merged["per_rank"] = [part["per_rank"][0] for part in parts]
    if merged["base"] is not None:
        base = {name: param for part in parts for name, param in part["base"].items()}
        merged["base"] = dict(sorted(base.items()))
    return merged


def _loadable(text: bytes, path: Location) -> Manifest:
    try:
        if len(text) > manifest.MAX_BYTES:
            raise CorruptCheckpointError(f"{path} has {len(text)} bytes, and at most {manifest.MAX_BYTES} are read")
        return manifest.parse(text, str(path))
    except CorruptCheckpointError as error:
        raise CheckpointError(f"nothing was saved, because it could not be loaded: {error}") from error


def _check_files(folder: Location, made: Manifest) -> None:
    """Raise if rank 0 does not see every rank's file with the size that was written."""
    for name, file in made.files.items():
        path = folder / name
        try:
            size = storage.size_of(path)
        except FileNotFoundError:
            size = None
        if size != file.size:
            raise CheckpointError(
                f"rank 0 does not see {path} as it was written by another rank: all ranks must save to one file system"
            )


class _BackgroundSave:
    """Runs at most one save in a thread and keeps its failure until the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._buffers: dict[str, Tensor] = {}  # reused by the next save: fresh pages cost more than the copy

    def start(self, job: SaveJob) -> None:
        """Copy the tensors of a save on all ranks, then write them in a thread. No other save may be running."""
        assert self._thread is None
        with job.ranks.together():
            self._copy(job.pieces)

        def run() -> None:
            try:
                job.run()
            except Exception as error:
                logger.warning("saving in the background failed: %s", error)
                self._failure = error

        thread = threading.Thread(target=run, name="onecopy checkpoint")
        try:
            thread.start()
        except RuntimeError as error:
            # The operating system refuses another thread. The other ranks have begun to save and wait for this rank.
            logger.warning("no thread can be started (%s): the checkpoint is saved before training goes on", error)
            run()
            return
        self._thread = thread

    def _copy(self, pieces: list[LivePiece]) -> None:
        """Replace every piece by a copy on the CPU, so that training can change the originals."""
        reusable, self._buffers = self._buffers, {}
        for number, piece in enumerate(pieces):
            buffer = reusable.get(piece.name)
            if buffer is None or (buffer.dtype, buffer.shape) != (piece.flat.dtype, piece.flat.shape):
                pinned = piece.flat.device.type != "cpu"
                buffer = torch.empty(piece.flat.shape, dtype=piece.flat.dtype, pin_memory=pinned)
            self._buffers[piece.name] = buffer.copy_(piece.flat)
            pieces[number] = replace(piece, flat=buffer)

    def finish(self) -> None:
        """Wait for the running save, and raise its exception if it failed."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_background = _BackgroundSave()
