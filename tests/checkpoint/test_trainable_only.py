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
from onecopy.checkpoint.directories import read_manifest
from onecopy.checkpoint.frozen_base import describe_frozen, frozen_parameters
from onecopy.checkpoint.manifest import FrozenParam
from onecopy.cli.main import app
from tests.support.checkpoints import (
    KINDS,
    Tiny,
    check_any_to_any,
    contents_of,
    load_side,
    make,
    model_of,
    push,
    save_side,
    state_of,
    train,
)
from tests.support.failures import expect_disagreement, expect_failure_of
from tests.support.harness import distributed
from tests.support.models import assert_same_tree
from tests.support.quantised import Int8Blocks

FROZEN = {name for name, _ in Tiny().named_parameters(remove_duplicate=False) if not name.startswith("body")}


# On every level and number of ranks


@pytest.mark.parametrize("source", KINDS)
@distributed(2)
def test_every_level_loads_the_adapters_of_every_other_and_goes_on(
    world_size: int, source: str, tmp_path: Path
) -> None:
    targets = (make(kind, adapters=True) for kind in KINDS)
    check_any_to_any(tmp_path, make(source, adapters=True), targets, trainable_only=True)
    saved = read_manifest(tmp_path / "step-00000002")
    assert saved.base == describe_frozen(frozen_parameters(make("plain", adapters=True, wrap=False).module), 0, 1)
    assert set(saved.base) == FROZEN
    assert set(saved.model or {}) == set(Tiny().state_dict()) - FROZEN, "adapters and buffers"


@pytest.mark.parametrize("kind", ["element", "view"])
@distributed(2)
def test_master_weights_of_trainable_parameters_only(world_size: int, kind: str, tmp_path: Path) -> None:
    """The optimizer has the frozen parameters, too; their master weights are their values."""
    side, other = make(kind, bf16=True), make(kind, bf16=True)
    push(side, range(2))
    path = save_side(tmp_path, 2, side, trainable_only=True)
    keys = [key for key in read_manifest(path).tensors if key.endswith("master_weight")]
    assert "optimizer.0/body.weight/master_weight" in keys
    assert not [key for key in keys if "frozen" in key]
    push(other, [7])
    load_side(path, other)
    for each in (side, other):
        push(each, [2])
    assert_same_tree(model_of(other), model_of(side), "model")
    assert_same_tree(state_of(other), state_of(side), "state")


# Another base


@pytest.mark.parametrize("kind", ["plain", "element", "sharded"])
@distributed(2, 3)
def test_another_base_is_refused_on_all_ranks_and_nothing_changes(world_size: int, kind: str, tmp_path: Path) -> None:
    side, other = make("element", adapters=True), make(kind, seed=9, adapters=True)
    train(side, range(2))
    train(other, range(3))
    path = save_side(tmp_path, 2, side, trainable_only=True)
    before = contents_of(other)
    everyone = range(world_size)
    text = r"for another base: frozen parameter '[\w.]+' is not as it was \(it has other values\).*check_base=False"
    expect_failure_of(everyone, lambda: load_side(path, other), CheckpointMismatchError, text)
    assert_same_tree(contents_of(other), before, "after the error")
    load_side(path, other, check_base=False)
    adapters = {"body.weight", "body.bias"}
    for names, expected in ((adapters, model_of(side)), (FROZEN, before[0])):
        found = {name: value for name, value in model_of(other).items() if name in names}
        assert_same_tree(found, {name: expected[name] for name in found}, "without the check")


@distributed(2, 3)
def test_a_base_that_differs_on_one_rank_is_refused_on_all(world_size: int, tmp_path: Path) -> None:
    side, other = make("plain", adapters=True), make("plain", adapters=True, wrap=False)
    path = save_side(tmp_path, 2, side, trainable_only=True)
    odd = world_size - 1
    if dist.get_rank() == odd:
        with torch.no_grad():
            other.module.frozen.bias[3] += 1
    before = contents_of(other)
    text = r"frozen parameter 'frozen\.bias' is not as it was"
    expect_failure_of([odd], lambda: load_side(path, other), CheckpointMismatchError, text)
    assert_same_tree(contents_of(other), before, "after the error")


@distributed(2)
def test_parameters_that_are_frozen_on_some_ranks_only_are_not_saved(world_size: int, tmp_path: Path) -> None:
    side = make("plain", wrap=False)
    side.module.conv.bias.requires_grad_(dist.get_rank() == 0)  # type: ignore[union-attr]
    call = lambda: save_side(tmp_path, 1, side, trainable_only=True)  # noqa: E731
    expect_disagreement(1, call, r"parameter 'conv\.bias': trainable", r"parameter 'conv\.bias': frozen")
    assert latest(tmp_path) is None


