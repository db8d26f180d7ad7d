"""Checkpoints of one process without a process group: odd models and optimizers, and runs that were taken back."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from onecopy import CheckpointError
from onecopy.checkpoint import capture, latest, load, restore, save, storage, verify


def flip(path: Path) -> None:
    """Damage the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_keeping_a_few_never_removes_the_one_just_saved(tmp_path: Path) -> None:
    """A run was taken back from step 30: later steps are of the past, and count for nothing."""
    model = nn.Linear(2, 2)
    for step in (10, 20, 30):
        save(tmp_path, step, model=model)
    assert save(tmp_path, 15, model=model, keep=1).is_dir()
    assert steps_in(tmp_path) == [15, 20, 30]
    save(tmp_path, 40, model=model, keep=2)
    assert steps_in(tmp_path) == [30, 40]


def test_a_run_that_went_back_past_a_damaged_checkpoint_can_save_its_step_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, 1, model=model)
    flip(save(tmp_path, 2, model=model) / "rank-00000.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, model=model).step == 1
        assert verify(save(tmp_path, 2, model=model)) > 0
    assert "is damaged" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_step_that_exists_is_noticed_at_once_and_replaced_on_request(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = save(tmp_path, 2, extra={"who": "before"}) / "manifest.json"
    content = before.read_bytes()
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match=r"step-00000002 exists already: pass overwrite=True"):
            save(tmp_path, 2, model=model, blocking=blocking)
    assert before.read_bytes() == content
    for blocking in (True, False):
        save(tmp_path, 2, extra={"who": blocking}, overwrite=True, blocking=blocking)
        assert load(tmp_path).extra == {"who": blocking}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["rename", "flush_directory"])
