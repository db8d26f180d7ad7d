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
from onecopy.checkpoint.convert import to_torch
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
    (directories, "has_manifest", 2),
    (directories, "has_manifest", 3),
    (storage, "size_of", 0),
    (storage, "size_of", 1),
    (storage, "open_descriptor", 0),
    (storage, "open_descriptor", 1),
]
"""Calls of a load before which a checkpoint may be pruned; after the last one its files are open."""


@pytest.mark.parametrize("point", READS, ids=lambda point: f"{point[1]} {point[2]}")
@pytest.mark.parametrize("action", ["load", "verify", "convert"])
def test_a_checkpoint_that_a_save_removes_is_replaced_by_the_new_one(
    point: tuple[Any, str, int], action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, root = trained(), tmp_path / "root"
    pair.save(root, 1)

    def save_and_prune() -> None:
        monkeypatch.undo()
        pair.save(root, 2, keep=1)
        assert names_in(root) == ["step-00000002"]

    calls = at_call(monkeypatch, *point, save_and_prune)
    if action == "load":
        assert Pair(1).load(root).step == 2
    elif action == "verify":
        assert verify(root) == verify(root / "step-00000002")
    else:
        to_torch(root, tmp_path / "all.pt")
        assert torch.load(tmp_path / "all.pt", weights_only=True)["step"] == 2
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


@pytest.mark.parametrize("name", ["size_of", "open_descriptor", "read_into"])
def test_an_error_of_the_disk_in_the_newest_falls_back_to_the_one_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = trained()
    first = pair.save(tmp_path, 1)
    with monkeypatch.context() as patch:
        before_fill = at_call(patch, storage, name, -1, lambda: None)
        verify(first)
    pair.save(tmp_path, 2)
    for number in before_fill:
        other = Pair(1)
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            at_call(patch, storage, name, number, fail)
            loaded = other.load(tmp_path)
        assert (loaded.step, loaded.path) == (1, first), number
        assert len(caplog.messages) == 1
        assert "step-00000002 is damaged" in caplog.text
        assert os.strerror(errno.EIO) in caplog.text
        other.step()


def test_every_operation_of_a_load_may_fail(tmp_path: Path) -> None:
    seen = disk_faults_of_loads(tmp_path)
    assert seen.problems == []
    assert seen.tried == seen.loaded + seen.refused
    assert seen.loaded > 10
    assert seen.refused > 10


def test_a_step_whose_checkpoint_cannot_be_read_can_be_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained()
    pair.save(tmp_path, 1)
    with monkeypatch.context() as patch:
        at_call(patch, storage, "read_into", 2, fail)
        saved = pair.save(tmp_path, 1)
    assert verify(saved) > 0
    assert [name.partition(".")[0] for name in names_in(tmp_path)] == ["damaged-step-00000001", "step-00000001"]


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


def test_files_that_are_named_like_leftovers_do_not_stop_a_save(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    (tmp_path / ".step-00000001.0badf00d.tmp").write_text("a file")
    (tmp_path / ".step-00000002.0badf00d.tmp").symlink_to("elsewhere")
    (tmp_path / ".pruned.0badf00d.tmp").symlink_to("nothing")
    (tmp_path / "step-00000003").write_text("a file")
    (tmp_path / "step-00000004").symlink_to("nothing")
    before = names_in(tmp_path)
    for name in (".step-00000001.0badf00d.tmp", ".step-00000002.0badf00d.tmp", ".pruned.0badf00d.tmp"):
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    for step in (1, 3, 4):
        assert verify(save(tmp_path, step)) > 0
    assert set(before) - {"step-00000003", "step-00000004"} <= set(names_in(tmp_path))
    assert (tmp_path / "elsewhere" / "kept").read_text() == "kept"
    assert sum(name.startswith("damaged-") for name in names_in(tmp_path)) == 2
