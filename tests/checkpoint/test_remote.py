"""Checkpoints in a directory and on remote stores: fsspec's memory, and a store that several processes see."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner, Result

from onecopy.checkpoint import latest, load, save, saving, storage, verify
from onecopy.checkpoint.ranks import explained_os_errors
from onecopy.cli.main import app
from onecopy.errors import CheckpointError, CorruptCheckpointError, OnecopyError
from tests.support import remote
from tests.support.checkpoints import make
from tests.support.harness import distributed
from tests.support.hostile import NAME, Pair, trained
from tests.support.models import assert_same_tree
from tests.support.remote import SharedFileSystem, steps_of


@pytest.fixture(params=["memory://", "shared://", ""], ids=["memory", "shared", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"{request.param}{tmp_path}/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def shared(tmp_path: Path) -> str:
    return f"shared://{tmp_path}/run"


def broken(monkeypatch: pytest.MonkeyPatch, operations: str) -> None:
    monkeypatch.setattr(SharedFileSystem, "broken", operations)


REMOTE = pytest.mark.parametrize("root", ["memory://", "shared://"], indirect=True)


@pytest.mark.parametrize("check", [remote.check_round_trip, remote.check_keep, remote.check_existing])
def test_a_remote_root_is_used_as_a_directory_is(check: Callable[[str], None], root: str) -> None:
    check(root)


@REMOTE
def test_what_a_dead_save_has_left_is_no_checkpoint_and_is_removed(root: str) -> None:
    remote.check_leftovers(root)


@pytest.mark.parametrize(("name", "position"), [(NAME, 20), (NAME, -1), ("manifest.json", 300), (NAME, None)])
def test_one_changed_bit_or_a_missing_object_is_refused(name: str, position: int | None, root: str) -> None:
    remote.check_damage(root, name, position)


def test_a_reader_whose_checkpoint_is_removed_takes_the_newest(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, real = trained(), storage.open_to_read
    pair.save(root, 1)

    def pruned_first(path: Any) -> Any:
        monkeypatch.undo()
        pair.save(root, 2, keep=1)
        return real(path)

    monkeypatch.setattr(storage, "open_to_read", pruned_first)
    assert Pair(1).load(root).step == 2
    assert steps_of(root) == {2}


@pytest.mark.parametrize("operations", ["^wb .*manifest", "^wb .*rank-", "^(wb .*manifest|rm )"])
def test_a_save_that_fails_before_its_manifest_leaves_the_older_checkpoint_as_the_newest(
    operations: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained()
    first = pair.save(shared, 1)
    with monkeypatch.context() as patch:
        broken(patch, operations)
        with pytest.raises(CheckpointError, match=f"{re.escape(shared)}/step-00000002/.*ConnectionError: the store is"):
            pair.save(shared, 2, keep=1)
    assert latest(shared) == first
    assert Pair(1).load(shared).step == 1
    assert steps_of(shared) == ({1, 2} if "rm" in operations else {1})
    pair.save(shared, 2)
    assert Pair(1).load(shared).step == 2


def test_a_store_that_fails_is_not_damage(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint is not loaded because the network is down."""
    pair, other = trained(), Pair(1)
    pair.save(shared, 1)
    pair.save(shared, 2)
    before = {key: value.clone() for key, value in other.tensors().items()}
    for operations in ("^rb .*rank-", "^info .*manifest", "^info .*rank-"):
        with monkeypatch.context() as patch:
            broken(patch, operations)
            with pytest.raises(CheckpointError, match=r"shared://.*out of reach") as caught:
                other.load(shared)
        assert not isinstance(caught.value, CorruptCheckpointError)
        assert_same_tree(other.tensors(), before, operations)


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    root = f"file://{tmp_path}/run"
    path = save(root, 1, extra={"a": 1})
    assert path == latest(root) == tmp_path / "run" / "step-00000001"
    assert path.is_dir()
    assert load(root).extra == {"a": 1}


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("memory://a*", ValueError, "is not supported"),  # fsspec would expand it
        ("x::memory://a", ValueError, "is not supported"),
        ("nowhere://run", CheckpointError, "ValueError: Protocol not known"),
        ("memory://run", CheckpointError, r"needs fsspec: pip install 'onecopy\[remote\]'"),
    ],
)
def test_urls_that_cannot_be_used_are_named(
    url: str, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "fsspec" in text:
        monkeypatch.setitem(sys.modules, "fsspec", None)
    for call in (lambda: save(url, 1), lambda: load(url), lambda: latest(url)):
        with pytest.raises(kind, match=f"{re.escape(url)}.* {text}"):
            call()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@REMOTE
def test_commands_take_urls_and_write_local_files(root: str, tmp_path: Path) -> None:
    path = trained().save(root, 5)
    found = json.loads(run("inspect", root, "--json").stdout)
    assert (found["checkpoint"], found["step"]) == (str(path), 5)
    assert json.loads(run("verify", root, "--json").stdout)["bytes"] == verify(root)
    assert run("convert", root, tmp_path / "all.pt", "--to", "torch").exit_code == 0
    assert torch.load(tmp_path / "all.pt", weights_only=True)["step"] == 5
    result = run("convert", root, f"{root}.pt", "--to", "torch")
    assert result.exit_code == 1
    assert "must be a local file" in re.sub(r"\s+", " ", result.output)


@distributed(1, 2)
def test_ranks_save_and_load(world_size: int, tmp_path: Path) -> None:
    remote.check_ranks(f"shared://{tmp_path}/run")


@distributed(2)
def test_a_store_that_only_one_process_sees_is_refused(world_size: int) -> None:
    with pytest.raises(OnecopyError, match=r"rank 0 does not see memory://alone/.*: all ranks must save to one"):
        make("plain").save("memory://alone", 1)
    assert latest("memory://alone") is None
    MemoryFileSystem.store.clear()


@distributed(2)
def test_a_rank_that_fails_after_the_commit_takes_nothing_back(world_size: int, tmp_path: Path) -> None:
    """As with the rename of a directory: what is complete stays."""
    root, side = f"shared://{tmp_path}/run", make("plain")

    def refuse(action: str) -> Any:
        if action.startswith("committing"):
            raise CheckpointError("this rank is out of order")
        return explained_os_errors(action)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(saving, "explained_os_errors", refuse)
        with pytest.raises(OnecopyError, match="out of order"):
            side.save(root, 1)
    assert side.load(root).step == 1
