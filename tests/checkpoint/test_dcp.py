"""The stock torch.distributed.checkpoint with sharded optimizers: save, load, reshard, full state, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

from onecopy import CheckpointMismatchError, ZeroRedundancyOptimizer, checkpoint
from onecopy.state_dict.dcp import ShardedState
from tests.support.dcp import full_state, make, train
from tests.support.harness import distributed, pools
from tests.support.models import assert_equal, assert_same_tree

WAYS = ("parameter", "element", "wrapped")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")


def save_trained(way: str, folder: str) -> Any:
    """Train, save with the stock functions, train on; return the parameters then, and the state that was saved."""
    model, zero = make(way)
    train(model, zero, range(3))
    state = full_state(model, zero)
    module = getattr(model, "module", model)
    dcp_save(
        {"model": module.state_dict(), "optimizer": checkpoint.get_optimizer_state_dict(model, zero)},
        checkpoint_id=folder,
        no_dist=False,
    )
    train(model, zero, range(3, 5))
    return [param.detach().clone() for param in model.parameters()], state


def go_on(way: str, folder: str) -> list[Tensor]:
    """Load into a fresh optimizer, and train on."""
    model, zero = make(way, seed=7)
    module = getattr(model, "module", model)
    found = {"model": module.state_dict(), "optimizer": checkpoint.get_optimizer_state_dict(model, zero)}
    assert not zero.optim.state, "asking for the state has made some"
    dcp_load(found, checkpoint_id=folder)
    checkpoint.set_optimizer_state_dict(model, zero, found["optimizer"])
    train(model, zero, range(3, 5))
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("source", "target"), [(source, target) for source in WAYS for target in WAYS])
@distributed(2)
def test_the_stock_functions_save_and_load_any_way_into_any_other(world_size: int, source: str, target: str) -> None:
    folder = shared_folder()
    expected, _ = save_trained(source, folder)
    dist.barrier()
    assert_equal(go_on(target, folder), expected, f"{source} to {target}")


def shared_folder() -> str:
    """A new directory that all ranks know."""
    import tempfile

    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return str(names[0])


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (4, 1)])
def test_another_number_of_ranks_loads_it(before: int, after: int, tmp_path: Path) -> None:
    """Without DDP every rank sees the same data, so that all numbers of ranks compute the same."""
    results = pools.run(before, __name__, "save_trained", {"way": "element", "folder": str(tmp_path)})
    for got in pools.run(after, __name__, "go_on", {"way": "wrapped", "folder": str(tmp_path)}):
        assert_equal(got, results[0][0], f"{before} to {after} ranks", tolerance=1e-6)


@distributed(2)
def test_the_converted_file_is_the_full_state(world_size: int) -> None:
    folder = shared_folder()
    _, state = save_trained("element", folder)
    dist.barrier()
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, f"{folder}/all.pt")
        got = torch.load(f"{folder}/all.pt", weights_only=True)["optimizer"]
        got["state"]["0.weight"] = channels_last(got["state"]["0.weight"])  # torch keeps values, not memory formats
        assert_same_tree(got, state, "dcp_to_torch_save")


def channels_last(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for key, value in state.items()
    }


@distributed(2)
def test_async_save_stages_the_shards(world_size: int) -> None:
    folder = shared_folder()
    model, zero = make("element")
    train(model, zero, range(3))
    state = full_state(model, zero)
    state_dict = {"optimizer": checkpoint.get_optimizer_state_dict(model, zero)}
    group = dist.new_group()  # torch's thread must not speak in between on the group of training
    future: Any = dcp_async_save(state_dict, checkpoint_id=folder, process_group=group)
    train(model, zero, range(3, 5))  # what is saved is the state before this
    future.result()
    fresh, other = make("parameter", seed=7)
    found = {"optimizer": checkpoint.get_optimizer_state_dict(fresh, other)}
    dcp_load(found, checkpoint_id=folder)
    checkpoint.set_optimizer_state_dict(fresh, other, found["optimizer"])
    assert_same_tree(full_state(fresh, other), state, "async_save")


FULL = StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_full_state_goes_to_all_ranks_and_comes_back(world_size: int, way: str) -> None:
    model, zero = make(way)
    train(model, zero, range(3))
    state = checkpoint.get_optimizer_state_dict(model, zero, options=FULL)
    plain_model, _ = make("parameter")
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
    torchs.set_optimizer_state_dict(plain_model, plain, state, options=FULL)
    fresh, other = make("element", seed=7)
    checkpoint.set_optimizer_state_dict(fresh, other, state, options=FULL)
    assert_same_tree(full_state(fresh, other), full_state(model, zero), way)
    for name, param in plain_model.named_parameters():
        assert torch.equal(plain.state[param]["exp_avg"], full_state(model, zero)["state"][name]["exp_avg"])


@distributed(2)
def test_with_cpu_offload_rank_zero_has_everything_and_shards_are_copies(world_size: int) -> None:
    model, zero = make("element")
    train(model, zero, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    before = full_state(model, zero)
    state = checkpoint.get_optimizer_state_dict(model, zero, options=options)
    assert bool(state) == (dist.get_rank() == 0)
    offloaded = checkpoint.get_optimizer_state_dict(model, zero, options=StateDictOptions(cpu_offload=True))
    train(model, zero, range(3, 4))
    checkpoint.set_optimizer_state_dict(model, zero, offloaded)
    assert_same_tree(full_state(model, zero), before, "copies, not views")


@distributed(2)
def test_asking_for_the_state_changes_nothing_however_often(world_size: int) -> None:
    model, zero = make("element")
    train(model, zero, range(3))
    params, state = [param.detach().clone() for param in model.parameters()], full_state(model, zero)
    for _ in range(3):
        for options in (None, StateDictOptions(full_state_dict=True), StateDictOptions(cpu_offload=True)):
            checkpoint.get_optimizer_state_dict(model, zero, options=options)
            zero.sharded_state_dict(to_load=True)
    assert_equal(model.parameters(), params, "parameters")
    assert_same_tree(full_state(model, zero), state, "state")


@distributed(2)
def test_torchs_own_function_to_get_state_names_ours_and_changes_nothing(world_size: int) -> None:
    model, zero = make("element")
    train(model, zero, range(2))
    zero.zero_grad()
    params, state = [param.detach().clone() for param in model.parameters()], full_state(model, zero)
    with pytest.raises(RuntimeError, match=r"onecopy\.checkpoint\.get_optimizer_state_dict"):
        torchs.get_optimizer_state_dict(model, zero)
    assert all(param.grad is None for param in model.parameters())
    assert zero.param_groups[0]["lr"] == 1e-2
    assert_equal(model.parameters(), params, "parameters")
    assert_same_tree(full_state(model, zero), state, "state")


@pytest.mark.parametrize("steps", [0, 2])
@distributed(2)
def test_torchs_own_function_to_set_state_takes_a_full_one(world_size: int, steps: int) -> None:
    model, zero = make("element")
    train(model, zero, range(3))
    state = full_state(model, zero)
    fresh, other = make("element")
    train(fresh, other, range(steps))
    other.zero_grad()
    torchs.set_optimizer_state_dict(fresh, other, state)
    assert_same_tree(full_state(fresh, other), state, "state")


@distributed(2)
def test_several_optimizers_plain_ones_among_them(world_size: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    model = DistributedDataParallel(module)
    zero = ZeroRedundancyOptimizer(module[0].parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.SGD(module[1].parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 64)).sum().backward()
    zero.step()
    plain.step()
    folder = shared_folder()
    dcp_save({"o": checkpoint.get_optimizer_state_dict(model, [zero, plain])}, checkpoint_id=folder)
    dist.barrier()
    other = ZeroRedundancyOptimizer(module[0].parameters(), torch.optim.AdamW, lr=0.5, shard_by="element")
    another = torch.optim.SGD(module[1].parameters(), lr=0.5, momentum=0.9)
    model.zero_grad()
    found = {"o": checkpoint.get_optimizer_state_dict(model, [other, another])}
    dcp_load(found, checkpoint_id=folder)
    checkpoint.set_optimizer_state_dict(model, [other, another], found["o"])
    assert_same_tree(full_state(model, other), full_state(model, zero), "ours")
    assert_same_tree(another.state_dict(), plain.state_dict(), "plain")


@distributed(2)
def test_wrong_state_is_refused_on_all_ranks(world_size: int) -> None:
    model, zero = make("element")
    train(model, zero, range(2))
    before = full_state(model, zero)
    state = checkpoint.get_optimizer_state_dict(model, zero)
    missing = {**state, "param_groups": [{**state["param_groups"][0], "params": ["0.weight"]}]}
    with pytest.raises((CheckpointMismatchError, RuntimeError), match=r"no parameter '0\.bias'"):
        checkpoint.set_optimizer_state_dict(model, zero, missing if dist.get_rank() == 0 else state)
    other_model, other = make("wrapped")
    with pytest.raises((CheckpointMismatchError, RuntimeError), match="another range"):
        checkpoint.set_optimizer_state_dict(other_model, other, state)
    with pytest.raises((CheckpointMismatchError, RuntimeError), match="full_state_dict=True"):
        checkpoint.set_optimizer_state_dict(model, zero, before)
    for name in ("ignore_frozen_params", "flatten_optimizer_state_dict"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            checkpoint.get_optimizer_state_dict(model, zero, options=StateDictOptions(**{name: True}))  # type: ignore[arg-type]
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match="broadcast_from_rank0 is not supported"):
        checkpoint.set_optimizer_state_dict(model, zero, before, options=everywhere)
    with pytest.raises(RuntimeError, match="only this rank's range"):
        _ = next(value for value in state["state"]["2.weight"].values() if isinstance(value, ShardedState)) + 1
    assert_same_tree(full_state(model, zero), before, "unchanged")


# Without processes


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_flat_range_is_few_rectangles_that_cover_it_exactly(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    numel = torch.Size(shape).numel()
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    whole = torch.arange(numel).view([shape[dim] for dim in order]).permute([order.index(d) for d in range(len(shape))])
    flat = torch.arange(start, stop)
    part = ShardedState(flat, start, whole)
    chunks = part.__create_chunk_list__()
    assert len(chunks) <= max(1, 2 * len(shape) - 1)
    seen = []
    for chunk in chunks:
        box = tuple(slice(low, low + size) for low, size in zip(chunk.offsets, chunk.sizes, strict=True))
        shown = part.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
        assert torch.equal(shown, whole[box])
        seen += shown.flatten().tolist()
    assert sorted(seen) == flat.tolist()
