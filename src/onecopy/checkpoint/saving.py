"""Saving: every rank writes its part, all vote, and one rename makes the checkpoint exist.

1. Each rank describes what it has; all ranks agree that they were given the same.
2. Rank 0 makes a temporary directory next to where the checkpoint will be, after clearing those of dead saves.
3. Each rank writes one file into it and flushes it to the disk.
4. All ranks vote. Rank 0 writes and flushes the manifest, renames the directory, and flushes its parent.
5. All ranks hear the outcome. Only then are older checkpoints pruned.

Whatever goes wrong on whichever rank, all raise, and no committed directory has been touched.
"""

from __future__ import annotations

import contextlib
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
from torch import nn

from onecopy.checkpoint import disk, manifest
from onecopy.checkpoint.contents import Contents, PerRank, collect
from onecopy.checkpoint.directories import committed, folder_of, step_of, verify
from onecopy.checkpoint.files import write_file
from onecopy.checkpoint.manifest import Entry, File, Manifest, Piece, SavedOptimizer
from onecopy.checkpoint.optimizer_view import Optimizers, OptimizerView, argument_facts, optimizer_views, wait_for
from onecopy.checkpoint.ranks import Ranks, as_checkpoint_error
from onecopy.comm.agreement import Fact
from onecopy.errors import CheckpointError, CorruptCheckpointError

logger = logging.getLogger(__name__)

_UNFINISHED = re.compile(r"\.(step-\d{8,}|pruned)\.[0-9a-f]{8}\.tmp")


@dataclass(slots=True)
class SaveJob:
    """A save that has been agreed on: what this rank writes, and where."""

    ranks: Ranks
    root: Path
    step: int
    keep: int | None
    contents: Contents

    def run(self) -> Path:
        """Write and commit, on all ranks together."""
        final = folder_of(self.root, self.step)
        with contextlib.ExitStack() as stack:
            temporary = self._open(final, stack)
            try:
                described = self._write(temporary)
                self._commit(temporary, final, described)
            except Exception:
                if self.ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
        if self.ranks.rank == 0 and self.keep is not None:
            _prune(self.root, self.keep, self.step)
        return final

    def _open(self, final: Path, stack: contextlib.ExitStack) -> Path:
        """The temporary directory, which rank 0 makes and claims."""
        failure: Exception | None = None
        name = f".{final.name}.{secrets.token_hex(4)}.tmp"
        if self.ranks.rank == 0:
            try:
                disk.make_directory(self.root)
                disk.flush_directory(self.root.parent)
                if final.exists():
                    _set_damaged_aside(final)
                _clear_leftovers(self.root)
                disk.make_directory(self.root / name)
                stack.enter_context(disk.claimed(self.root / name))
            except Exception as error:
                failure = as_checkpoint_error(f"making {self.root / name}", error)
        names = self.ranks.vote("saving a checkpoint", failure, name)
        return self.root / str(names[0])

    def _write(self, temporary: Path) -> list[Any]:
        """Write this rank's file; return every rank's description of what it wrote."""
        path = temporary / f"rank-{self.ranks.rank:05d}.safetensors"
        failure: Exception | None = None
        described: list[Any] = []
        try:
            file, pieces = write_file(path, self.contents.pieces)
            disk.flush_directory(temporary)
            described = [
                path.name,
                [file.size, file.header, file.crc32],
                [
                    [live.key, live.entry.dtype, live.entry.shape, live.entry.stride, *astuple(piece)[1:]]
                    for live, piece in zip(self.contents.pieces, pieces, strict=True)
                ],
                *self.contents.described(),
            ]
        except Exception as error:
            failure = as_checkpoint_error(f"rank {self.ranks.rank}: writing {path}", error)
        return self.ranks.vote("saving a checkpoint", failure, described)

    def _commit(self, temporary: Path, final: Path, described: Sequence[Any]) -> None:
        failure: Exception | None = None
        if self.ranks.rank == 0:
            try:
                made = _assemble(self, described)
                manifest.check_cover(made, str(final / manifest.NAME))
                _check_files(temporary, made)
                descriptor = disk.create(temporary / manifest.NAME)
                try:
                    disk.write(descriptor, manifest.dump(made))
                    disk.flush(descriptor)
                finally:
                    os.close(descriptor)
                disk.flush_directory(temporary)
                disk.rename(temporary, final)
                try:
                    disk.flush_directory(self.root)
                except Exception:
                    disk.rename(final, temporary)  # all ranks raise, so it must not exist
                    raise
            except Exception as error:
                failure = as_checkpoint_error(f"committing {final}", error)
        self.ranks.vote("saving a checkpoint", failure)


