"""Saves that are interrupted: killed ranks, and errors of the disk on every rank."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.failing_disks import check_failed_save, check_only, started
from tests.support.faults_sweep import sweep
from tests.support.harness import distributed, pools

KILLS, SIZES = 8, (2, 3)
MODES = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])


def test_a_kill_at_any_point_loses_no_checkpoint_and_leaves_none_in_part() -> None:
    different, outcomes = sweep(KILLS, seed=1, world_sizes=SIZES)
    assert [(str(each.kill), each.point, each.problems) for each in outcomes if each.problems] == []
    assert len(outcomes) == KILLS
    assert [each for each in outcomes if each.hangs or each.partial_loads or not each.cleared] == []
    # The sample has both world sizes, both modes and both ends.
    assert different > 500
    assert {each.kill.world_size for each in outcomes} == set(SIZES)
    assert {each.kill.blocking for each in outcomes} == {True, False}
    assert {each.committed for each in outcomes} == {True, False}


@MODES
@pytest.mark.parametrize("world_size", SIZES)
def test_an_error_of_the_disk_at_any_operation_is_raised_on_all_ranks_and_nothing_is_committed(
    world_size: int, blocking: bool, tmp_path: Path
) -> None:
    arguments = {"root": str(tmp_path), "blocking": blocking}
    found = pools.run(world_size, "tests.support.failing_disks", "disk_faults_of_saves", arguments)
    assert all(tried > 20 for tried, _ in found)


@MODES
@distributed(2)
def test_a_limit_on_file_sizes_on_one_rank_fails_on_all(world_size: int, blocking: bool, tmp_path: Path) -> None:
    run, first = started(tmp_path)
    for rank in range(world_size):
        with limited_files(2000) if dist.get_rank() == rank else contextlib.nullcontext():
            check_failed_save(run, tmp_path, first, blocking, rank, errno.EFBIG)
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
