"""Manifests that an attacker has written, with right checksums: each is refused, and nothing outside is touched."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.checkpoint import load, save, storage, verify
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support import hostile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as a save writes it."""
    return hostile.trained().save(tmp_path / "root")


PLACES: dict[str, Callable[[Path], object]] = {
    f"{what} in the place of {name}": partial(hostile.substitute, what=what, name=name)
    for what, name in itertools.product(hostile.SUBSTITUTES, (hostile.NAME, "manifest.json"))
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a newer version": partial(hostile.reseal, change=lambda content: content.update(version=2)),
    "half a file": lambda folder: os.truncate(folder / hostile.NAME, 999),
    "half a manifest": lambda folder: os.truncate(folder / "manifest.json", 300),
    "no file": lambda folder: (folder / hostile.NAME).unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}
HOSTILE: dict[str, Callable[[Path], object]] = {
    **{name: partial(hostile.reseal, change=change) for name, change in hostile.ATTACKS.items()},
    **{name: partial(hostile.reseal_text, change=text) for name, text in hostile.TEXTS.items()},
    **PLACES,
    **DAMAGES,
}
NOT_DAMAGE = ("a class that is not safe", "a weight that is no tensor", "blocks of another size", "a newer version")
"""Attacks after which the checkpoint may be whole, but does not fit here."""


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_checkpoint_is_refused_at_once_and_changes_nothing(attack: str, folder: Path) -> None:
    HOSTILE[attack](folder)
    pair, seen = hostile.Pair(1), hostile.Seen()
    pair.step()
    before = {key: value.clone() for key, value in pair.tensors().items()}
    with hostile.little_memory():
        refusal = hostile.attempt(folder, pair, seen, attack)
    assert seen.problems == []
    assert isinstance(refusal, CheckpointError)
    assert isinstance(refusal, CorruptCheckpointError) or attack in NOT_DAMAGE
    assert all(torch.equal(value, before[key]) for key, value in pair.tensors().items())
    pair.step()
    if attack not in hostile.ATTACKS:
        with hostile.time_limit(), pytest.raises(CheckpointError) as caught:
            verify(folder)
        assert type(caught.value) is type(refusal)
        assert str(folder) in str(caught.value)


def test_random_changes_are_refused_or_load_what_the_files_hold(folder: Path) -> None:
    seen = hostile.Seen()
    with hostile.little_memory():
        hostile.attack_at_random(folder, 150, seed=0, seen=seen)
    assert seen.problems == []
    assert seen.refused + seen.loaded == seen.tried == 150
    assert min(seen.refused, seen.loaded) > 5
    pair = hostile.Pair(1)
    pair.load(folder)
    assert hostile.difference(folder, pair) == ""
    pair.linear.weight.detach()[3, 4] += 1
    assert "model/0.weight is not what the files hold" in hostile.difference(folder, pair)


def test_files_are_not_opened_before_the_manifest_is_checked(folder: Path) -> None:
    hostile.reseal(folder, hostile.ATTACKS["strides with gaps"])
    with hostile.opened_files() as opened, pytest.raises(CorruptCheckpointError, match="gaps in memory"):
        hostile.Pair().load(folder)
    assert [Path(path).name for path in opened] == ["manifest.json"]


def test_values_that_could_not_be_loaded_are_not_saved(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(101):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"nothing was saved, .* nested in more than 100 containers"):
        save(tmp_path, 1, extra={"deep": deep})
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, 1, extra={"deep": deep[0][0][0]})
    assert load(tmp_path).extra == {"deep": deep[0][0][0]}


@pytest.mark.parametrize("key", ["model/0.weight", "optimizer.0/0.weight/exp_avg"])
def test_bytes_that_change_after_the_check_are_not_taken(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = hostile.content_of(folder)["tensors"][key]["pieces"][0]["offset"]
    real, seen = storage.read_into, list[int]()

    def changed(descriptor: int, memory: memoryview, offset: int) -> int:
        """Change the file between the read that checks this tensor and the one into place."""
        seen.append(offset)
        if seen.count(place) == 2:
            with (folder / hostile.NAME).open("r+b") as file:
                file.seek(place + 8)
                file.write(bytes(40))
        return real(descriptor, memory, offset)

    pair = hostile.Pair(1)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_into", changed)
        with pytest.raises(
            CheckpointError, match=rf"refuse to step until a load succeeds: .*{hostile.NAME}.*do not match"
        ):
            pair.load(folder)
    with pytest.raises(CheckpointError, match="load a checkpoint before the next step"):
        pair.step()