def prepare(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module | None,
    optimizer: Optimizers,
    extra: dict[str, Any] | None,
    keep: int | None,
    blocking: bool,
    process_group: Any,
) -> SaveJob:
    """Describe what is to be saved, on all ranks together; nothing is written yet."""
    ranks = Ranks(process_group)
    failure: Exception | None = None
    folder = Path()
    contents = Contents()
    views: list[OptimizerView] = []
    groups: list[list[int]] = []
    facts: list[Fact] = []
    try:
        _check_arguments(step, keep)
        folder = Path(root).absolute()  # the working directory may change while a save is under way
        views = optimizer_views(model, optimizer)
        groups = [_members(view, ranks) for view in views]
        wait_for(views, model)
        facts = [Fact("step", str(step)), Fact("keep", str(keep)), Fact("blocking", str(bool(blocking)))]
        facts += [*argument_facts(model, views), Fact("PerRank values of extra", _own_keys(extra))]
    except Exception as error:
        failure = error
    everyone = ranks.vote("saving a checkpoint", failure, groups, facts)
    try:
        # Where state is replicated among groups of ranks, the group of the first rank writes it.
        writes = [group == everyone[0][number] for number, group in enumerate(groups)]
        contents = collect(model, views, writes, extra, ranks.rank, ranks.world_size)
        facts = [Fact("model and optimizers", contents.fingerprint())]
        facts += [Fact("options of the optimizers", contents.options())]
    except Exception as error:
        failure = error
    ranks.agree("saving a checkpoint", facts, failure)
    return SaveJob(ranks, folder, step, keep, contents)


def _check_arguments(step: int, keep: int | None) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step must be a number from 0 on, got {step!r}")
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a number from 1 on, or None to keep all, got {keep!r}")


def _own_keys(extra: object) -> str:
    """The keys of what every rank has of its own. Others are rank 0's: no other rank needs to give them."""
    items = extra.items() if isinstance(extra, dict) else ()
    return ", ".join(sorted(repr(key) for key, value in items if isinstance(value, PerRank))) or "none"


def _members(view: OptimizerView, ranks: Ranks) -> list[int]:
    """The global ranks among which an optimizer's state is divided."""
    if view.zero is None:
        return ranks.global_ranks
    members = torch.distributed.get_process_group_ranks(view.zero.process_group)
    if not set(members) <= set(ranks.global_ranks):
        raise ValueError(
            f"the state of {view.kind} is divided among ranks {members}, but only {ranks.global_ranks} save: pass "
            "a process_group with all of them"
        )
    return members


def _assemble(job: SaveJob, described: Sequence[Any]) -> Manifest:
    """The manifest, from what every rank has written."""
    contents = job.contents
    files: dict[str, File] = {}
    entries: dict[str, Entry] = {}
    pieces: dict[str, list[Piece]] = {}
    per_rank = []
    for name, file, rows, _, _, own in described:
        files[name] = File(*file)
        per_rank.append(own)
        for key, dtype, shape, stride, offset, start, stop, checks in rows:
            entries.setdefault(key, Entry(dtype, tuple(shape), tuple(stride)))
            pieces.setdefault(key, []).append(Piece(name, offset, start, stop, tuple(checks)))
    tensors = {
        key: replace(entry, pieces=tuple(sorted(pieces[key], key=lambda piece: piece.start)))
        for key, entry in entries.items()
    }
    optimizers = [
        replace(optimizer, state=_merged(number, optimizer, described))
        for number, optimizer in enumerate(contents.optimizers)
    ]
    return Manifest(
        step=job.step,
        world_size=job.ranks.world_size,
        written_by={"onecopy": version("onecopy"), "torch": str(torch.__version__)},
        fingerprint=contents.fingerprint(),
        files=files,
        tensors=tensors,
        model=contents.model,
        optimizers=tuple(optimizers),
        extra=contents.extra,
        per_rank=tuple(per_rank),
    )


def _merged(number: int, optimizer: SavedOptimizer, described: Sequence[Any]) -> dict[str, Any]:
    """The state of one optimizer by parameter, after checking that the owners of a cut parameter agree."""
    state: dict[str, Any] = {}
    shared: dict[str, int] = {}
    for _, _, _, states, owners, _ in described:
        for name, tree in states[number].items():
            _, checksum = owners[number][name]
            if name in state and (tree != state[name] or checksum != shared[name]):
                raise CheckpointError(
                    f"parameter {name!r} is cut among ranks, but its owners differ in state that is not per element; "
                    "keep parameters whole with elementwise=False"
                )
            state[name], shared[name] = tree, checksum
    return {name: state[name] for name in optimizer.params if name in state}


def _check_files(temporary: Path, made: Manifest) -> None:
    for name, file in made.files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"rank 0 does not see {path} as it was written by another rank: all ranks must save to one file system"
            )


def _clear_leftovers(root: Path) -> None:
    """Remove what saves and prunings that died have left; a living one holds a lock."""
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name) and not disk.is_claimed(path):
            logger.warning("removing %s, which a save that died has left", path)
            disk.remove(path)


def _set_damaged_aside(final: Path) -> None:
    """Make room if what is there is damaged, so that a run that had to go back past it can save again."""
    try:
        verify(final)
    except CorruptCheckpointError as error:
        aside = final.with_name(f"damaged-{final.name}.{secrets.token_hex(4)}")
        logger.warning("%s is damaged, and is now %s: %s", final, aside.name, error)
        disk.rename(final, aside)
        return
    raise FileExistsError(
        f"{final} exists already, and a checkpoint is never overwritten; save under another step or into another "
        "directory, or remove it"
    )


def _prune(root: Path, keep: int, step: int) -> None:
    """Remove all but the newest checkpoints up to this step, those of later steps (of an abandoned run) not counted.

    Each loses its name first, so that none is ever seen in part.
    """
    try:
        for path in [path for path in committed(root) if step_of(path) <= step][keep:]:
            hidden = root / f".pruned.{secrets.token_hex(4)}.tmp"
            disk.rename(path, hidden)
            disk.remove(hidden)
    except OSError as error:
        logger.warning("an older checkpoint could not be removed: %s", error)
