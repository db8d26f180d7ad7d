"""Saves that die or fail: kills at every point, errors of the disk on every rank, a training that is started again."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from onecopy.checkpoint import disk
from onecopy.errors import OnecopyError
from tests.support.failing_disks import (
    check_failed,
    check_only,
    fail,
    fail_at_every_operation,
    points_of_all,
    save_and_wait,
    started,
)
from tests.support.faults import CHANGES, EXCHANGES, WORLD_SIZES, Injector, Kill, Outcome, Run, moments_of
from tests.support.faults_sweep import Zygote, spread, sweep
from tests.support.harness import distributed, takes_long
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "resume.py"
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
    run.train(1)
    counter = Injector()
    with counter.active():
        run.save(tmp_path, blocking=True)
    everywhere = {"create", "write", "flush", "flush_directory", *(name for _, name in EXCHANGES)}
    assert set(counter.points) == (everywhere if dist.get_rank() else everywhere | set(CHANGES))


def test_a_sample_of_kills_is_even_and_goes_round_with_other_delays() -> None:
    everything = [Kill(2, True, 0, call, moment) for call in range(10) for moment in moments_of("create")]
    assert sorted(kill.call for kill in spread(everything, 10, 0)) == list(range(10))
    assert spread(everything, 10, 0) == spread(everything, 10, 0)
    twice = spread(everything, 30, 5)
    assert {kill.seed for kill in twice} == {5, 6}
    assert len(set(twice[:20])) == 20


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
def test_a_failure_in_the_background_is_raised_by_the_next_call_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    run, first = started(tmp_path)
    rank, calls = 1, points_of_all(run, tmp_path, first, blocking=False)[1]
    with Injector(calls.index("flush") if dist.get_rank() == rank else None, act=fail(errno.EIO)).active():
        run.save(tmp_path, blocking=False)
        run.train(1)
        error: OnecopyError | None = None
        try:
            run.save(tmp_path, blocking=True)
        except OnecopyError as raised:
            error = raised
    check_failed(error, rank, os.strerror(errno.EIO), tmp_path)
    check_only(tmp_path, first)
    check_only(tmp_path, run.save(tmp_path, blocking=True, keep=1))


@distributed(2)
def test_a_leftover_that_cannot_be_removed_is_an_error_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    run, first = started(tmp_path)
    leftover = tmp_path / ".step-00000002.0badf00d.tmp"
    if dist.get_rank() == 0:
        leftover.mkdir()
    with patch.object(disk, "remove", fail_to_remove):
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
    with patch.object(disk, "remove", fail_to_remove):
        second = run.save(tmp_path, blocking=True, keep=1)
    check_only(tmp_path, second)
    assert len(list(tmp_path.iterdir())) == 2
    run.train(1)
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


@pytest.mark.parametrize("name", ["make_directory", "create"])
@distributed(2)
def test_a_refused_right_is_named_with_rank_and_file(world_size: int, name: str, tmp_path: Path) -> None:
    run, first = started(tmp_path)
    points = points_of_all(run, tmp_path, first, blocking=True)
    rank = 0 if name == "make_directory" else 1
    with Injector(points[rank].index(name) if dist.get_rank() == rank else None, act=fail(errno.EACCES)).active():
        error = save_and_wait(run, tmp_path, True)
    check_failed(error, rank, os.strerror(errno.EACCES), tmp_path)
    check_only(tmp_path, first)


# --- a training that is started again


def train(root: Path, ranks: int, *options: str) -> str:
    """Run the example; return the last line that it prints, or nothing if it was killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--root", str(root), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 or "Signal 9 (SIGKILL)" in done.stderr, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


def losses_in(root: Path) -> list[float]:
    return [float(line) for line in (root / "losses.txt").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with several trainings, and what each printed. Those that do not need each other run side by side.

    One is undisturbed. One is killed, and then goes on three times from the same checkpoint: with the same command, and
    without dropout on 1 and on 3 ranks.
    """
    folder = tmp_path_factory.mktemp("trained")
    crash = ("--crash-at", str(random.Random(3).randrange(9, 20)))
    with ThreadPoolExecutor() as executor:
        whole = executor.submit(train, folder / "whole", 2)
        assert train(folder / "same", 2, *crash) == ""
        for name in ("one", "three"):
            shutil.copytree(folder / "same", folder / name)
        printed = {
            "whole": whole,
            "same": executor.submit(train, folder / "same", 2, *crash),
            "one": executor.submit(train, folder / "one", 1, "--dropout", "0"),
            "three": executor.submit(train, folder / "three", 3, "--dropout", "0"),
        }
        yield folder, {name: future.result() for name, future in printed.items()}


@takes_long  # tests/project/test_elastic.py does this with workers that are started once
def test_a_training_that_was_killed_and_started_again_ends_with_the_same_bits(
    trained: tuple[Path, dict[str, str]],
) -> None:
    folder, printed = trained
    assert printed["whole"].startswith("from step 0 to 20 on 2 ranks")
    assert re.match("from step [1-9][0-9]* to 20 on 2 ranks", printed["same"])
    assert printed["same"].partition(":")[2] == printed["whole"].partition(":")[2]
    assert losses_in(folder / "same") == losses_in(folder / "whole")


@takes_long
def test_a_training_goes_on_with_another_number_of_ranks_up_to_rounding(trained: tuple[Path, dict[str, str]]) -> None:
    folder, printed = trained
    assert re.match("from step [1-9][0-9]* to 20 on 3 ranks", printed["three"])
    assert printed["three"].partition(" to ")[0] == printed["one"].partition(" to ")[0]
    losses = losses_in(folder / "three")
    assert len(losses) == 20
    assert losses == pytest.approx(losses_in(folder / "one"), rel=1e-5)
    assert losses[-1] < losses[0]
