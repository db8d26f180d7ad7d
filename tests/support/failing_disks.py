"""Disks that fail at a chosen operation of a save on one rank: all ranks must raise, and nothing may be committed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from pathlib import Path

import torch.distributed as dist

from onecopy import checkpoint
from onecopy.errors import CheckpointError, OnecopyError, PeerFailedError
from tests.support.faults import Injector, Run
from tests.support.logs import logged


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def started(root: Path) -> tuple[Run, Path]:
    """A run that has saved once, and has trained on."""
    run = Run()
    run.train(1)
    path = run.save(root, blocking=True)
    run.train(1)
    return run, path


def check_only(root: Path, path: Path) -> None:
    """There must be one checkpoint, undamaged, and nothing else. Ranks wait, because a save would change that."""
    dist.barrier()
    assert [each.name for each in root.iterdir()] == [path.name]
    assert checkpoint.latest(root) == path
    assert checkpoint.verify(path) > 0
    dist.barrier()


def check_failed_save(run: Run, root: Path, first: Path, blocking: bool, rank: int, number: int) -> None:
    """Save, which fails on a rank: all ranks must hear which one it was, at which file and why; nothing has changed."""
    before, error = run.digest(), None
    try:
        run.save(root, blocking, keep=None)
        checkpoint.wait()
    except OnecopyError as caught:
        error = caught
    assert error is not None
    assert os.strerror(number) in str(error)
    assert str(root) in str(error)
    if dist.get_rank() == rank:
        assert isinstance(error, CheckpointError)
        assert isinstance(error.__cause__, OSError)
    else:
        assert isinstance(error, PeerFailedError)
        assert f"failed on rank {rank}: CheckpointError" in str(error)
    assert run.digest() == before
    check_only(root, first)


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


OPERATIONS = {"make_directory", "create", "write", "flush", "flush_directory", "rename"}


def disk_faults_of_saves(root: str, blocking: bool) -> tuple[int, float]:
    """In a rank: fail once at every file operation of a save up to its commit, on each rank, and save in the end.

    Return how many there are, and the slowest error.
    """
    folder, tried, slowest = Path(root), 0, 0.0
    with logged(logging.CRITICAL):  # every failure in the background is logged
        run, first = started(folder)
        for rank, points in enumerate(points_of_all(run, folder, first, blocking)):
            until_commit = points[: points.index("rename") + 1] if rank == 0 else points
            assert set(until_commit) & OPERATIONS >= {"create", "write", "flush", "flush_directory"}
            for call in (number for number, point in enumerate(until_commit) if point in OPERATIONS):
                begun = time.monotonic()
                with Injector(call if dist.get_rank() == rank else None, act=fail).active():
                    check_failed_save(run, folder, first, blocking, rank, errno.EIO)
                slowest = max(slowest, time.monotonic() - begun)
                tried += 1
        check_only(folder, run.save(folder, blocking=True, keep=1))
    return tried, slowest
