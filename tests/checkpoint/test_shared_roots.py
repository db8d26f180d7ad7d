"""One directory that several processes use, disks that fail, and files that others have left there."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.checkpoint import directories, latest, load, save, storage, verify
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support.crowded import disk_faults_of_loads
from tests.support.hostile import Pair

LOADS = 40


def trained() -> Pair:
    pair = Pair()
    pair.step()
    return pair


def at_call(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int, act: Callable[[], object]
) -> list[int]:
    """Do something before the call of a function with this number; returns a list that has an item for each call."""
    real, calls = getattr(place, name), list[int]()

    def replacement(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == number:
            act()
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, replacement)
    return calls


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# A reader beside a writer


READS: list[tuple[Any, str, int]] = [
    (directories, "has_manifest", 1),
    (directories, "has_manifest", 3),
    (storage, "size_of", 0),
    (storage, "size_of", 1),
    (storage, "open_descriptor", 0),
    (storage, "open_descriptor", 1),
]
"""Calls of a load before which a checkpoint may be pruned; after the last one its files are open."""


@pytest.mark.parametrize("point", READS, ids=lambda point: f"{point[1]} {point[2]}")
def test_a_checkpoint_that_a_save_removes_is_replaced_by_the_new_one(
    point: tuple[Any, str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained()
    pair.save(tmp_path, 1)

    def save_and_prune() -> None:
        monkeypatch.undo()
        pair.save(tmp_path, 2, keep=1)
        assert names_in(tmp_path) == ["step-00000002"]

    calls = at_call(monkeypatch, *point, save_and_prune)
    assert Pair(1).load(tmp_path).step == 2
    assert len(calls) == point[2] + 1


def test_files_that_are_open_can_be_read_after_a_save_has_removed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, other = trained(), Pair(1)
    pair.save(tmp_path, 1)
    calls = at_call(monkeypatch, storage, "read_into", 4, lambda: pair.save(tmp_path, 2, keep=1))
    assert other.load(tmp_path).step == 1
    assert len(calls) > 5
    assert names_in(tmp_path) == ["step-00000002"]
    assert all(torch.equal(value, pair.tensors()[key]) for key, value in other.tensors().items())


def in_threads(*actions: Callable[[], object]) -> list[BaseException]:
    """Run functions beside each other; return what they raised."""
    raised: list[BaseException] = []

    def guarded(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_many_loads_beside_a_writer_that_keeps_one(tmp_path: Path) -> None:
    save(tmp_path, 0, extra={"step": 0})
    ended = threading.Event()

    def write() -> None:
        for step in range(1, 10_000):
            if ended.is_set():
                return
            save(tmp_path, step, extra={"step": step}, keep=1)

    def read() -> None:
        try:
            for _ in range(LOADS):
                loaded = load(tmp_path)
                assert loaded.extra == {"step": loaded.step}
        finally:
            ended.set()

    assert in_threads(write, read) == []


def test_two_writers_do_not_take_each_others_files_for_leftovers(tmp_path: Path, caplog: Any) -> None:
    def write(first: int) -> None:
        for step in range(first, LOADS, 2):
            save(tmp_path, step, extra={"step": step}, keep=2)

    with caplog.at_level(logging.WARNING):
        assert in_threads(lambda: write(0), lambda: write(1)) == []
    assert "leftover" not in caplog.text
    newest = latest(tmp_path)
    assert newest is not None
    assert verify(newest) > 0
    assert [name for name in names_in(tmp_path) if name.startswith(".")] == []


def test_a_step_that_another_process_saves_first_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_first() -> None:
        monkeypatch.undo()
        save(tmp_path, 1, extra={"who": "the other"})

    at_call(monkeypatch, storage, "rename", 0, save_first)
    with pytest.raises(CheckpointError, match="step-00000001 exists already: pass overwrite=True"):
        save(tmp_path, 1, extra={"who": "this one"})
    assert load(tmp_path).extra == {"who": "the other"}
    assert names_in(tmp_path) == ["step-00000001"]


# A disk that fails


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_every_operation_of_a_load_may_fail(tmp_path: Path) -> None:
    seen = disk_faults_of_loads(tmp_path)
    assert seen.problems == []
    assert seen.tried == seen.loaded + seen.refused
    assert seen.loaded > 10
    assert seen.refused > 10


def test_the_error_of_the_only_checkpoint_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1, extra={"a": torch.ones(3)})
    at_call(monkeypatch, storage, "read_into", 1, fail)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors cannot be read: .*Input/output error"):
        load(path)


def test_a_missing_right_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def refuse() -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    at_call(monkeypatch, storage, "open_descriptor", 0, refuse)
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        load(tmp_path)
    assert not isinstance(caught.value, CorruptCheckpointError)


# Files of others


def test_what_others_have_left_in_the_directory_stays(tmp_path: Path) -> None:
    """Only leftovers of saves that are older than a day go."""
    old, young = (tmp_path / f".step-0000000{number}.deadbeef.tmp" for number in (1, 2))
    mine = [tmp_path / name for name in (".step-1.tmp", "step-notes", ".git", "step-00000003")]
    for path in (old, young, *mine):
        path.mkdir()
        (path / "rank-00000.safetensors").write_bytes(b"half")
        for each in (path / "rank-00000.safetensors", path) if path is not young else (path,):
            os.utime(each, (0, 0))
    links = [tmp_path / ".step-00000009.0badf00d.tmp", tmp_path / "step-00000004"]
    links[0].symlink_to(".git")
    links[1].symlink_to("nothing")
    os.utime(links[0], (0, 0), follow_symlinks=False)
    file = tmp_path / "step-00000005"
    file.write_text("a file")
    first = save(tmp_path, 1)
    before = fingerprint(first)
    for step in (3, 4, 5):
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match=f"step-0000000{step} exists already"):
                save(tmp_path, step, overwrite=overwrite)
    save(tmp_path, 2)
    assert not old.exists()
    assert all((path / "rank-00000.safetensors").exists() for path in (young, *mine))
    assert all(path.is_symlink() for path in links)
    assert file.read_text() == "a file"
    assert fingerprint(first) == before


def fingerprint(path: Path) -> list[Any]:
    return [(file.name, file.stat().st_mtime_ns, file.read_bytes()) for file in sorted(path.iterdir())]
