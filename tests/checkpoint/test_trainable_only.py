"""Checkpoints without the values of frozen parameters: on every level, with another base, with damaged digests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from onecopy import CheckpointMismatchError
from onecopy.checkpoint import latest, load, save, verify
from onecopy.cli.main import app
from tests.support.checkpoints import KINDS, Tiny, check_any_to_any, make
from tests.support.failures import expect_disagreement, expect_failure_of
from tests.support.harness import distributed
from tests.support.hostile import content_of
from tests.support.models import assert_same_tree
from tests.support.quantised import Int8Blocks

FROZEN = {name for name, _ in Tiny().named_parameters(remove_duplicate=False) if not name.startswith("body")}


@pytest.mark.parametrize("source", KINDS)
@distributed(2)
def test_every_level_loads_the_adapters_of_every_other_and_goes_on(
    world_size: int, source: str, tmp_path: Path
) -> None:
    targets = (make(kind, adapters=True) for kind in KINDS)
    check_any_to_any(tmp_path, make(source, adapters=True), targets, trainable_only=True)
    saved = content_of(tmp_path / "step-00000002")
    assert set(saved["base"]) == FROZEN
    assert set(saved["model"]) == set(Tiny().state_dict()) - FROZEN, "adapters and buffers"


@pytest.mark.parametrize("kind", ["element", "view"])
@distributed(2)
def test_master_weights_of_trainable_parameters_only(world_size: int, kind: str, tmp_path: Path) -> None:
    """The optimizer has the frozen parameters, too; their master weights are their values."""
    side, other = make(kind, bf16=True), make(kind, bf16=True)
    side.push(range(2))
    path = side.save(tmp_path, 2, trainable_only=True)
    keys = [key for key in content_of(path)["tensors"] if key.endswith("master_weight")]
    assert "optimizer.0/body.weight/master_weight" in keys
    assert not [key for key in keys if "frozen" in key]
    other.push([7])
    other.load(path)
    for each in (side, other):
        each.push([2])
    assert_same_tree(other.weights(), side.weights(), "model")
    assert_same_tree(other.state(), side.state(), "state")


@pytest.mark.parametrize("culprits", ["all", "last"])
@pytest.mark.parametrize("kind", ["plain", "element", "sharded"])
@distributed(2, 3)
def test_another_base_is_refused_on_all_ranks_and_nothing_changes(
    world_size: int, kind: str, culprits: str, tmp_path: Path
) -> None:
    side, other = make("element", adapters=True), make(kind, seed=9 if culprits == "all" else 0, adapters=True)
    side.train(range(2))
    other.train(range(3))
    path = side.save(tmp_path, 2, trainable_only=True)
    ranks = list(range(world_size)) if culprits == "all" else [world_size - 1]
    if culprits == "last" and dist.get_rank() in ranks:
        other.module.frozen.bias.detach()[3] += 1
    before = other.contents()
    text = r"for another base: frozen parameter '[\w.]+' is not as it was \(it has other values\).*check_base=False"
    expect_failure_of(ranks, lambda: other.load(path), CheckpointMismatchError, text)
    assert_same_tree(other.contents(), before, "after the error")
    other.load(path, check_base=False)
    for names, expected in ((set(side.weights()) - FROZEN, side.weights()), (FROZEN, before[0])):
        found = {name: value for name, value in other.weights().items() if name in names and "norm" not in name}
        assert_same_tree(found, {name: expected[name] for name in found}, "without the check")


@distributed(2)
def test_parameters_that_are_frozen_on_some_ranks_only_are_not_saved(world_size: int, tmp_path: Path) -> None:
    side = make("plain", wrap=False)
    side.module.get_parameter("conv.bias").requires_grad_(dist.get_rank() == 0)
    call = lambda: side.save(tmp_path, 1, trainable_only=True)  # noqa: E731
    expect_disagreement(1, call, r"parameter 'conv\.bias': trainable", r"parameter 'conv\.bias': frozen")
    assert latest(tmp_path) is None


class Adapted(nn.Module):
    """Two tied frozen weights, an adapter and a buffer."""

    steps: Tensor

    def __init__(self, changed: float = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 6).requires_grad_(False)
        self.two = nn.Linear(6, 6).requires_grad_(False)
        self.two.weight = self.one.weight
        self.adapter = nn.Linear(6, 6)
        self.adapter.weight.detach().add_(changed)
        self.register_buffer("steps", torch.zeros(2) + changed)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with other values of the adapter and the buffer than a new model has."""
    return save(tmp_path / "run", 3, model=Adapted(changed=1), trainable_only=True)


