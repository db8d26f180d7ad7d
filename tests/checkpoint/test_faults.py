"""Saves that die or fail: kills at every point, errors of the disk on every rank, a training that is started again."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from onecopy.checkpoint import storage
from tests.support.failing_disks import (
    check_failed,
    check_only,
    fail,
    fail_at_every_operation,
    points_of_all,
    save_and_wait,
    started,
)
from tests.support.faults import CHANGES, EXCHANGES, WORLD_SIZES, Injector, Outcome, Run
from tests.support.faults_sweep import Zygote, sweep
from tests.support.harness import distributed

KILLS = 9
NOBODY = 65534


# --- a rank dies


@pytest.fixture(scope="module")
def kills() -> tuple[int, list[Outcome]]:
    return sweep(KILLS)


def test_a_kill_at_any_point_loses_no_checkpoint_and_leaves_none_in_part(kills: tuple[int, list[Outcome]]) -> None:
    _, outcomes = kills
    assert [(str(each.kill), each.point, each.problems) for each in outcomes if each.problems] == []
    assert len(outcomes) == KILLS
    assert sum(each.hangs for each in outcomes) == 0
    assert sum(each.partial_loads for each in outcomes) == 0
    assert all(each.cleared for each in outcomes)


def test_the_sample_of_kills_has_all_world_sizes_both_modes_and_both_ends(kills: tuple[int, list[Outcome]]) -> None:
    different, outcomes = kills
    assert different > 1000
    assert {each.kill.world_size for each in outcomes} == set(WORLD_SIZES)
    assert {each.kill.blocking for each in outcomes} == {True, False}
    assert {each.committed for each in outcomes} == {True, False}


@distributed(2)
def test_every_change_and_every_vote_of_a_save_is_a_point(world_size: int, tmp_path: Path) -> None:
    run = Run()
    for _ in range(2):
        run.train(1)
        run.save(tmp_path, blocking=True)
    if dist.get_rank() == 0:
        (tmp_path / ".step-00000003.0badf00d.tmp").mkdir()
        os.utime(tmp_path / ".step-00000003.0badf00d.tmp", (0, 0))
    run.train(1)
    counter = Injector()
    with counter.active():
        run.save(tmp_path, blocking=True)
    everywhere = {"create", "write", "flush", "flush_directory", *(name for _, name in EXCHANGES)}
    assert set(counter.points) == (everywhere if dist.get_rank() else everywhere | set(CHANGES))


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


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("name", ["flush_directory", "flush"])
@distributed(2)
def test_a_checkpoint_whose_name_cannot_be_flushed_is_taken_back(
    world_size: int, name: str, blocking: bool, tmp_path: Path
) -> None:
    run, first = started(tmp_path)
    points = points_of_all(run, tmp_path, first, blocking)[0]
    last = max(number for number, point in enumerate(points) if point == name)
    assert last > points.index("rename")
    with Injector(last if dist.get_rank() == 0 else None, act=fail(errno.EIO)).active():
        error = save_and_wait(run, tmp_path, blocking)
    check_failed(error, 0, os.strerror(errno.EIO), tmp_path)
    check_only(tmp_path, first)
    check_only(tmp_path, run.save(tmp_path, blocking=True, keep=1))


@distributed(2)
def test_a_leftover_that_cannot_be_removed_is_an_error_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    run, first = started(tmp_path)
    leftover = tmp_path / ".step-00000002.0badf00d.tmp"
    if dist.get_rank() == 0:
        leftover.mkdir()
        os.utime(leftover, (0, 0))
    with patch.object(storage, "remove", fail_to_remove):
        error = save_and_wait(run, tmp_path, True)
    check_failed(error, 0, os.strerror(errno.EIO), tmp_path)
    check_only(tmp_path, first)
    assert run.save(tmp_path, blocking=True).exists()
    assert not leftover.exists()


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
def test_a_full_disk_fails_on_all_ranks_and_the_next_save_works(tmp_path: Path, blocking: bool) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"', str(small)]
    refused = refusal_of([*mount, "true"])
    if refused:
        pytest.skip(f"no small file system can be mounted, so only the limit on file sizes is tested: {refused}")
    with Zygote(2, prefix=mount) as zygote:
        told = zygote.full(small / "root", blocking)
    for each in told:
        assert os.strerror(errno.ENOSPC) in each.get("raised", ""), each
        assert "rank-0000" in each["raised"] or ".tmp" in each["raised"]
        assert (each["unchanged"], each["left"], each["worked"]) == (True, True, True)


def refusal_of(command: list[str]) -> str:
    """Why a command does not work here, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return f"{done.stderr.strip()} ({done.returncode})" if done.returncode else ""


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


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@distributed(2)
def test_a_rank_without_the_right_to_write_fails_on_all(world_size: int, blocking: bool) -> None:
    with shared_folder() as root:
        run, first = started(root)
        before = run.digest()
        for rank in range(world_size if os.geteuid() == 0 else 1):
            with without_rights(root) if dist.get_rank() == rank else contextlib.nullcontext():
                error = save_and_wait(run, root, blocking)
                dist.barrier()
            check_failed(error, rank, os.strerror(errno.EACCES), root)
            assert run.digest() == before
            check_only(root, first)
        check_only(root, run.save(root, blocking=True, keep=1))


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A directory that everyone may enter, made by rank 0; pytest's own belong to one user."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    os.chmod(names[0], 0o755)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


@contextlib.contextmanager
def without_rights(root: Path) -> Iterator[None]:
    """A directory that this process may not change: read-only, and for root, who may do anything, as another user."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        root.chmod(0o555)
        try:
            yield
        finally:
            root.chmod(0o755)
