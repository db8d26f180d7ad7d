"""The stock torch.distributed.checkpoint with sharded optimizers: save, load, reshard, full state, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from onecopy import CheckpointMismatchError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from onecopy.state_dict.dcp import ShardedState
from tests.support.failures import expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed, pools
from tests.support.models import assert_equal, assert_same_tree, values

WAYS = ("parameter", "element", "wrapped")
FULL = StateDictOptions(full_state_dict=True)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")


def make(way: str, seed: int = 0, optimizer: Any = AdamW, **options: Any) -> tuple[Any, Any]:
    """A small model with a channels-last weight, and its optimizer."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 70, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module = nn.Sequential(conv, nn.Flatten(), nn.Linear(280, 40), nn.ReLU(), nn.Linear(40, 10))
    sharding = {} if way == "wrapped" else {"shard_by": way}
    zero = ZeroRedundancyOptimizer(module.parameters(), optimizer, **{"lr": 1e-2, **sharding, **options})
    return (ShardedDataParallel(module, zero, bucket_bytes=4000) if way == "wrapped" else module), zero


def train(model: nn.Module, zero: ZeroRedundancyOptimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        zero.zero_grad()
        model(torch.randn(4, 3, 4, 4)).square().mean().backward()
        zero.step()


def full_state(model: nn.Module, zero: ZeroRedundancyOptimizer) -> Any:
    return get_optimizer_state_dict(model, zero, options=FULL)


def save_trained(way: str, folder: Path) -> Any:
    """Train, save with the stock functions, train on; return the parameters then, and the state that was saved."""
    model, zero = make(way)
    train(model, zero, range(3))
    state = full_state(model, zero)
    module = getattr(model, "module", model)
    saved = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(model, zero)}
    dcp_save(saved, checkpoint_id=folder, no_dist=False)
    train(model, zero, range(3, 5))
    return values(model.parameters()), state


def go_on(way: str, folder: Path) -> Any:
    """Load into a fresh optimizer, and train on."""
    model, zero = make(way, seed=7)
    module = getattr(model, "module", model)
    found = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(model, zero)}
    assert not zero.optim.state, "asking for the state has made some"
    dcp_load(found, checkpoint_id=folder)
    set_optimizer_state_dict(model, zero, found["optimizer"])
    train(model, zero, range(3, 5))
    return values(model.parameters())


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (1, 3)])
@pytest.mark.parametrize(("source", "target"), [(source, target) for source in WAYS for target in WAYS])
def test_any_way_and_number_of_ranks_loads_any_other(
    source: str, target: str, before: int, after: int, tmp_path: Path
) -> None:
    """Without DDP every rank sees the same data, so that all numbers of ranks compute the same."""
    expected, state = pools.run(before, __name__, "save_trained", {"way": source, "folder": tmp_path})[0]
    for got in pools.run(after, __name__, "go_on", {"way": target, "folder": tmp_path}):
        assert_equal(got, expected, "continued", tolerance=0.0 if before == after else 1e-6)
    dcp_to_torch_save(tmp_path, tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]
    for key, value in converted["state"]["0.weight"].items():  # torch keeps values, not memory formats
        if value.dim() == 4:
            converted["state"]["0.weight"][key] = value.contiguous(memory_format=torch.channels_last)
    assert_same_tree(converted, state, "dcp_to_torch_save")


@distributed(2)
def test_async_save_stages_the_shards(world_size: int, tmp_path: Path) -> None:
    model, zero = make("element")
    train(model, zero, range(3))
    state, saved = full_state(model, zero), {"optimizer": get_optimizer_state_dict(model, zero)}
    group = dist.new_group()  # torch's thread must not speak in between on the group of training
    future: Any = dcp_async_save(saved, checkpoint_id=tmp_path, process_group=group)
    train(model, zero, range(3, 5))  # what is saved is the state before this
    future.result()
    fresh, other = make("parameter", seed=7)
    found = {"optimizer": get_optimizer_state_dict(fresh, other)}
    dcp_load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(fresh, other, found["optimizer"])
    assert_same_tree(full_state(fresh, other), state, "async_save")