def expect_values(model: nn.Module, changed: float) -> None:
    assert_same_tree(model.state_dict(), Adapted(changed).state_dict(), "model")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return re.sub(r"\s+", " ", result.output)


def test_adapters_and_buffers_are_saved_shown_and_converted_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    model, found, base = Adapted(), content_of(saved), {"one.weight", "one.bias", "two.weight", "two.bias"}
    assert set(found["tensors"]) == {"model/adapter.weight", "model/adapter.bias", "model/steps"}
    assert set(found["base"]) == base
    load(saved, model=model)
    expect_values(model, changed=1)
    assert verify(saved) > 0
    assert "saved with trainable_only: the values of 4 frozen parameters are not in it" in run("inspect", saved)
    assert "all as written" in run("verify", saved)
    run("convert", saved, tmp_path / "a.pt", "--to", "torch")
    run("convert", saved, tmp_path / "a.safetensors", "--to", "safetensors")
    for state in (torch.load(tmp_path / "a.pt", weights_only=True)["model"], load_file(tmp_path / "a.safetensors")):
        model = Adapted()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert (set(missing), unexpected) == (base, [])
        expect_values(model, changed=1)


@pytest.mark.parametrize(
    ("name", "trainable", "text"),
    [
        ("adapter.bias", False, r"'adapter\.bias' was trainable .* is frozen now: call requires_grad_\(True\)"),
        ("one.bias", True, r"'one\.bias' was frozen .* it is trainable now: call requires_grad_\(False\)"),
    ],
)
def test_a_parameter_that_was_frozen_or_unfrozen_meanwhile_is_named(
    saved: Path, name: str, trainable: bool, text: str
) -> None:
    model = Adapted()
    model.get_parameter(name).requires_grad_(trainable)
    with pytest.raises(CheckpointMismatchError, match=f"parameter {text}.*check_base=False"):
        load(saved, model=model)
    expect_values(model, changed=0)
    load(saved, model=model, check_base=False)
    expect_values(model, changed=1)


def test_a_base_of_which_names_are_missing_or_new_or_without_values(saved: Path) -> None:
    model: Any = Adapted()
    model.three = nn.Linear(2, 2).requires_grad_(False)
    del model.one
    with pytest.raises(CheckpointMismatchError, match=r"lacks \['three\.weight'.*has \['one\.bias', 'one\.weight'\]"):
        load(saved, model=model)
    loaded = load(saved, model=model, strict=False)
    assert (loaded.missing, loaded.unexpected) == (["three.weight", "three.bias"], ["one.bias", "one.weight"])
    assert torch.equal(model.adapter.weight, Adapted(changed=1).adapter.weight)
    model.two.weight.detach()[1, 2] += 1
    with pytest.raises(CheckpointMismatchError, match=r"frozen parameter 'two\.weight'"):
        load(saved, model=model, strict=False)
    model = Adapted()
    model.one.bias = nn.Parameter(torch.empty(6, device="meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"frozen parameter 'one\.bias' is on the meta device"):
        load(saved, model=model)


def test_saves_that_would_lose_the_adapters_are_refused(tmp_path: Path) -> None:
    model = Adapted().requires_grad_(False)
    with pytest.raises(ValueError, match=r"would save no parameter.*save before the parameters are frozen"):
        save(tmp_path, 1, model=model, trainable_only=True)
    with pytest.raises(ValueError, match=r"needs the model.*pass model="):
        save(tmp_path, 1, extra={"one": 1}, trainable_only=True)
    assert latest(tmp_path) is None


class Quantised(Int8Blocks):
    """Can be a frozen parameter."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *others: Any) -> Any:
        assert func is torch.ops.aten.detach.default
        tensor = others[1][0]
        return cls(tensor.codes, tensor.scale, tensor.shape, tensor.dtype)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_every_part_of_a_quantised_base_is_compared(part: str, tmp_path: Path) -> None:
    model = Adapted()
    model.base = nn.Parameter(Quantised.of(torch.randn(64)), requires_grad=False)
    save(tmp_path, 1, model=model, trainable_only=True)
    load(tmp_path, model=model)
    getattr(model.base, part).view(-1)[0] += 1
    with pytest.raises(
        CheckpointMismatchError, match=r"frozen parameter 'base' is not as it was \(it has other values"
    ):
        load(tmp_path, model=model)
