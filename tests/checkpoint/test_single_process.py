"""Checkpoints of one process without a process group: values, odd models and optimizers, directories, failing disks."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import AdamW, NAdam

from onecopy import CheckpointError, CorruptCheckpointError
from onecopy.checkpoint import capture, latest, load, restore, save, storage, verify, wait
from tests.support.checkpoints import STORABLE
from tests.support.crowded import disk_faults_of_loads
from tests.support.hostile import Pair, trained
from tests.support.state_dicts import expect_same


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def at_call(patch: pytest.MonkeyPatch, name: str, number: int, act: Callable[[], object]) -> list[int]:
    """Do something before the call of a file operation with this number; returns a list with an item for each call."""
    real, calls = getattr(storage, name), list[int]()

    def replacement(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == number:
            act()
        return real(*arguments, **options)

    patch.setattr(storage, name, replacement)
    return calls


def raising(number: int) -> Callable[[], object]:
    """Something that raises this error of the system."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def fingerprint(path: Path) -> list[Any]:
    return [(file.name, file.stat().st_mtime_ns, file.read_bytes()) for file in sorted(path.iterdir())]


def test_plain_data_and_tensors_of_every_type_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype) for dtype in STORABLE}
    extra: dict[str, Any] = {
        "tensors": tensors,
        "numbers": [0, -1, 2**80, 1.5, -0.0, float("nan"), float("inf"), -float("inf")],
        "none": None,
        "flags": (True, False, (), [], {}, ("nested", [("deep", {"x": (1,)})])),
        "keys": {1: "one", -2: 2.5, (1, "a"): None, False: 0, None: 1, 2.5: 3},
        "counter": Counter({3: 2, 7: 1}),
        "strides": [torch.randn(4, 5).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        "odd": [torch.tensor(2.5), torch.empty(0, 3), torch.tensor([float("nan"), float("inf")]).bfloat16()],
    }
    path = save(tmp_path, 1, extra=extra)
    loaded = load(path)
    step, found = loaded
    assert (step, loaded.path, loaded.per_rank, loaded.missing, loaded.unexpected) == (1, path, [{}], [], [])
    expect_same(found, extra)
    with safe_open(path / "rank-00000.safetensors", framework="pt") as file:  # the library reads them, too
        for number, value in enumerate(tensors.values()):
            expect_same(file.get_tensor(f"extra/{number}").view(2, 3), value)


class Name(str):
    """A string that is more than a string."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {2: object()}]}, r"extra\['it'\]\['a'\]\[1\]\[2\] is of type builtins.object"),
        (b"bytes", r"extra\['it'\] is of type builtins.bytes"),
        ((1, Name("x")), r"extra\['it'\]\[1\] is of type .*Name"),
        ({1, 2}, r"extra\['it'\] is of type builtins.set"),
        (numpy.datetime64("2026-01-01"), r"extra\['it'\] is of type numpy.datetime64"),
        (torch.ones(2, dtype=torch.complex128), r"extra.*complex128"),
        (torch.eye(2).to_sparse(), r"extra.*sparse"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_place(value: Any, where: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=where):
        save(tmp_path, 1, extra={"it": value})
    assert latest(tmp_path) is None


class Odd(AdamW):
    """Keeps text and nested data in its state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(mode="fast", seen=OrderedDict(a=(1, 2)))
        return loss


def test_odd_options_and_state_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of NumPy as the equal plain numbers; a tensor stays one, and so do text and nested data in the state."""
    model = nn.Linear(2, 2)
    saved: dict[str, Any] = {"lr": numpy.float32(1e-3), "weight_decay": numpy.float64(0.1), "seen": numpy.int64(7)}
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.25)}]
    optimizer = Odd([{**groups[0], **saved}, groups[1]])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path, 1, model=model, optimizer=optimizer)
    fresh = Odd([groups[0], {**groups[1], "lr": torch.tensor(0.5)}], lr=0.5)
    load(tmp_path, model=model, optimizer=fresh)
    found = {key: fresh.param_groups[0][key] for key in saved}
    assert found == {"lr": float(numpy.float32(1e-3)), "weight_decay": 0.1, "seen": 7}
    assert [type(value) for value in found.values()] == [float, float, int]
    assert torch.equal(fresh.param_groups[1]["lr"], torch.tensor(0.25))
    assert fresh.state[model.weight]["mode"] == "fast"
    assert type(fresh.state[model.weight]["seen"]) is OrderedDict
    assert fresh.state[model.weight]["seen"] == OrderedDict(a=(1, 2))

    monkeypatch.setattr(Odd, "__module__", "train")  # the class has moved to another module
    load(tmp_path, model=model, optimizer=Odd(groups))
    assert "is taken for a train.Odd" in caplog.text


def test_a_parameter_with_holes_in_its_memory(tmp_path: Path) -> None:
    param = nn.Parameter(torch.arange(80.0).as_strided((4, 10), (20, 1)))
    optimizer = AdamW([param], lr=0.1)
    param.grad = torch.randn(4, 10)
    optimizer.step()
    expected = {key: value.clone() for key, value in optimizer.state[param].items()}
    save(tmp_path, 1, optimizer=optimizer)
    optimizer.step()
    for target in (AdamW([param], lr=0.1), optimizer):
        load(tmp_path, optimizer=target)
        for key, value in expected.items():
            assert torch.equal(target.state[param][key], value), key


def test_loading_is_seen_by_autograd(tmp_path: Path) -> None:
    """As after ``load_state_dict``: a backward pass that needs the old values raises."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    save(tmp_path, 1, model=model)
    loss = model(torch.ones(2, 3)).sum()
    load(tmp_path, model=model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_that_is_finer_than_its_parameter_stays_so(tmp_path: Path) -> None:
    """NAdam keeps a float32 product beside bf16 moments; torch's load_state_dict would round it."""

    def go_on(param: Tensor, optimizer: NAdam, steps: range) -> None:
        for step in steps:
            param.grad = torch.full_like(param, 0.1 * (step + 1))
            optimizer.step()

    param, other = (nn.Parameter(torch.randn(9, dtype=torch.bfloat16)) for _ in range(2))
    optimizer, fresh = NAdam([param], lr=0.1), NAdam([other], lr=0.1)
    go_on(param, optimizer, range(3))
    save(tmp_path, 3, model=nn.ParameterDict({"w": param}), optimizer=optimizer)
    load(tmp_path, model=nn.ParameterDict({"w": other}), optimizer=fresh)
    assert fresh.state[other]["mu_product"].dtype is torch.float32
    go_on(param, optimizer, range(3, 6))
    go_on(other, fresh, range(3, 6))
    assert torch.equal(other, param)
    assert torch.equal(fresh.state[other]["mu_product"], optimizer.state[param]["mu_product"])


@pytest.mark.parametrize(("name", "number"), [("rename", 1), ("flush_directory", 3)])
def test_an_overwrite_that_fails_leaves_the_old_checkpoint(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, extra={"who": "before"})
    at_call(monkeypatch, name, number, raising(errno.EIO))
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 2, extra={"who": "after"}, overwrite=True)
    assert load(tmp_path).extra == {"who": "before"}
    assert names_in(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("known", ["", "load", "overwrite"])
def test_steps_of_another_run_are_noticed_at_the_first_save(
    known: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only when the run comes to them."""
    root = tmp_path / "other"
    save(tmp_path / "run", 30)
    (tmp_path / "run").rename(root)  # as another process has left it
    if known == "load":
        load(root)
    for step in (10, 20):
        save(root, step, overwrite=known == "overwrite")
    noticed = [line for line in caplog.messages if "later steps, up to step-00000030" in line]
    assert len(noticed) == (0 if known else 1)


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
    monkeypatch.chdir(tmp_path)
    save("run", 1, model=nn.Linear(2, 2), blocking=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    wait()
    assert verify(tmp_path / "run") > 0


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

    calls = at_call(monkeypatch, name, number, save_and_prune)
    assert other.load(tmp_path).step == step
    assert len(calls) > number
    assert all(torch.equal(value, pair.tensors()[key]) for key, value in other.tensors().items())


def test_two_writers_do_not_take_each_others_files_for_leftovers(tmp_path: Path, caplog: Any) -> None:
    def write(first: int) -> None:
        for step in range(first, 40, 2):
            save(tmp_path, step, extra={"step": step}, keep=2)

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor() as threads:
        list(threads.map(write, (0, 1)))
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

    at_call(monkeypatch, "rename", 0, save_first)
    with pytest.raises(CheckpointError, match="step-00000001 exists already: pass overwrite=True"):
        save(tmp_path, 1, extra={"who": "this one"})
    assert load(tmp_path).extra == {"who": "the other"}
    assert names_in(tmp_path) == ["step-00000001"]


def test_every_operation_of_a_load_may_fail(tmp_path: Path) -> None:
    seen = disk_faults_of_loads(tmp_path)
    assert seen.problems == []
    assert seen.tried == seen.loaded + seen.refused
    assert seen.loaded > 10
    assert seen.refused > 10


def test_a_missing_right_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    at_call(monkeypatch, "open_descriptor", 0, raising(errno.EACCES))
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        load(tmp_path)
    assert not isinstance(caught.value, CorruptCheckpointError), "step 1 is not loaded"


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        at_call(patch, "remove", 0, raising(errno.EIO))
        second = save(tmp_path, 2, keep=1)
    assert latest(tmp_path) == second
    (hidden,) = tmp_path.glob(".pruned.*.tmp")
    for each in (*hidden.iterdir(), hidden):
        os.utime(each, (0, 0))  # as a day later
    save(tmp_path, 3, keep=1)
    assert names_in(tmp_path) == ["step-00000003"]


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