@distributed(2)
def test_several_optimizers_plain_ones_among_them(world_size: int, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    model = DistributedDataParallel(module)
    zero = ZeroRedundancyOptimizer(module[0].parameters(), AdamW, lr=0.1)
    plain = SGD(module[1].parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 64)).sum().backward()
    zero.step()
    plain.step()
    dcp_save({"o": get_optimizer_state_dict(model, [zero, plain])}, checkpoint_id=tmp_path)
    dist.barrier()
    other = ZeroRedundancyOptimizer(module[0].parameters(), AdamW, lr=0.5, shard_by="element")
    another = SGD(module[1].parameters(), lr=0.5, momentum=0.9)
    model.zero_grad()
    found = {"o": get_optimizer_state_dict(model, [other, another])}
    dcp_load(found, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, [other, another], found["o"])
    assert_same_tree(full_state(model, other), full_state(model, zero), "ours")
    assert_same_tree(another.state_dict(), plain.state_dict(), "plain")


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_full_and_offloaded_state_comes_back_and_asking_for_it_changes_nothing(world_size: int, way: str) -> None:
    model, zero = make(way)
    train(model, zero, range(3))
    params, before = values(model.parameters()), full_state(model, zero)
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert bool(get_optimizer_state_dict(model, zero, options=on_rank_0)) == (dist.get_rank() == 0)
    get_optimizer_state_dict(model, zero)
    zero.sharded_state_dict(to_load=True)
    offloaded = get_optimizer_state_dict(model, zero, options=StateDictOptions(cpu_offload=True))
    assert_equal(model.parameters(), params, "parameters")
    assert_same_tree(full_state(model, zero), before, "state")

    train(model, zero, range(3, 4))
    set_optimizer_state_dict(model, zero, offloaded)
    assert_same_tree(full_state(model, zero), before, "copies, not views")

    fresh, other = make("element", seed=7)
    set_optimizer_state_dict(fresh, other, before, options=FULL)
    assert_same_tree(full_state(fresh, other), before, "into other shards")
    plain = AdamW(fresh.parameters(), lr=1e-2)
    torchs.set_optimizer_state_dict(fresh, plain, before, options=FULL)
    for name, param in fresh.named_parameters():
        assert torch.equal(plain.state[param]["exp_avg"], before["state"][name]["exp_avg"])


@pytest.mark.parametrize("steps", [0, 2])
@distributed(2)
def test_torchs_own_functions_set_a_full_state_and_name_ours_to_get_one(world_size: int, steps: int) -> None:
    model, zero = make("element")
    train(model, zero, range(3))
    zero.zero_grad()
    params, state = values(model.parameters()), full_state(model, zero)
    with pytest.raises(RuntimeError, match=r"onecopy\.checkpoint\.get_optimizer_state_dict"):
        torchs.get_optimizer_state_dict(model, zero)
    assert all(param.grad is None for param in model.parameters())
    assert zero.param_groups[0]["lr"] == 1e-2
    assert_equal(model.parameters(), params, "parameters")
    assert_same_tree(full_state(model, zero), state, "state")
    fresh, other = make("element")
    train(fresh, other, range(steps))
    other.zero_grad()
    torchs.set_optimizer_state_dict(fresh, other, state)
    assert_same_tree(full_state(fresh, other), state, "set")


@pytest.mark.parametrize("option", ["full_state_dict", "cpu_offload"])
@distributed(2, 3)
def test_different_options_are_an_error(world_size: int, option: str) -> None:
    odd = world_size - 1
    model, zero = make("element")
    train(model, zero, range(2))
    before = full_state(model, zero)
    options = StateDictOptions(**{option: dist.get_rank() == odd})  # type: ignore[arg-type]
    for call in (
        lambda: get_optimizer_state_dict(model, zero, options=options),
        lambda: set_optimizer_state_dict(model, zero, before, options=options),
    ):
        expect_disagreement(odd, call, f"{option}: False", f"{option}: True")
    assert_same_tree(full_state(model, zero), before, "after the errors")


class Broken:
    """Cannot be put into an optimizer."""

    def __deepcopy__(self, memo: object) -> Any:
        raise ValueError("cannot be copied")


