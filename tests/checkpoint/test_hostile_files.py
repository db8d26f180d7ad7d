"""Files of ``torch.save`` that an attacker has written: converting them takes little memory and time."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecopy.checkpoint import load, verify
from onecopy.checkpoint.convert import from_torch
from onecopy.errors import CheckpointError
from tests.support.hostile import Pair, little_memory, time_limit


def doubled(times: int) -> Any:
    tree: Any = [1]
    for _ in range(times):
        tree = [tree, tree]
    return tree


def endless() -> list[Any]:
    tree: list[Any] = []
    tree.append(tree)
    return tree


def expanded(count: int) -> torch.Tensor:
    return torch.zeros(1).expand(count)


LARGE: dict[str, Callable[[], Any]] = {
    "an expanded tensor": lambda: {"model": {"w": expanded(1 << 30)}},
    "an expanded tensor in a model alone": lambda: {"w": expanded(1 << 30)},
    "many expanded tensors": lambda: {"model": {f"w{n}": expanded((1 << 20) + n) for n in range(1000)}},
    "an expanded tensor in the state": lambda: {
        "optimizer": {"state": {0: {"m": expanded(1 << 30)}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    },
    "overlapping views": lambda: {"model": {}, "extra": views()},
    "one tensor many times": lambda: {"model": {}, "extra": [torch.zeros(100_000)] * 10_000},
    "lists in lists": lambda: {"model": {}, "extra": doubled(40)},
    "a list in itself": lambda: {"model": {}, "extra": endless()},
    "a long text many times": lambda: {"model": {}, "extra": ["x" * 100_000] * 100_000},
}


def views() -> list[torch.Tensor]:
    memory = torch.zeros(100_000)
    return [memory[number:] for number in range(1000)]


@pytest.mark.parametrize("name", LARGE)
def test_a_file_whose_values_are_much_larger_is_refused(name: str, tmp_path: Path) -> None:
    torch.save(LARGE[name](), tmp_path / "hostile.pt")
    assert (tmp_path / "hostile.pt").stat().st_size < 2_000_000
    with little_memory(), time_limit(), pytest.raises(CheckpointError, match="many times as large"):
        from_torch(tmp_path / "hostile.pt", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(1000)}}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="is compressed"):
        from_torch(tmp_path / "packed.pt", tmp_path / "run")


def test_tensors_that_names_of_a_model_share_are_converted(tmp_path: Path) -> None:
    memory = torch.randn(100_000)
    torch.save({"model": {f"w{number}": memory for number in range(200)}}, tmp_path / "tied.pt")
    path = from_torch(tmp_path / "tied.pt", tmp_path / "run")
    assert verify(path) < 600_000


@pytest.mark.parametrize("step", [-1, True, 1.5, "x", None, 1 << 70, torch.ones(1)])
def test_a_step_that_is_none_is_refused(step: Any, tmp_path: Path) -> None:
    torch.save({"model": {}, "step": step}, tmp_path / "it.pt")
    with pytest.raises(ValueError, match="step must be a number from 0 on"):
        from_torch(tmp_path / "it.pt", tmp_path / "run")
    assert from_torch(tmp_path / "it.pt", tmp_path / "run", 3).name == "step-00000003"


NAMES = st.sampled_from(["model", "optimizer", "param_groups", "state", "params", "step", "extra", "lr", 0])
TENSORS = st.sampled_from(
    [torch.ones(2), expanded(9), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(b"bytes") | TENSORS
ODD = st.recursive(
    LEAVES | st.builds(Pair).map(lambda pair: pair.optimizer.state_dict()),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=ODD)
def test_any_content_is_converted_or_refused_in_words(content: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("it")
    torch.save(content, folder / "it.pt")
    try:
        with time_limit():
            path = from_torch(folder / "it.pt", folder / "run")
    except (CheckpointError, TypeError, ValueError):
        return
    load(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), length=st.floats(0, 1))
def test_a_damaged_file_is_converted_or_refused_in_words(
    position: float, bit: int, length: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("it")
    pair = Pair()
    torch.save({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()}, folder / "it.pt")
    content = bytearray((folder / "it.pt").read_bytes())
    content[int(position * len(content))] ^= 1 << bit
    (folder / "it.pt").write_bytes(content[: int(length * 2 * len(content))])
    try:
        with time_limit():
            from_torch(folder / "it.pt", folder / "run")
    except (CheckpointError, TypeError, ValueError):
        return