def test_an_overwrite_that_fails_leaves_the_old_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, extra={"who": "before"})
    real, calls = getattr(storage, name), []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == {"rename": 2, "flush_directory": 4}[name]:
            raise OSError(5, "Input/output error")
        real(*arguments)

    monkeypatch.setattr(storage, name, failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2, extra={"who": "after"}, overwrite=True)
    assert load(tmp_path).extra == {"who": "before"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("known", ["", "load", "overwrite"])
def test_steps_of_another_run_are_noticed_at_the_first_save(
    known: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only when the run comes to them."""
    model = nn.Linear(2, 2)
    save(tmp_path / "run", 30, model=model)
    (tmp_path / "run").rename(tmp_path / "other")  # as another process has left it
    if known == "load":
        load(tmp_path / "other", model=model)
    save(tmp_path / "other", 10, model=model, overwrite=known == "overwrite")
    save(tmp_path / "other", 20, model=model, overwrite=known == "overwrite")
    noticed = [line for line in caplog.messages if "later steps, up to step-00000030" in line]
    assert len(noticed) == (0 if known else 1)


def test_options_of_numpy_are_saved_as_the_equal_numbers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=numpy.float32(1e-3), weight_decay=numpy.float64(0.1))
    optimizer.param_groups[0]["seen"] = numpy.int64(7)
    save(tmp_path, 1, model=model, optimizer=optimizer)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    load(tmp_path, model=model, optimizer=fresh)
    found = {key: fresh.param_groups[0][key] for key in ("lr", "weight_decay", "seen")}
    assert found == {"lr": float(numpy.float32(1e-3)), "weight_decay": 0.1, "seen": 7}
    assert [type(value) for value in found.values()] == [float, float, int]


def test_a_parameter_with_holes_in_its_memory(tmp_path: Path) -> None:
    memory = torch.arange(80.0)
    param = nn.Parameter(memory.as_strided((4, 10), (20, 1)))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    param.grad = torch.randn(4, 10)
    optimizer.step()
    expected = {key: value.clone() for key, value in optimizer.state[param].items()}
    save(tmp_path, 1, optimizer=optimizer)
    for fresh in (True, False):
        target = torch.optim.AdamW([param], lr=0.1) if fresh else optimizer
        if not fresh:
            param.grad = torch.randn(4, 10)
            optimizer.step()
        load(tmp_path, optimizer=target)
        for key, value in expected.items():
            assert torch.equal(target.state[param][key], value), key


class Transposed(nn.Module):
    """Shows its square weight transposed in its state dict, and takes it back that way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_state_dict_post_hook(_transpose)
        self.register_load_state_dict_pre_hook(_transpose_back)


def _transpose(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


def _transpose_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


def test_a_state_dict_that_shows_another_view_of_a_parameter(tmp_path: Path) -> None:
    model, other = Transposed(), Transposed()
    save(tmp_path, 1, model=model)
    load(tmp_path, model=other)
    assert torch.equal(other.weight, model.weight)


def test_loading_is_seen_by_autograd(tmp_path: Path) -> None:
    """As after ``load_state_dict``: a backward pass that needs the old values raises."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    save(tmp_path, 1, model=model)
    loss = model(torch.ones(2, 3)).sum()
    load(tmp_path, model=model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*TorchScript.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchs_own_class_is_refused_by_name(tmp_path: Path) -> None:
    """Its state would be found nowhere, and nothing saved."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        zero = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(TypeError, match=r"use onecopy\.ZeroRedundancyOptimizer"):
            save(tmp_path / "run", 1, optimizer=zero)
    finally:
        dist.destroy_process_group()


def test_state_that_is_finer_than_its_parameter_stays_so(tmp_path: Path) -> None:
    """NAdam keeps a float32 product beside bf16 moments; torch's load_state_dict would round it."""
    torch.manual_seed(0)

    def stepped(count: int, start: Tensor) -> tuple[nn.Parameter, torch.optim.NAdam]:
        param = nn.Parameter(start.clone())
        optimizer = torch.optim.NAdam([param], lr=0.1)
        return param, go_on(param, optimizer, range(count))

    def go_on(param: nn.Parameter, optimizer: torch.optim.NAdam, steps: range) -> torch.optim.NAdam:
        for step in steps:
            param.grad = torch.full_like(param, 0.1 * (step + 1))
            optimizer.step()
        return optimizer

    origin = torch.randn(9, dtype=torch.bfloat16)
    param, optimizer = stepped(3, origin)
    model = nn.ParameterDict({"w": param})
    save(tmp_path, 3, model=model, optimizer=optimizer)
    other, fresh = stepped(0, origin)
    load(tmp_path, model=nn.ParameterDict({"w": other}), optimizer=fresh)
    assert fresh.state[other]["mu_product"].dtype is torch.float32
    go_on(param, optimizer, range(3, 6))
    go_on(other, fresh, range(3, 6))
    assert torch.equal(other, param)
    assert torch.equal(fresh.state[other]["mu_product"], optimizer.state[param]["mu_product"])


class WithText(torch.optim.SGD):
    """Keeps text and nested data in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(mode="fast", seen=OrderedDict(a=(1, 2)))
        return super().step(closure)


def test_text_and_nested_data_in_the_state_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = WithText(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path, 1, model=model, optimizer=optimizer)
    fresh = WithText(model.parameters(), lr=0.1, momentum=0.9)
    load(tmp_path, model=model, optimizer=fresh)
    assert fresh.state[model.weight]["mode"] == "fast"
    assert fresh.state[model.weight]["seen"] == OrderedDict(a=(1, 2))
    assert type(fresh.state[model.weight]["seen"]) is OrderedDict


def test_a_tensor_learning_rate_comes_back_as_a_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    save(tmp_path, 1, model=model, optimizer=optimizer)
    fresh = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    load(tmp_path, model=model, optimizer=fresh)
    assert torch.equal(fresh.param_groups[0]["lr"], torch.tensor(0.25))


def test_a_class_that_has_moved_to_another_module_is_taken_for_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, 1, model=model, optimizer=WithText(model.parameters(), lr=0.1))
    monkeypatch.setattr(WithText, "__module__", "train")
    with caplog.at_level(logging.WARNING):
        load(tmp_path, model=model, optimizer=WithText(model.parameters(), lr=0.2))
    assert "is taken for a train.WithText" in caplog.text


def test_nothing_to_load_is_none_if_that_is_all_right(tmp_path: Path) -> None:
    assert load(tmp_path / "run", missing_ok=True) is None
    with pytest.raises(FileNotFoundError, match="is not a checkpoint"):
        load(tmp_path / "run")
    save(tmp_path / "run", 1, extra=capture(position=7))
    found = load(tmp_path / "run", missing_ok=True)
    assert found is not None
    assert restore(found.extra) == 7
    assert latest(tmp_path / "run") == found.path


def test_a_relative_root_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onecopy.checkpoint import wait

    monkeypatch.chdir(tmp_path)
    save("run", 1, model=nn.Linear(2, 2), blocking=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    wait()
    assert verify(tmp_path / "run") > 0