@pytest.mark.parametrize("culprit", ["first", "last"])
@distributed(2, 3)
def test_a_value_that_one_rank_refuses_is_an_error_on_all_ranks(world_size: int, culprit: str) -> None:
    odd = 0 if culprit == "first" else world_size - 1
    here = dist.get_rank() == odd
    model, zero = make("element")
    train(model, zero, range(2))
    before, shards = full_state(model, zero), get_optimizer_state_dict(model, zero)
    other, plain = nn.Linear(2, 2), SGD(model[4].parameters(), lr=0.1)
    incomplete = {**shards, "param_groups": [{**shards["param_groups"][0], "params": ["0.weight"]}]}

    def get(model: nn.Module = model, **given: Any) -> Callable[[], object]:
        return lambda: get_optimizer_state_dict(model, zero, **(given if here else {}))

    def put(state: Any, model: nn.Module = model, optimizers: Any = zero, **given: Any) -> Callable[[], object]:
        return lambda: set_optimizer_state_dict(model, optimizers, state, **given)

    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (get(submodules={model}), ValueError, "submodules"),
        (get(options=StateDictOptions(ignore_frozen_params=True)), ValueError, "ignore_frozen"),
        (get(options=StateDictOptions(flatten_optimizer_state_dict=True)), ValueError, "flatten_optimizer_state_dict"),
        (get(other if here else model), ValueError, "not a parameter of the model"),
        (put(before, other if here else model, options=FULL), ValueError, "not a parameter of the model"),
        (put(before, options=everywhere if here else FULL), ValueError, "broadcast_from_rank0 is not supported"),
        (put(3 if here else before, options=FULL), TypeError, "got 3"),
        (put({3: 4} if here else before, options=FULL), TypeError, "param_groups"),
        (put(incomplete if here else shards), CheckpointMismatchError, r"no parameter '0\.bias'"),
    ]
    for call, kind, text in calls:
        expect_failure_of([odd], call, kind, text)
    broken = {**before, "state": {**before["state"], "4.bias": {"exp_avg": Broken()}}} if here else before
    assert failure_of(put(broken, options=FULL)) is not None
    # A plain optimizer among them, which torch's own function refuses on one rank.
    wrong = {**before, "param_groups": 3} if here else before
    assert failure_of(put(wrong, optimizers=[plain, zero], options=FULL)) is not None
    assert_same_tree(full_state(model, zero), before, "after the errors")


@distributed(2)
def test_state_of_other_ranges_is_refused(world_size: int) -> None:
    (model, zero), (other_model, other) = make("element"), make("wrapped")
    train(model, zero, range(2))
    before, state = full_state(model, zero), get_optimizer_state_dict(model, zero)
    with pytest.raises((CheckpointMismatchError, RuntimeError), match="another range"):
        set_optimizer_state_dict(other_model, other, state)
    with pytest.raises((CheckpointMismatchError, RuntimeError), match="full_state_dict=True"):
        set_optimizer_state_dict(model, zero, before)
    with pytest.raises(RuntimeError, match="only this rank's range"):
        _ = next(value for value in state["state"]["2.weight"].values() if isinstance(value, ShardedState)) + 1
    assert_same_tree(full_state(model, zero), before, "unchanged")


class RefusesToLoad(AdamW):
    """Raises after it has loaded, when told to."""

    broken = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if RefusesToLoad.broken:
            raise KeyError("no such state here")


@distributed(2, 3)
@pytest.mark.parametrize("way", ["element", "wrapped"])
def test_shards_that_one_rank_could_not_load_change_nothing_on_any(world_size: int, way: str) -> None:
    model, zero = make(way, optimizer=RefusesToLoad, elementwise=True)
    train(model, zero, range(2))
    before = full_state(model, zero)
    saved = get_optimizer_state_dict(model, zero, options=StateDictOptions(cpu_offload=True))
    train(model, zero, range(2, 3))
    now = full_state(model, zero)
    zero.param_groups[0]["lr"] = 0.5
    RefusesToLoad.broken = dist.get_rank() == 0
    try:
        expect_failure_of([0], lambda: set_optimizer_state_dict(model, zero, saved), KeyError, "no such")
    finally:
        RefusesToLoad.broken = False
    assert zero.param_groups[0]["lr"] == 0.5
    zero.param_groups[0]["lr"] = now["param_groups"][0]["lr"]
    assert_same_tree(full_state(model, zero), now, "nothing has changed")
    set_optimizer_state_dict(model, zero, saved)
    assert_same_tree(full_state(model, zero), before, "loaded")
    train(model, zero, range(4, 5))
