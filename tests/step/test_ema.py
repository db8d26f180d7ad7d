"""ShardedEMA: the values of torch's AveragedModel at every level, a share of them on each rank, in every checkpoint."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from onecopy import (
    ShardedDataParallel,
    ShardedEMA,
    ZeroRedundancyOptimizer,
    checkpoint,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.harness import distributed

HOOKS = {"after": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
LEVELS = ("1", "2", "3", "3, overlap_forward", *HOOKS)
CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 1e-2}),
    "SGD without state": (SGD, {"lr": 0.1}),
    "Adafactor, whole parameters": (Adafactor, {"lr": 1e-2}),
}


def module() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 30), nn.Linear(30, 4)]
    return nn.Sequential(*layers)


class Run:
    """A model in training, at a level or with plain DDP, with an average."""

    def __init__(self, level: str | None, name: str = "AdamW", frozen: bool = False, **average: Any) -> None:
        self.module = module()
        self.freeze(frozen)
        optimizer_class, options = CLASSES[name]
        if level is None:
            self.model: nn.Module = DistributedDataParallel(self.module)
            self.optimizer: Any = optimizer_class(self.model.parameters(), **options)
            self.plain = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(average.get("decay", 0.9)))
            return
        options = {"overlap_with_ddp": level in HOOKS, **options}
        self.optimizer = ZeroRedundancyOptimizer(self.module.parameters(), optimizer_class, **options)
        if level.startswith("3"):
            self.model = ShardedDataParallel(self.module, self.optimizer, overlap_forward="," in level)
        else:
            self.model = ddp = DistributedDataParallel(self.module)
            if level == "2":
                ddp.register_comm_hook(self.optimizer, reduce_scatter_hook)
            elif level in HOOKS:
                ddp.register_comm_hook(None, HOOKS[level](allreduce_hook, ddp, self.optimizer))
        self.ema = ShardedEMA(self.optimizer, self.model, **{"decay": 0.9, **average})

    def freeze(self, frozen: bool) -> None:
        for param in self.module[3].parameters():  # type: ignore[index]
            param.requires_grad_(not frozen)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def average(self) -> list[Tensor]:
        with self.ema.swapped():
            return [param.detach().clone() for param in self.module.parameters()]


def assert_equal(ours: list[Tensor], theirs: Any) -> None:
    assert [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)] == [True] * len(ours)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("level", LEVELS)
@distributed(2)
def test_it_equals_torchs_averaged_model(world_size: int, level: str, name: str) -> None:
    ours, reference = Run(level, name), Run(None, name)
    for number in range(20):
        ours.step(number)
        reference.step(number)
        reference.plain.update_parameters(reference.module)
    before = [param.detach().clone() for param in ours.module.parameters()]
    assert_equal(ours.average(), reference.plain.parameters())
    assert_equal(before, ours.module.parameters())
    assert_equal(before, reference.module.parameters())


@pytest.mark.parametrize("level", ["1", "2"])
@distributed(1, 3)
def test_any_number_of_ranks(world_size: int, level: str) -> None:
    """With three ranks the gradients differ by rounding, so the average is compared with that of our own parameters."""
    ours = Run(level)
    plain = AveragedModel(ours.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(10):
        ours.step(number)
        plain.update_parameters(ours.module)
    assert_equal(ours.average(), plain.parameters())


RULES: dict[str, dict[str, Any]] = {
    "every third": {"update_every": 3},
    "from the fifth on": {"start_step": 4, "update_every": 2},
    "a function": {"decay": lambda count: min(0.99, (1 + count) / (10 + count))},
    "unfrozen later": {"frozen": True},
}


def average_by(decay: Any) -> Any:
    """What ``AveragedModel`` takes, for a decay that may be a function."""

    def average(averages: Any, values: Any, count: Any) -> None:
        get_ema_multi_avg_fn(decay(int(count)) if callable(decay) else decay)(averages, values, count)

    return average


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("level", ["1", "3"])
@distributed(2)
def test_rules(world_size: int, level: str, rule: str) -> None:
    options = dict(RULES[rule])
    ours = Run(level, **options)
    plain = AveragedModel(ours.module, multi_avg_fn=average_by(options.get("decay", 0.9)))
    start, every = options.get("start_step", 0), options.get("update_every", 1)
    for number in range(13):
        if number == 7:
            ours.freeze(False)
        ours.step(number)
        if number >= start and (number - start) % every == 0:
            plain.update_parameters(ours.module)
        if number < start:
            assert_equal(ours.average(), ours.module.parameters())
    assert_equal(ours.average(), plain.parameters())


@distributed(2)
def test_several_averages_in_other_types(world_size: int) -> None:
    ours = Run("1")
    wide = ShardedEMA(ours.optimizer, ours.model, decay=0.5, dtype=torch.float64, name="wide")
    first = [param.detach().double() for param in ours.module.parameters()]
    for number in range(2):
        ours.step(number)
        values = [param.detach().double() for param in ours.module.parameters()]
        first = values if number == 0 else [one.lerp(other, 0.5) for one, other in zip(first, values, strict=True)]
    with wide.swapped():
        assert_equal([param.detach() for param in ours.module.parameters()], [value.float() for value in first])
    with pytest.raises(ValueError, match="has an average with the name 'wide' already"):
        ShardedEMA(ours.optimizer, ours.model, name="wide")
    measured = ours.optimizer.memory_report().measured
    assert measured["averages"] == 3 * sum(shard.numel for shard in ours.optimizer.layout.owned_by(dist.get_rank())) * 4


@distributed(2)
def test_master_weights_are_averaged(world_size: int) -> None:
    inside = module().to(torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(inside.parameters(), AdamW, lr=1e-2, master_weights=True)
    ema = ShardedEMA(optimizer, inside, decay=0.9)
    entries = optimizer.engine.inner.owned
    expected = [entry.tensor.detach().clone() for entry in entries]
    for number in range(4):
        for param in inside.parameters():
            param.grad = torch.full_like(param, 0.1 * (number + 1))
        optimizer.step()
        masters = [entry.tensor.detach().clone() for entry in entries]
        pairs = zip(expected, masters, strict=True)
        expected = masters if number == 0 else [one.lerp(new, 1 - 0.9) for one, new in pairs]
        with ema.swapped():
            pass
        assert_equal([entry.tensor.detach() for entry in entries], masters)  # no user's write
    averages = optimizer.engine.inner.averages["ema"].tensors
    assert_equal([averages[id(entry.tensor)] for entry in entries], expected)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("levels", [("1", "3"), ("3", "2"), ("2", "1")], ids=str)
@distributed(2)
def test_state_dicts_and_checkpoints_carry_it(
    world_size: int, levels: tuple[str, str], name: str, tmp_path: Path
) -> None:
    saved, (loaded, resumed, parts) = Run(levels[0], name), (Run(levels[1], name) for _ in range(3))
    for number in range(4):
        saved.step(number)
    checkpoint.save(tmp_path, 1, model=saved.model, optimizer=saved.optimizer)
    checkpoint.load(tmp_path, model=loaded.model, optimizer=loaded.optimizer)
    assert_equal(loaded.average(), saved.average())
    saved.optimizer.consolidate_state_dict(to=0)
    box = [saved.optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    resumed.module.load_state_dict(saved.module.state_dict())
    state_dict: Any = box[0]
    resumed.optimizer.load_state_dict(state_dict)
    resumed.optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert resumed.optimizer.state_dict()["averages"].keys() == {"ema"}
    dcp_save(checkpoint.get_optimizer_state_dict(saved.model, saved.optimizer), checkpoint_id=tmp_path / "dcp")
    target = checkpoint.get_optimizer_state_dict(parts.model, parts.optimizer)
    dcp_load(target, checkpoint_id=tmp_path / "dcp")
    checkpoint.set_optimizer_state_dict(parts.model, parts.optimizer, target)
    parts.module.load_state_dict(saved.module.state_dict())
    for run in (loaded, resumed, parts):
        assert_equal(run.average(), saved.average())
    for run in (saved, loaded, resumed, parts):
        run.step(9)
    for run in (loaded, resumed, parts):
        assert_equal(run.average(), saved.average())
    other = ZeroRedundancyOptimizer(module().parameters(), CLASSES[name][0], **CLASSES[name][1])
    with pytest.warns(UserWarning, match="the average 'ema' was saved, and nothing here takes it"):
        other.load_state_dict(state_dict)
    plain = CLASSES[name][0](copy.deepcopy(saved.module).parameters(), **CLASSES[name][1])
    plain.load_state_dict(state_dict)
    assert not any("average" in str(key) for state in plain.state.values() for key in state)


@pytest.mark.parametrize("trainable_only", [False, True])
@distributed(2)
def test_frozen_layers_are_trained_after_a_load(world_size: int, trainable_only: bool, tmp_path: Path) -> None:
    """Rank 1 owns no more than halves of frozen parameters then."""

    def start() -> Run:
        run = Run("1")
        for param in list(run.module.parameters())[:-1]:
            param.requires_grad_(False)
        return run

    def train(run: Run, first: int) -> None:
        for number in range(first, first + 3):
            for place, param in enumerate(run.module.parameters()):
                generator = torch.Generator().manual_seed(10 * number + place)
                param.grad = torch.randn(param.shape, generator=generator) if param.requires_grad else None
            run.optimizer.step()

    saved, loaded = start(), start()
    train(saved, 0)
    checkpoint.save(tmp_path, 1, model=saved.model, optimizer=saved.optimizer, trainable_only=trainable_only)
    checkpoint.load(tmp_path, model=loaded.model, optimizer=loaded.optimizer)
    for run in (saved, loaded):
        for param in run.module.parameters():
            param.requires_grad_(True)
        train(run, 3)
    assert_equal(loaded.average(), saved.average())
    loaded.optimizer.consolidate_state_dict()


@distributed(2)
def test_a_load_inside_is_no_silent_loss(world_size: int, tmp_path: Path) -> None:
    ours = Run("1")
    checkpoint.save(tmp_path, 1, model=ours.model, optimizer=ours.optimizer)
    ours.step(1)
    before = [param.detach().clone() for param in ours.module.parameters()]
    with pytest.raises(RuntimeError, match="was loaded inside"), ours.ema.swapped():
        checkpoint.load(tmp_path, model=ours.model, optimizer=ours.optimizer)
    assert_equal(before, ours.module.parameters())
    ours.step(2)


@pytest.mark.parametrize("rule", ["a function", "every third"])
@distributed(2)
def test_it_loads_the_values_of_an_averaged_model(world_size: int, rule: str) -> None:
    ours, fresh = Run("1", **RULES[rule]), Run("1", **RULES[rule])
    every = RULES[rule].get("update_every", 1)
    plain = AveragedModel(ours.module, multi_avg_fn=average_by(RULES[rule].get("decay", 0.9)))
    for number in range(7):
        ours.step(number)
        if number % every == 0:
            plain.update_parameters(ours.module)
    fresh.module.load_state_dict(ours.module.state_dict())
    fresh.optimizer.consolidate_state_dict()
    fresh.ema.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="the optimizer state of all ranks has changed since it was gathered"):
        fresh.optimizer.state_dict()
    assert_equal(fresh.average(), plain.parameters())
    plain_copy = AveragedModel(fresh.module, multi_avg_fn=plain.multi_avg_fn)
    plain_copy.load_state_dict(plain.state_dict())
    for number in range(1, 4):
        fresh.step(number)
        if number % every == 0:
            plain_copy.update_parameters(fresh.module)
    assert_equal(fresh.average(), plain_copy.parameters())
    with pytest.raises(ValueError, match="to must be a group rank from 0 to 1, got 2"):
        ours.ema.state_dict(to=2)
    whole = ours.ema.state_dict(to=1)
    assert bool(whole) == (dist.get_rank() == 1)
    if whole:
        target = module()
        target.load_state_dict(whole)
        assert_equal(list(target.parameters()), plain.parameters())


def move(run: Run) -> None:
    for param in run.module.parameters():
        param.data = param.data.clone()


CHANGES: dict[str, Callable[[Run], object]] = {
    "an option": lambda run: run.optimizer.param_groups[0].update(lr=0.25),
    "an option on one rank": lambda run: run.optimizer.param_groups[0].update(lr=0.25 + dist.get_rank()),
    "memory": move,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [0, 3])
@distributed(2)
def test_swaps_after_changes_by_the_user(world_size: int, steps: int, change: str) -> None:
    ours = Run("1")
    for number in range(steps):
        ours.step(number)
    expected, before = ours.average(), [param.detach().clone() for param in ours.module.parameters()]
    CHANGES[change](ours)
    options = dict(ours.optimizer.param_groups[0])
    assert_equal(ours.average(), expected)
    assert_equal(before, ours.module.parameters())
    assert ours.optimizer.param_groups[0] == options


class LeftError(Exception):
    """Leaves a block."""


@distributed(2)
def test_exits_with_exceptions_restore_bit_by_bit(world_size: int) -> None:
    ours = Run("1")
    for number in range(3):
        ours.step(number)
    before, draw = [param.detach().clone() for param in ours.module.parameters()], random.Random(dist.get_rank())
    for _ in range(1000):
        with contextlib.suppress(LeftError), ours.ema.swapped():
            if draw.random() < 0.5:
                raise LeftError
    assert_equal(before, ours.module.parameters())
    with ours.ema.swapped():
        with pytest.raises(RuntimeError, match="the average of 'ema' is in the parameters now"), ours.ema.swapped():
            pass
        with pytest.raises(RuntimeError, match="the average of 'ema' is in the parameters now"):
            ours.step(3)
    assert_equal(before, ours.module.parameters())
    ours.step(3)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "decay": ({"decay": 1.5}, "decay must be a number from 0.0 to 1.0"),
    "dtype": ({"dtype": torch.int8}, "dtype must be a floating point type"),
    "update_every": ({"update_every": 0}, "update_every must be a whole number of steps, at least 1"),
    "start_step": ({"start_step": -1}, "start_step must be a whole number of steps"),
    "name": ({"name": "a/b"}, "name must be an identifier"),
    "other model": ({"model": nn.Linear(2, 2)}, "parameter 'weight' of the model is in none of the optimizers"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@distributed(2)
def test_mistakes(world_size: int, mistake: str) -> None:
    wrong, text = MISTAKES[mistake]
    ours = Run("1")
    rank = dist.get_rank()
    arguments = {"model": ours.model, **wrong, "name": wrong.get("name", "second")} if rank == 0 else {}
    with pytest.raises((ValueError, RuntimeError), match=text if rank == 0 else "rank 0"):
        ShardedEMA(ours.optimizer, **{"model": ours.model, "name": "second", **arguments})
    assert list(ours.optimizer.engine.inner.averages) == ["ema"]


@distributed(2)
def test_it_comes_after_the_wrapper(world_size: int) -> None:
    inside = module()
    optimizer = ZeroRedundancyOptimizer(inside.parameters(), AdamW)
    ShardedEMA(optimizer, inside)
    with pytest.raises(ValueError, match="construct ShardedDataParallel first"):
        ShardedDataParallel(inside, optimizer)


def test_it_needs_a_sharded_optimizer(tmp_path: Path) -> None:
    inside = module()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"takes a onecopy\.ZeroRedundancyOptimizer"):
            ShardedEMA(AdamW(inside.parameters()), inside)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
