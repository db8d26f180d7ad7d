"""Disks that fail at a chosen operation of a save on one rank: all ranks must raise, and nothing may be committed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from onecopy import checkpoint
from onecopy.errors import CheckpointError, OnecopyError, PeerFailedError
from tests.support.faults import CHANGES, Injector, Run


def fail(number: int) -> Callable[[], object]:
    """Something that raises this error of the system."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def save_and_wait(run: Run, root: Path, blocking: bool, keep: int | None = None) -> OnecopyError | None:
    """Save; return the error that it raised, at once or in the background."""
    try:
        run.save(root, blocking, keep)
        checkpoint.wait()
    except OnecopyError as error:
        return error
    return None


def check_failed(error: OnecopyError | None, rank: int, text: str, root: Path) -> None:
    """This rank must have heard which one failed, at which file and why."""
    assert error is not None
    assert text in str(error)
    assert str(root) in str(error)
    if dist.get_rank() == rank:
        assert isinstance(error, CheckpointError)
        assert isinstance(error.__cause__, OSError)
    else:
        assert isinstance(error, PeerFailedError)
        assert f"failed on rank {rank}: CheckpointError" in str(error)


def check_only(root: Path, path: Path) -> None:
    """There must be one checkpoint, undamaged. Ranks wait for each other, because a save would change that."""
    dist.barrier()
    assert [each.name for each in sorted(root.glob("step-*"))] == [path.name]
    assert checkpoint.latest(root) == path
    assert checkpoint.verify(path) > 0
    dist.barrier()


def started(root: Path) -> tuple[Run, Path]:
    """A run that has saved once, and has trained on."""
    run = Run()
    run.train(1)
    path = run.save(root, blocking=True)
    run.train(1)
    return run, path


def points_of_all(run: Run, root: Path, path: Path, blocking: bool) -> list[list[str]]:
    """Return the functions that a save calls on every rank; the checkpoint that it makes is removed again."""
    counter = Injector()
    with counter.active():
        saved = run.save(root, blocking, keep=None)
        checkpoint.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(saved)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, counter.points)
    check_only(root, path)
    return everyone


def fail_at_every_operation(
    run: Run, root: Path, first: Path, blocking: bool, names: Collection[str]
) -> tuple[int, float]:
    """Fail once at every operation with one of these names, on each rank; return how many, and the slowest error."""
    before, tried, slowest = run.digest(), 0, 0.0
    for rank, points in enumerate(points_of_all(run, root, first, blocking)):
        until_commit = points[: points.index("rename") + 1] if rank == 0 else points
        for call in (number for number, point in enumerate(until_commit) if point in names):
            begun = time.monotonic()
            with Injector(call if dist.get_rank() == rank else None, act=fail(errno.EIO)).active():
                error = save_and_wait(run, root, blocking)
            slowest = max(slowest, time.monotonic() - begun)
            check_failed(error, rank, os.strerror(errno.EIO), root)
            assert run.digest() == before
            check_only(root, first)
            tried += 1
    return tried, slowest


def disk_faults_of_saves(root: str, blocking: bool) -> tuple[int, float]:
    """In a rank: fail at every file operation of a save up to its commit, and save in the end."""
    logging.getLogger("onecopy").setLevel(logging.CRITICAL)  # every failure in the background is logged
    run, first = started(Path(root))
    found = fail_at_every_operation(run, Path(root), first, blocking, set(CHANGES) - {"remove"})
    check_only(Path(root), run.save(Path(root), blocking=True, keep=1))
    return found
