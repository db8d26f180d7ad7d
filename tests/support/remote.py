"""Remote stores for tests: one that all processes on this machine see, and checks that hold on every store."""

from __future__ import annotations

import logging
import os
import re
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from onecopy.checkpoint import PerRank, latest, storage, verify, wait
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support.checkpoints import make
from tests.support.hostile import NAME, Pair, trained
from tests.support.logs import logged
from tests.support.models import assert_same_tree


class SharedFileSystem(LocalFileSystem):
    """Local files under a protocol of their own, so that they are taken for a remote store.

    Operations whose description matches ``broken`` fail as if there were no network.
    """

    protocol = "shared"
    broken: ClassVar[str] = ""

    def _note(self, operation: str, path: Any) -> None:
        if self.broken and re.search(self.broken, f"{operation} {os.fspath(path)}"):
            raise ConnectionError("the store is out of reach")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._note(mode, path)
        return super()._open(path, mode, **options)

    def info(self, path: Any, **options: Any) -> Any:
        self._note("info", path)
        return super().info(path, **options)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._note("rm", path)
        super().rm(path, recursive, maxdepth)

    def rm_file(self, path: str) -> None:
        self._note("rm", path)
        super().rm_file(path)


fsspec.register_implementation("shared", SharedFileSystem)


def objects(root: str) -> dict[str, bytes]:
    """Everything under a URL, by its name below it."""
    fs, path = fsspec.url_to_fs(root)
    fs.invalidate_cache()
    return {name.removeprefix(f"{path}/"): fs.cat_file(name) for name in fs.find(path)}


def steps_of(root: str) -> set[int]:
    """The steps of which there are objects."""
    return {int(match[1]) for name in objects(root) if (match := re.match(r"step-(\d+)/", name))}


def file_in(folder: object) -> str:
    """The name of the file of rank 0, which on a remote store no other save has."""
    (name,) = [name for name in objects(str(folder)) if name.startswith("rank-00000")]
    return name


def put(url: str, content: bytes) -> None:
    """Write an object as another program would."""
    fs, path = fsspec.url_to_fs(url)
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, content)


def check_round_trip(root: str) -> None:
    """A checkpoint is found and loaded by the URL of the root and by its own."""
    pair = trained()
    assert latest(root) is None
    path = pair.save(root, 1)
    assert str(path) == f"{root}/step-00000001"
    assert latest(root) == path
    assert set(objects(root)) == {f"step-00000001/{file_in(path)}", "step-00000001/manifest.json"}
    assert verify(root) == verify(path) == sum(map(len, objects(root).values()))
    for source in (root, f"{root}/", path, str(path)):
        other = Pair(1)
        loaded = other.load(source)
        assert (loaded.step, loaded.path, loaded.extra["list"][:2]) == (1, path, [1, 2.5])
        assert other.tensors().keys() == pair.tensors().keys()
        assert all(torch.equal(value, pair.tensors()[key]) for key, value in other.tensors().items())


def check_keep(root: str) -> None:
    """Older checkpoints are removed; later ones, and objects whose names only begin alike, stay."""
    pair = trained()
    put(f"{root}/step-00000001-notes/{NAME}", b"mine")
    for step in (1, 2, 3, 10):
        pair.save(root, step, keep=2, blocking=False)
        wait()
    assert steps_of(root) == {3, 10}
    pair.save(root, 4, keep=1)
    assert steps_of(root) == {4, 10}
    assert objects(root)[f"step-00000001-notes/{NAME}"] == b"mine"


def check_existing(root: str) -> None:
    """A step that was saved is only overwritten on request."""
    pair, other = trained(), Pair(1)
    path = pair.save(root, 1)
    before = objects(root)
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))} exists already.*overwrite=True"):
            pair.save(root, 1, blocking=blocking)
    assert objects(root) == before
    for blocking in (True, False):
        pair.step()
        pair.save(root, 1, overwrite=True, blocking=blocking)
        other.load(root)
        assert all(torch.equal(value, pair.tensors()[key]) for key, value in other.tensors().items())
        assert len(objects(root)) == 2


def check_damage(root: str, name: str, position: int | None) -> None:
    """An object with another bit, or none, is noticed; an older checkpoint is loaded, and the step saved again."""
    pair = trained()
    pair.save(root, 1)
    path = pair.save(root, 2)
    name = file_in(path) if name == NAME else name
    if position is None:
        fs, key = fsspec.url_to_fs(f"{path}/{name}")
        fs.rm(key)
    else:
        content = bytearray(objects(str(path))[name])
        content[position] ^= 1
        put(f"{path}/{name}", bytes(content))
    text = re.escape(f"{path}/{name} is {'missing' if position is None else 'damaged'}")
    for call in (Pair(1).load, verify):
        with pytest.raises(CorruptCheckpointError, match=text):
            call(path)
    mine = {"notes"} if "://" in root else set()  # a directory is replaced with all that is in it
    for name in mine:
        put(f"{path}/{name}", b"mine")
    with logged(logging.WARNING) as lines:
        assert Pair(1).load(root).step == 1
        assert verify(pair.save(root, 2)) > 0
    assert any(f"{path} is damaged, and is replaced" in line for line in lines)
    assert Pair(1).load(root).step == 2
    assert set(objects(str(path))) == {file_in(path), "manifest.json", *mine}


def check_leftovers(root: str) -> None:
    """A prefix without a manifest is no checkpoint. After a day a save removes it if a save has written all of it."""
    pair = trained()
    first = pair.save(root, 1)
    put(f"{root}/step-00000002/{NAME}", b"half")
    put(f"{root}/step-00000007/notes", b"mine")
    put(f"{root}/notes", b"mine")
    assert latest(root) == first
    assert Pair(1).load(root).step == 1
    with pytest.raises(CorruptCheckpointError, match=r"step-00000002/manifest.json is missing"):
        Pair(1).load(f"{root}/step-00000002")
    pair.save(root, 3)
    assert steps_of(root) == {1, 2, 3, 7}, "another save may be writing it"
    with logged(logging.WARNING) as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "LEFTOVER_SECONDS", -60)
        pair.save(root, 4)
    assert [line for line in lines if "leftover" in line] == [line for line in lines if "step-00000002" in line] != []
    assert steps_of(root) == {1, 3, 4, 7}
    pair.save(root, 7)
    assert {name for name, content in objects(root).items() if content == b"mine"} == {"notes", "step-00000007/notes"}


def check_ranks(root: str) -> None:
    """All ranks write their objects, and each loads its part again; a process sees what another one has written."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert latest(root) is None
    dist.barrier()
    side, other = make("element"), make("element", 9)
    for step in (1, 2, 3):
        side.train([step])
        side.save(root, step, extra={"own": PerRank(rank)}, keep=2)
    loaded = other.load(root)
    assert (loaded.step, loaded.extra) == (3, {"own": rank})
    assert str(latest(root)) == f"{root}/step-00000003"
    assert_same_tree(other.contents()[1], side.contents()[1], "optimizer")
    mine, saved = (dict(each.module.named_parameters()) for each in (other, side))  # buffers are those of rank 0
    assert_same_tree(mine, saved, "parameters")
    files = {"manifest.json", *(f"rank-{number:05d}.safetensors" for number in range(world_size))}
    found = {re.sub("-[0-9a-f]{8}[.]", ".", name) for name in objects(root)}
    assert found == {f"step-0000000{step}/{name}" for step in (2, 3) for name in files}
