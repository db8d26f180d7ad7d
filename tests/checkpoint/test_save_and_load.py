"""Checkpoints on real ranks: from any optimizer and number of ranks to any other, and training goes on as it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau

from onecopy import RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.checkpoint import PerRank, capture, load, restore, save
from tests.support.checkpoints import KINDS, STORABLE, check_any_to_any, make
from tests.support.failures import expect, failure_of
from tests.support.harness import distributed, pools
from tests.support.models import assert_same_tree
from tests.support.state_dicts import expect_same

WHOLE = ("plain", "parameter", "view", "overlapped")
"""Kinds that Muon, which does not work element by element, can do."""


@pytest.mark.parametrize(
    ("source", "kinds", "options"),
    [
        *((kind, KINDS, [{}, {}]) for kind in KINDS),
        *((kind, WHOLE, [{"several": True}] * 2) for kind in ("plain", "sharded")),
        ("element", KINDS, [{}, {"reverse": True}]),
    ],
)
@distributed(2)
def test_any_optimizer_to_any_other_and_training_goes_on(
    world_size: int, source: str, kinds: Sequence[str], options: list[dict[str, Any]], tmp_path: Path
) -> None:
    check_any_to_any(tmp_path, make(source, **options[0]), (make(kind, 9, **options[1]) for kind in kinds))


@distributed(2)
def test_buffers_are_those_of_rank_0(world_size: int, tmp_path: Path) -> None:
    side, other = make("plain"), make("plain", seed=9)
    for buffer in side.module.buffers():
        buffer.fill_(dist.get_rank() + 1)
    other.load(side.save(tmp_path, 1))
    for name, buffer in other.module.named_buffers():
        assert torch.equal(buffer, torch.ones_like(buffer)), name


@distributed(4)
def test_state_that_groups_of_ranks_replicate_is_written_once(world_size: int, tmp_path: Path) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    side, plain = make("element", group=halves[dist.get_rank() // 2]), make("plain", wrap=False)
    for each in (side, plain):
        each.push(range(2))
    path = side.save(tmp_path, 2)
    other = make("parameter", seed=9)
    other.load(path)
    assert_same_tree(other.weights(), plain.weights(), "model")
    mine = other.state()
    if dist.get_rank() == 0:
        assert_same_tree(mine, plain.state(), "state")


@pytest.mark.usefixtures("fresh_processes")
@distributed(4)
def test_models_of_two_groups_of_ranks_are_not_saved_as_one(world_size: int, tmp_path: Path) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    number = dist.get_rank() % 2
    side = make("element", seed=number, group=halves[number], wrap=False)
    side.push(range(2))
    error = failure_of(lambda: side.save(tmp_path / "all", 1))
    expect(error, RanksDisagreeError, "parameter .*checksum .*different parameters.*process_group=")
    own, other = tmp_path / str(number), make("element", seed=9, group=halves[number], wrap=False)
    side.save(own, 1, process_group=halves[number])
    other.load(own, process_group=halves[number])
    assert_same_tree(other.weights(), side.weights(), "model")


SHAPES = ((), (0, 5), (33,), (130, 33), (3, 40, 7), (16, 8, 3, 3))


def odd_model(seed: int, order: int) -> nn.ParameterDict:
    """Parameters of every dtype, with dimensions in any order in memory: frozen ones of any bits, and trainable ones.

    One is so large that every rank writes and reads several blocks of it.
    """
    generator, orders, made = torch.Generator().manual_seed(seed), random.Random(order), nn.ParameterDict()
    for dtype, shape in [*product(STORABLE, SHAPES), (torch.float32, (3_500_000,))]:
        trainable = dtype.is_floating_point and dtype.itemsize > 1
        if trainable:
            value = torch.randn(shape, generator=generator).to(dtype)
        else:
            high, nbytes = 2 if dtype is torch.bool else 256, prod(shape) * dtype.itemsize
            value = torch.randint(high, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
        dims = orders.sample(range(len(shape)), len(shape))
        value = value.permute(dims).contiguous().permute([dims.index(dim) for dim in range(len(shape))])
        made[f"{dtype}{shape}".replace(".", "_")] = nn.Parameter(value, requires_grad=trainable)
    return made


def odd_optimizer(model: nn.ParameterDict, kind: str) -> Any:
    params = [param for param in model.values() if param.requires_grad]
    if kind == "plain":
        return SGD(params, lr=0.0, momentum=0.9)
    return ZeroRedundancyOptimizer(params, SGD, lr=0.0, momentum=0.9, **KINDS[kind])


def save_odd(root: Path, kind: str) -> None:
    model = odd_model(seed=0, order=1)
    optimizer = odd_optimizer(model, kind)
    for param in model.values():
        if param.requires_grad:
            param.grad = param.detach().clone()  # so the momentum equals the parameter, which does not change
    optimizer.step()
    save(root, 1, model=model, optimizer=optimizer)


def load_odd(root: Path, kind: str) -> None:
    expected, model = odd_model(seed=0, order=1), odd_model(seed=9, order=2)
    optimizer = odd_optimizer(model, kind)
    load(root, model=model, optimizer=optimizer)
    for name, param in model.items():
        mine, saved = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (param, expected[name]))
        assert torch.equal(mine, saved), name
    if kind != "plain":
        optimizer.consolidate_state_dict()
    if kind == "plain" or dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        for index, param in enumerate(optimizer.param_groups[0]["params"]):
            assert torch.equal(state[index]["momentum_buffer"], param), param.shape


@pytest.mark.parametrize(
    ("saving", "source", "loading", "target"),
    [
        (2, "element", 3, "view"),
        (3, "view", 2, "element"),
        (3, "parameter", 1, "element"),
        (1, "element", 2, "parameter"),
        (3, "element", 0, "plain"),  # without torch.distributed
    ],
)
def test_every_dtype_and_memory_order_comes_back_bit_by_bit_on_any_number_of_ranks(
    saving: int, source: str, loading: int, target: str, tmp_path: Path
) -> None:
    pools.run(saving, __name__, "save_odd", {"root": tmp_path, "kind": source})
    if loading:
        pools.run(loading, __name__, "load_odd", {"root": tmp_path, "kind": target})
    else:
        assert not dist.is_initialized()
        load_odd(tmp_path, target)


@pytest.mark.parametrize("target", ["parameter", "element", "view"])
@distributed(2)
def test_float32_into_bf16_with_master_weights_and_back(world_size: int, target: str, tmp_path: Path) -> None:
    exact, fine, back = make("plain", wrap=False), make(target, seed=9, bf16=True), make("element", seed=9)
    for side in (exact, fine):
        side.push(range(2))
    fine.load(exact.save(tmp_path / "fine", 2))
    masters = {name: param.detach() for name, param in exact.module.named_parameters()}
    for name, param in fine.module.named_parameters():
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, masters[name].bfloat16()), name
    state = fine.state()
    back.load(fine.save(tmp_path / "back", 3))
    assert_same_tree(back.weights(), exact.weights(), "back")
    found = back.state()
    if dist.get_rank() == 0:
        assert_same_tree(state[0]["masters"], masters, "masters")
        assert_same_tree(state[0]["state"], exact.state()[0]["state"], "state")
        assert_same_tree(found, exact.state(), "state of it")


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


class Run:
    """What a training loop holds beside its model, and one step of it."""

    def __init__(self, seed: int) -> None:
        self.optimizers = [SGD([nn.Parameter(torch.ones(1))], lr=0.5) for _ in range(3)]
        self.parts: dict[str, Any] = {
            "steps": MultiStepLR(self.optimizers[0], [1, 3, 3, 4], 0.5),
            "cycle": OneCycleLR(self.optimizers[1], 1.0, total_steps=20),
            "plateau": ReduceLROnPlateau(self.optimizers[2], patience=0),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (seed + 1), growth_interval=2),
        }

    def step(self, number: int) -> list[Any]:
        """Numbers from every generator before the step, and every rate after it."""
        drawn: list[float | Tensor] = [torch.rand(2), random.random(), random.gauss(0, 1)]
        drawn += [float(numpy.random.rand()), numpy.random.normal()]
        for optimizer in self.optimizers:
            optimizer.step()
        self.parts["steps"].step()
        self.parts["cycle"].step()
        self.parts["plateau"].step(1.0 + number)
        self.parts["scaler"].scale(torch.ones(1))
        self.parts["scaler"].update(float(number + 1))
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        return [drawn, rates, {name: part.state_dict() for name, part in self.parts.items()}]


def test_capture_and_restore_go_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run, other = Run(0), Run(5)
    for number in range(2):
        run.step(number)
    extra = capture(position={"sample": 7}, **run.parts)
    save(tmp_path, 2, optimizer=run.optimizers, extra=extra)
    expected = [run.step(number) for number in (2, 3)]
    loaded = load(tmp_path, optimizer=other.optimizers)
    assert restore(loaded.extra, **other.parts) == {"sample": 7}
    assert type(other.parts["steps"].milestones) is Counter
    for number, then in zip((2, 3), expected, strict=True):
        assert_same_tree(other.step(number), then, f"step {number}")
    with pytest.raises(KeyError, match="no state for \\['other'\\]"):
        restore(extra, other=run.parts["steps"])


@pytest.mark.parametrize("kind", ["plain", "parameter", "sharded"])
@distributed(2, 3)
def test_ranks_write_files_of_nearly_the_same_size(world_size: int, kind: str, tmp_path: Path) -> None:
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
