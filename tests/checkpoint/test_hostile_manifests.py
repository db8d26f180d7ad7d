"""Manifests that an attacker has written, with right checksums: each is refused, and nothing outside is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecopy.checkpoint import load, loading, save, verify
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support import hostile
from tests.support.hostile import (
    ATTACKS,
    NAME,
    PLACES,
    TEXTS,
    Pair,
    Seen,
    attempt,
    content_of,
    little_memory,
    mutate,
    sealed,
)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a save writes it."""
    pair = Pair()
    pair.step()
    return pair.save(tmp_path_factory.mktemp("origin"))


@pytest.fixture
def folder(origin: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(origin, tmp_path / "root" / origin.name))


NOT_DAMAGE = ("a class that is not safe", "a weight that is no tensor", "blocks of another size")
"""Attacks after which the checkpoint may be whole, but does not fit here."""


def refused(folder: Path, error: type[Exception] = CorruptCheckpointError) -> None:
    """A load is refused at once with this error, opens nothing else, and changes nothing."""
    pair = Pair(1)
    pair.step()
    before = {key: value.clone() for key, value in pair.tensors().items()}
    seen = Seen()
    with little_memory():
        attempt(folder, pair, seen, folder.name)
        assert (seen.problems, seen.refused) == ([], 1)
        with hostile.time_limit(), pytest.raises(error):
            load(folder, model=pair.model, optimizer=pair.optimizer)
    assert all(torch.equal(value, before[key]) for key, value in pair.tensors().items())
    pair.step()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_value_is_refused(attack: str, folder: Path) -> None:
    hostile.reseal(folder, ATTACKS[attack])
    refused(folder, CheckpointError if attack in NOT_DAMAGE else CorruptCheckpointError)


@pytest.mark.parametrize("attack", TEXTS)
def test_hostile_json_is_refused(attack: str, folder: Path) -> None:
    hostile.reseal_text(folder, TEXTS[attack])
    refused(folder)


@pytest.mark.parametrize("attack", PLACES)
def test_something_else_in_the_place_of_a_file_is_refused_without_waiting_for_it(attack: str, folder: Path) -> None:
    PLACES[attack](folder)
    refused(folder)
    with hostile.time_limit(), pytest.raises(CorruptCheckpointError):
        verify(folder)


def test_files_are_not_opened_before_the_manifest_is_checked(folder: Path) -> None:
    hostile.reseal(folder, ATTACKS["strides with gaps"])
    with hostile.opened_files() as opened, pytest.raises(CorruptCheckpointError, match="gaps in memory"):
        Pair().load(folder)
    assert [path for path in opened if path.endswith(".safetensors")] == []
    with hostile.opened_files() as opened:
        (folder / NAME).read_bytes()
    assert len(opened) == 1, "the hook sees files that are opened"


def test_a_hostile_checkpoint_is_passed_over_for_an_older_one(origin: Path, tmp_path: Path) -> None:
    shutil.copytree(origin, tmp_path / "step-00000001")
    shutil.copytree(origin, tmp_path / "step-00000002")
    hostile.reseal(tmp_path / "step-00000002", ATTACKS["a name that leaves the directory"])
    assert Pair(1).load(tmp_path).path == tmp_path / "step-00000001"


def test_values_that_could_not_be_loaded_are_not_saved(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(101):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"nothing was saved, .* nested in more than 100 containers"):
        save(tmp_path, 1, extra={"deep": deep})
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, 1, extra={"deep": deep[0][0][0]})
    assert load(tmp_path).extra == {"deep": deep[0][0][0]}


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(generator=st.randoms(use_true_random=False))
def test_a_random_change_is_refused_or_loads_what_the_files_hold(generator: Any, origin: Path) -> None:
    path = origin / "manifest.json"
    text, seen = path.read_bytes(), Seen()
    try:
        path.write_bytes(sealed(mutate(content_of(origin), generator)))
        with little_memory():
            attempt(origin, Pair(1), seen, "it")
    finally:
        path.write_bytes(text)
    assert seen.problems == []


def test_the_comparison_with_the_files_notices_other_values(origin: Path) -> None:
    pair = Pair(1)
    pair.load(origin)
    assert hostile.difference(origin, pair) == ""
    with torch.no_grad():
        pair.linear.weight[3, 4] += 1
    assert "model/0.weight is not what the files hold" in hostile.difference(origin, pair)


# Between the check and the read into place


def after_the_check(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Do something when every byte has been checked and nothing has been loaded."""
    real = loading._fill

    def changed(*arguments: Any) -> None:
        change()
        real(*arguments)

    monkeypatch.setattr(loading, "_fill", changed)


@pytest.mark.parametrize("key", ["model/0.weight", "optimizer.0/0.weight/exp_avg"])
def test_bytes_that_change_after_the_check_are_not_taken(
    key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = content_of(folder)["tensors"][key]["pieces"][0]["offset"]

    def change() -> None:
        with (folder / NAME).open("r+b") as file:
            file.seek(offset + 8)
            file.write(bytes(40))

    pair = Pair(1)
    with monkeypatch.context() as patch:
        after_the_check(patch, change)
        with pytest.raises(CheckpointError, match=r"refuse to step until a load succeeds: .*do not match") as caught:
            pair.load(folder)
    assert NAME in str(caught.value)
    with pytest.raises(CheckpointError, match="load a checkpoint before the next step"):
        pair.step()
