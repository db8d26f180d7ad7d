"""Checkpoints on real ranks: from any optimizer and number of ranks to any other, and training goes on as it was."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau

from onecopy import RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.checkpoint import PerRank, capture, latest, load, restore, save, verify
from tests.support.checkpoints import (
    KINDS,
    WHOLE,
    Side,
    check_any_to_any,
    load_side,
    make,
    model_of,
    push,
    save_side,
    state_of,
    train,
)
from tests.support.failures import failure_of
from tests.support.harness import distributed, pools
from tests.support.models import assert_same_tree
from tests.support.state_dicts import expect_same

# From anything to anything


@pytest.mark.parametrize("source", KINDS)
@distributed(2)
def test_any_optimizer_to_any_other_and_training_goes_on(world_size: int, source: str, tmp_path: Path) -> None:
    check_any_to_any(tmp_path, make(source), (make(kind, seed=9) for kind in KINDS))


@pytest.mark.parametrize("source", ["plain", "sharded"])
@distributed(2)
def test_a_list_of_optimizers(world_size: int, source: str, tmp_path: Path) -> None:
    check_any_to_any(tmp_path, make(source, several=True), (make(kind, 9, several=True) for kind in WHOLE))


@distributed(2)
def test_another_order_of_parameters_and_groups(world_size: int, tmp_path: Path) -> None:
    targets = (make(kind, 9, reverse=True) for kind in ("plain", "parameter", "element", "sharded"))
    check_any_to_any(tmp_path, make("element"), targets)


@distributed(2, 3)
def test_buffers_are_those_of_rank_0(world_size: int, tmp_path: Path) -> None:
    side, other = make("plain"), make("plain", seed=9)
    with torch.no_grad():
        for buffer in side.module.buffers():
            buffer.fill_(dist.get_rank() + 1)
    load_side(save_side(tmp_path, 1, side), other)
    for name, buffer in other.module.named_buffers():
        assert torch.equal(buffer, torch.ones_like(buffer)), name


# Any number of ranks to any other


def save_pushed(root: Path) -> None:
    """Train in this pool of ranks, and save."""
    kind = ("view", "parameter", "element", "parameter")[dist.get_world_size() - 1]
    side = make(kind)
    push(side, range(2))
    save_side(root, 2, side)


def load_pushed(roots: Sequence[Path]) -> None:
    """Load in this pool of ranks, and compare with a plain optimizer that never stopped."""
    plain = make("plain", wrap=False)
    push(plain, range(2))
    model, state = model_of(plain), state_of(plain)
    push(plain, [2])
    for root, kind in zip(roots, ("element", "view", "parameter", "element"), strict=True):
        side = make(kind, seed=9)
        assert load_side(root, side).step == 2
        assert_same_tree(model_of(side), model, f"model of {root}")
        mine = state_of(side)
        if dist.get_rank() == 0:
            assert_same_tree(mine, state, f"state of {root}")
        push(side, [2])
        assert_same_tree(model_of(side), model_of(plain), f"continued from {root}")


def test_saved_by_1_to_4_ranks_and_loaded_by_1_to_4(tmp_path: Path) -> None:
    roots = [tmp_path / str(count) for count in range(1, 5)]
    for count, root in enumerate(roots, 1):
        pools.run(count, __name__, "save_pushed", {"root": root})
    for count in range(1, 5):
        pools.run(count, __name__, "load_pushed", {"roots": roots})


@distributed(4)
def test_state_that_groups_of_ranks_replicate_is_written_once(world_size: int, tmp_path: Path) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    side, plain = make("element", group=halves[dist.get_rank() // 2]), make("plain", wrap=False)
    for each in (side, plain):
        push(each, range(2))
    path = save_side(tmp_path, 2, side)
    other = make("parameter", seed=9)
    load_side(path, other)
    assert_same_tree(model_of(other), model_of(plain), "model")
    mine = state_of(other)
    if dist.get_rank() == 0:
        assert_same_tree(mine, state_of(plain), "state")


@pytest.mark.usefixtures("fresh_processes")
@distributed(3)
def test_some_of_the_ranks_save_and_load(world_size: int, tmp_path: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    side, other = (make("element", seed, group=group, wrap=False) for seed in (0, 9))
    push(side, range(2))
    save_side(tmp_path, 1, side, process_group=group)
    load_side(tmp_path, other, process_group=group)
    assert_same_tree(model_of(other), model_of(side), "model")
    assert_same_tree(state_of(other), state_of(side), "state")


@pytest.mark.usefixtures("fresh_processes")
@distributed(4)
def test_models_of_two_groups_of_ranks_are_not_saved_as_one(world_size: int, tmp_path: Path) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    number = dist.get_rank() % 2
    side = make("element", seed=number, group=halves[number], wrap=False)
    push(side, range(2))
    text = "(?s)parameter .*checksum .*different parameters.*process_group="
    error = failure_of(lambda: save_side(tmp_path / "all", 1, side))
    assert isinstance(error, RanksDisagreeError)
    assert re.search(text, str(error)), str(error)
    own, other = tmp_path / str(number), make("element", seed=9, group=halves[number], wrap=False)
    save_side(own, 1, side, process_group=halves[number])
    load_side(own, other, process_group=halves[number])
    assert_same_tree(model_of(other), model_of(side), "model")


# Types


@pytest.mark.parametrize("target", ["parameter", "element", "view"])
@distributed(2)
def test_float32_into_bf16_with_master_weights_and_back(world_size: int, target: str, tmp_path: Path) -> None:
    exact, fine = make("plain", wrap=False), make(target, seed=9, bf16=True)
    for side in (exact, fine):
        push(side, range(2))
    load_side(save_side(tmp_path / "fine", 2, exact), fine)
    for name, param in fine.module.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, exact.module.get_parameter(name).bfloat16()), name
    state = state_of(fine)
    if dist.get_rank() == 0:
        assert_same_tree(state[0]["masters"], masters_of(exact), "masters")
        assert_same_tree(state[0]["state"], state_of(exact)[0]["state"], "state")
    back = make("element", seed=9)
    load_side(save_side(tmp_path / "back", 3, fine), back)
    assert_same_tree(model_of(back), model_of(exact), "back")
    found = state_of(back)
    if dist.get_rank() == 0:
        assert_same_tree(found, state_of(exact), "state of it")


def masters_of(side: Side) -> dict[str, Tensor]:
    return {name: param.detach() for name, param in side.module.named_parameters()}


def save_half(root: Path) -> None:
    """Train with master weights in this pool, save, go on, and save again, as what others must arrive at."""
    side = make("parameter", bf16=True)
    push(side, range(2))
    save_side(root, 2, side)
    push(side, [2])
    save_side(root, 3, side)


def load_half(root: Path) -> None:
    """Load at another number of ranks, go on, and compare with the others."""
    side, expected = make("element", seed=9, bf16=True), make("view", seed=8, bf16=True)
    assert load_side(root / "step-00000002", side).step == 2
    push(side, [2])
    load_side(root / "step-00000003", expected)
    assert_same_tree(model_of(side), model_of(expected), "model")
    ours, theirs = state_of(side), state_of(expected)
    if dist.get_rank() == 0:
        assert len(ours[0]["masters"]) == len(list(side.module.parameters()))
        assert_same_tree(ours, theirs, "state")


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (2, 2)])
def test_master_weights_at_another_number_of_ranks(saving: int, loading: int, tmp_path: Path) -> None:
    pools.run(saving, __name__, "save_half", {"root": tmp_path})
    pools.run(loading, __name__, "load_half", {"root": tmp_path})


# One process alone


def test_one_process_without_torch_distributed(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    side, other = make("plain", wrap=False), make("plain", 9, reverse=True, wrap=False)
    train(side, [0, 1], rank=0)
    path = save_side(tmp_path, 2, side, extra={"a": 1})
    train(side, [2], rank=0)
    assert latest(tmp_path) == path == tmp_path / "step-00000002"
    assert verify(path) == sum(file.stat().st_size for file in path.iterdir())
    loaded = load_side(tmp_path, other)
    step, extra = loaded
    assert (step, extra) == (loaded.step, loaded.extra) == (2, {"a": 1})
    assert (loaded.path, loaded.per_rank, loaded.missing, loaded.unexpected) == (path, [{}], [], [])
    train(other, [2], rank=0)
    assert_same_tree(model_of(other), model_of(side), "continued")


@pytest.mark.parametrize("source", ["parameter", "sharded"])
def test_a_checkpoint_of_several_ranks_is_loaded_by_one_process_without_torch_distributed(
    source: str, tmp_path: Path
) -> None:
    pools.run(3, __name__, "save_trained", {"root": tmp_path, "kind": source})
    side = make("plain", 9, wrap=False)
    loaded = load_side(tmp_path, side)
    expect_same(loaded.extra["model"], model_of(side))
    assert side.optimizers[0].state


def save_trained(root: Path, kind: str) -> None:
    """Train and save, with a copy of the model beside it."""
    side = make(kind)
    train(side, [0, 1])
    model = model_of(side)
    save_side(root, 2, side, extra={"model": model})


# What each rank has of its own


def save_per_rank(root: Path) -> None:
    rank = dist.get_rank()
    save(root, 1, extra={"own": PerRank({"rank": rank, "t": torch.full((rank + 1,), rank)}), "shared": rank + 10})


def load_per_rank(root: Path, saved_by: int) -> None:
    loaded, rank = load(root), dist.get_rank()
    expected = [{"own": {"rank": other, "t": torch.full((other + 1,), other)}} for other in range(saved_by)]
    expect_same(loaded.per_rank, expected)
    same = saved_by == dist.get_world_size()
    expect_same(loaded.extra, {"shared": 10, **(expected[rank] if same else {})})


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 3), (3, 2)])
def test_data_of_single_ranks_comes_back_to_its_rank(saving: int, loading: int, tmp_path: Path) -> None:
    pools.run(saving, __name__, "save_per_rank", {"root": tmp_path})
    pools.run(loading, __name__, "load_per_rank", {"root": tmp_path, "saved_by": saving})


# Schedulers, scalers, random numbers


def draw() -> list[Any]:
    """Numbers from every generator."""
    return [torch.rand(2), random.random(), random.gauss(0, 1), float(numpy.random.rand()), numpy.random.normal()]


class Run:
    """Everything that a training loop holds, and one step of it."""

    def __init__(self, seed: int) -> None:
        self.side = make("plain", seed, wrap=False)
        rates = self.side.module.rates = nn.ParameterList(torch.ones(1) for _ in range(3))
        sgd = [torch.optim.SGD([param], lr=0.5, momentum=0.9) for param in rates]
        self.parts: dict[str, Any] = {
            "steps": MultiStepLR(sgd[0], [1, 3, 3, 4], 0.5),
            "cycle": OneCycleLR(sgd[1], 1.0, total_steps=20),
            "plateau": ReduceLROnPlateau(sgd[2], patience=0),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 1), growth_interval=2),
        }
        self.inner = [*self.side.optimizers, *sgd]

    def step(self, number: int) -> list[Any]:
        """One step; what it drew, and every rate after it."""
        drawn = draw()
        train(self.side, [number], rank=0)
        for optimizer in self.inner[1:]:
            optimizer.step()
        self.parts["steps"].step()
        self.parts["cycle"].step()
        self.parts["plateau"].step(1.0 + number)
        self.parts["scaler"].scale(torch.ones(1))
        self.parts["scaler"].update(float(number + 1))
        rates = [group["lr"] for optimizer in self.inner for group in optimizer.param_groups]
        return [drawn, rates, {name: part.state_dict() for name, part in self.parts.items()}]


def test_capture_and_restore_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run = Run(0)
    for number in range(2):
        run.step(number)
    extra = capture(position={"sample": 7}, **run.parts)
    save(tmp_path, 2, model=run.side.module, optimizer=run.inner, extra=extra)
    expected = [run.step(number) for number in (2, 3)]
    other = Run(5)
    draw()
    loaded = load(tmp_path, model=other.side.module, optimizer=other.inner)
    assert restore(loaded.extra, **other.parts) == {"sample": 7}
    assert type(other.parts["steps"].milestones) is Counter
    for number, then in zip((2, 3), expected, strict=True):
        found = other.step(number)
        assert_same_tree(found, then, f"step {number}")
    assert_same_tree(model_of(other.side), model_of(run.side), "model")


def test_restoring_an_object_that_was_not_captured_names_it() -> None:
    run = Run(0)
    with pytest.raises(KeyError, match="no state for \\['other'\\]"):
        restore(capture(**run.parts), other=run.parts["steps"])


# Files


@pytest.mark.parametrize("kind", ["plain", "parameter", "sharded"])
@distributed(2, 4)
def test_ranks_write_files_of_nearly_the_same_size(world_size: int, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(900, 256), nn.Linear(256, 512), nn.Linear(512, 256))
    optimizer: Any = AdamW(model.parameters())
    if kind != "plain":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    wrapped = ShardedDataParallel(model, optimizer) if kind == "sharded" else DistributedDataParallel(model)
    wrapped(torch.arange(20)).sum().backward()
    optimizer.step()
    path = save(tmp_path, 1, model=wrapped, optimizer=optimizer)
    sizes = [file.stat().st_size for file in path.glob("rank-*.safetensors")]
    assert len(sizes) == world_size
    assert max(sizes) * world_size <= 1.1 * sum(sizes), sizes
