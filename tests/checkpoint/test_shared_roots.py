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

from onecopy.checkpoint import latest, load, save, storage, verify
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support.crowded import disk_faults_of_loads
from tests.support.hostile import Pair, trained

LOADS = 40


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


def raising(number: int) -> Callable[[], object]:
    """Something that raises this error of the system."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def fingerprint(path: Path) -> list[Any]:
    return [(file.name, file.stat().st_mtime_ns, file.read_bytes()) for file in sorted(path.iterdir())]


# A reader beside a writer


@pytest.mark.parametrize(
    ("name", "number", "step"),
    [
        *(("exists", number, 2) for number in (1, 3)),
        *(("size_of", number, 2) for number in (0, 1)),
        *(("open_descriptor", number, 2) for number in (0, 1)),
        ("read_into", 4, 1),  # files that are open can be read after they were removed
    ],
)
def test_a_load_whose_checkpoint_a_save_removes_takes_the_new_one_or_ends(
    name: str, number: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, other = trained(), Pair(1)
    pair.save(tmp_path, 1)

    def save_and_prune() -> None:
        monkeypatch.undo()
        pair.save(tmp_path, 2, keep=1)
        assert names_in(tmp_path) == ["step-00000002"]

    calls = at_call(monkeypatch, storage, name, number, save_and_prune)
    assert other.load(tmp_path).step == step
    assert len(calls) > number
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


def test_every_operation_of_a_load_may_fail(tmp_path: Path) -> None:
    seen = disk_faults_of_loads(tmp_path)
    assert seen.problems == []
    assert seen.tried == seen.loaded + seen.refused
    assert seen.loaded > 10
    assert seen.refused > 10


def test_errors_of_the_only_checkpoint_and_missing_rights_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1, extra={"a": torch.ones(3)})
    with monkeypatch.context() as patch:
        at_call(patch, storage, "read_into", 1, raising(errno.EIO))
        text = r"rank-00000\.safetensors cannot be read: .*Input/output error"
        with pytest.raises(CorruptCheckpointError, match=text):
            load(path)
    save(tmp_path, 2)
    at_call(monkeypatch, storage, "open_descriptor", 0, raising(errno.EACCES))
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        load(tmp_path)
    assert not isinstance(caught.value, CorruptCheckpointError), "it is not damage, so that step 1 is not loaded"


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        at_call(patch, storage, "remove", 0, raising(errno.EIO))
        second = save(tmp_path, 2, keep=1)
    assert latest(tmp_path) == second
    (hidden,) = tmp_path.glob(".pruned.*.tmp")
    for each in (*hidden.iterdir(), hidden):
        os.utime(each, (0, 0))  # as a day later
    save(tmp_path, 3, keep=1)
    assert names_in(tmp_path) == ["step-00000003"]


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
