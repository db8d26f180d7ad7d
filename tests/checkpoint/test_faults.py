"""Saves that die or fail: kills at every point, errors of the disk on every rank, a training that is started again."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from onecopy.checkpoint import storage
from tests.support.failing_disks import (
    check_failed,
    check_only,
    fail_at_every_operation,
    save_and_wait,
    started,
)
from tests.support.faults import WORLD_SIZES, Outcome
from tests.support.faults_sweep import sweep
from tests.support.harness import distributed

KILLS = 9


# --- a rank dies


@pytest.fixture(scope="module")
def kills() -> tuple[int, list[Outcome]]:
    return sweep(KILLS)


def test_a_kill_at_any_point_loses_no_checkpoint_and_leaves_none_in_part(kills: tuple[int, list[Outcome]]) -> None:
    different, outcomes = kills
    assert [(str(each.kill), each.point, each.problems) for each in outcomes if each.problems] == []
    assert len(outcomes) == KILLS
    assert sum(each.hangs for each in outcomes) == 0
    assert sum(each.partial_loads for each in outcomes) == 0
    assert all(each.cleared for each in outcomes)
    # The sample has all world sizes, both modes and both ends.
    assert different > 1000
    assert {each.kill.world_size for each in outcomes} == set(WORLD_SIZES)
    assert {each.kill.blocking for each in outcomes} == {True, False}
    assert {each.committed for each in outcomes} == {True, False}


# --- the disk fails


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("name", ["make_directory", "create", "write", "flush", "flush_directory", "rename"])
@distributed(2, 3)
def test_an_error_of_the_disk_on_one_rank_is_raised_on_all_and_nothing_is_committed(
    world_size: int, name: str, blocking: bool, tmp_path: Path
) -> None:
    run, first = started(tmp_path)
    before = run.digest()
    tried, _ = fail_at_every_operation(run, tmp_path, first, blocking, [name])
    assert tried
    saved = run.save(tmp_path, blocking=True, keep=1)
    check_only(tmp_path, saved)
    assert run.digest() == before


def fail_to_remove(path: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@distributed(2)
def test_an_old_checkpoint_that_cannot_be_pruned_fails_no_save_and_goes_with_the_next(
    world_size: int, tmp_path: Path
) -> None:
    run, _ = started(tmp_path)
    with patch.object(storage, "remove", fail_to_remove):
        second = run.save(tmp_path, blocking=True, keep=1)
    check_only(tmp_path, second)
    assert len(list(tmp_path.iterdir())) == 2
    run.train(1)
    if dist.get_rank() == 0:
        for path in tmp_path.glob(".pruned.*.tmp"):
            for each in (*path.iterdir(), path):
                os.utime(each, (0, 0))
    third = run.save(tmp_path, blocking=True, keep=1)
    check_only(tmp_path, third)
    assert [path.name for path in tmp_path.iterdir()] == [third.name]


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@distributed(2, 3)
def test_a_limit_on_file_sizes_on_one_rank_fails_on_all(world_size: int, blocking: bool, tmp_path: Path) -> None:
    run, first = started(tmp_path)
    before = run.digest()
    for rank in range(world_size):
        with limited_files(2000) if dist.get_rank() == rank else contextlib.nullcontext():
            error = save_and_wait(run, tmp_path, blocking)
        check_failed(error, rank, os.strerror(errno.EFBIG), tmp_path)
        assert run.digest() == before
        check_only(tmp_path, first)
    check_only(tmp_path, run.save(tmp_path, blocking=True, keep=1))


@contextlib.contextmanager
def limited_files(nbytes: int) -> Iterator[None]:
    """Let writes beyond this size fail; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