# One process


class Adapted(nn.Module):
    """Two tied frozen weights, an adapter and a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 6).requires_grad_(False)
        self.two = nn.Linear(6, 6).requires_grad_(False)
        self.two.weight = self.one.weight
        self.adapter = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(2))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with other values of the adapter and the buffer than a new model has."""
    return save(tmp_path / "run", 3, model=changed(Adapted()), trainable_only=True)


def changed(model: Adapted) -> Adapted:
    with torch.no_grad():
        model.adapter.weight.add_(1)
        model.steps.add_(1)
    return model


def test_adapters_and_buffers_are_saved_and_nothing_else(saved: Path) -> None:
    model, found = Adapted(), read_manifest(saved)
    assert set(found.tensors) == {"model/adapter.weight", "model/adapter.bias", "model/steps"}
    assert set(found.base or {}) == {"one.weight", "one.bias", "two.weight", "two.bias"}
    load(saved, model=model)
    assert_same_tree(model.state_dict(), changed(Adapted()).state_dict(), "loaded")
    assert verify(saved) > 0


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
    assert_same_tree(model.state_dict(), Adapted().state_dict(), "after the error")
    load(saved, model=model, check_base=False)
    assert_same_tree(model.state_dict(), changed(Adapted()).state_dict(), "loaded")


def test_a_base_of_which_names_are_missing_or_new(saved: Path) -> None:
    model = Adapted()
    model.three = nn.Linear(2, 2).requires_grad_(False)
    del model.one
    with pytest.raises(CheckpointMismatchError, match=r"lacks \['three\.weight'.*has \['one\.bias', 'one\.weight'\]"):
        load(saved, model=model)
    loaded = load(saved, model=model, strict=False)
    assert (loaded.missing, loaded.unexpected) == (["three.weight", "three.bias"], ["one.bias", "one.weight"])
    assert torch.equal(model.adapter.weight, changed(Adapted()).adapter.weight)
    with torch.no_grad():
        model.two.weight[1, 2] += 1
    with pytest.raises(CheckpointMismatchError, match=r"frozen parameter 'two\.weight'"):
        load(saved, model=model, strict=False)


def test_saves_that_would_lose_the_adapters_are_refused(tmp_path: Path) -> None:
    model = Adapted().requires_grad_(False)
    with pytest.raises(ValueError, match=r"would save no parameter.*save before the parameters are frozen"):
        save(tmp_path, 1, model=model, trainable_only=True)
    with pytest.raises(ValueError, match=r"needs the model.*pass model="):
        save(tmp_path, 1, extra={"one": 1}, trainable_only=True)
    assert latest(tmp_path) is None


def test_a_base_without_values_is_refused(saved: Path) -> None:
    model = Adapted()
    model.one.bias = nn.Parameter(torch.empty(6, device="meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"frozen parameter 'one\.bias' is on the meta device"):
        load(saved, model=model)


# Descriptions of frozen parameters


def test_a_quantised_base_is_described_by_all_of_its_parts() -> None:
    blocks = Int8Blocks.of(torch.randn(64))

    def described() -> FrozenParam:
        return describe_frozen({"it": blocks}, 0, 1)["it"]

    first = described()
    assert (first.dtype, first.shape) == ("float32", (64,))
    assert described() == first
    blocks.scale.mul_(2)
    second = described()
    assert second.digest != first.digest
    blocks.codes[0, 5] ^= 1
    assert described().digest not in (first.digest, second.digest)


# The command line and the example


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return re.sub(r"\s+", " ", result.output)


def test_commands_show_check_and_convert_the_adapters(saved: Path, tmp_path: Path) -> None:
    text = run("inspect", saved)
    assert "saved with trainable_only: the values of 4 frozen parameters are not in it" in text
    assert "all as written" in run("verify", saved)
    run("convert", saved, tmp_path / "a.pt", "--to", "torch")
    run("convert", saved, tmp_path / "a.safetensors", "--to", "safetensors")
    for state in (torch.load(tmp_path / "a.pt", weights_only=True)["model"], load_file(tmp_path / "a.safetensors")):
        model: Any = Adapted()
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert set(missing) == set(frozen_parameters(model))
        assert not unexpected
        assert_same_tree(model.state_dict(), changed(Adapted()).state_dict(), "loaded")
