"""State dicts of plain optimizers, other world sizes and other policies load exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Adam, AdamW, Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.both import tensors_of
from tests.support.harness import distributed
from tests.support.state_dicts import Pair, expect_same, make_params, part


def take_over(source: Pair, *args: Any, **options: Any) -> Pair:
    """A pair that goes on where ``source`` stands, but for our optimizer's state."""
    pair = Pair(*args, **options).restart(tensors_of(source.plain), source.steps)
    pair.plain.load_state_dict(copy.deepcopy(source.plain.state_dict()))
    return pair


@distributed(2, 3)
@pytest.mark.parametrize("shard_by", ["parameter", "element"])
def test_a_plain_dict_loads_and_the_callers_copy_stays_its_own(world_size: int, shard_by: str) -> None:
    source = Pair().train()
    pair = take_over(source, options={"lr": 0.7}, shard_by=shard_by)
    state_dict = source.plain.state_dict()
    kept = copy.deepcopy(state_dict)
    pair.ours.load_state_dict(state_dict)
    expect_same(state_dict, kept)
    assert pair.ours.param_groups[0]["lr"] == 0.1
    states = pair.ours.optim.state.values()
    held = sum(state["exp_avg"].numel() for state in states)
    assert held == pair.ours.layout.elements_per_rank[pair.ours.rank], "a rank keeps only its shards"
    for state in states:
        for value in state.values():
            assert value.untyped_storage().nbytes() <= max(1, value.numel()) * value.element_size()
    pair.train()
    pair.ours.param_groups[0]["lr"] = 99
    pair.ours.param_groups[0]["betas"] = (0.0, 0.0)
    expect_same(state_dict, kept)


@distributed(2)
def test_our_dict_loads_into_the_plain_optimizer(world_size: int) -> None:
    source = Pair(shard_by="element").train()
    pair = take_over(source)
    for to in range(world_size):
        state_dict = source.consolidated(to)
        if source.ours.rank == to:
            pair.plain.load_state_dict(state_dict)
        pair.ours.load_state_dict(source.plain.state_dict())
    pair.train()


@distributed(4)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 4), (4, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("policies", [("parameter", "element"), ("element", "parameter")])
def test_a_file_moves_between_world_sizes_and_policies(
    world_size: int, saved_by: int, loaded_by: int, policies: tuple[str, str], tmp_path: Path
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (saved_by, loaded_by)}
    rank, path = dist.get_rank(), tmp_path / "optimizer.pt"
    if rank < saved_by:
        source = Pair(group=groups[saved_by], shard_by=policies[0]).train()
        state_dict = source.consolidated()
        if rank == 0:
            torch.save([state_dict, tensors_of(source.ours)], path)
    dist.barrier()
    if rank < loaded_by:
        state_dict, params = torch.load(path, weights_only=True)
        pair = Pair(group=groups[loaded_by], shard_by=policies[1]).restart(params, 2)
        pair.ours.load_state_dict(state_dict)
        pair.plain.load_state_dict(state_dict)
        pair.train()
        pair.expect_plain()
    dist.barrier()


@distributed(2)
@pytest.mark.parametrize("option", ["fused", "capturable"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.int64, float])
def test_step_counters_land_where_fused_and_capturable_want_them(world_size: int, option: str, kind: Any) -> None:
    source = Pair(part(AdamW, lr=0.1), names=["matrix", "small"]).train()
    state_dict = copy.deepcopy(source.plain.state_dict())
    for state in state_dict["state"].values():
        state["step"] = kind(2) if kind is float else state["step"].to(kind)
    state_dict["param_groups"][0][option] = True
    pair = take_over(source, part(AdamW, lr=0.1), ["matrix", "small"], options={option: True}, shard_by="element")
    pair.plain.load_state_dict(copy.deepcopy(state_dict))
    pair.ours.load_state_dict(state_dict)
    for state in pair.ours.optim.state.values():
        expect_same(state["step"], torch.tensor(2.0))
    if option == "fused":
        pair.train()


@distributed(2)
def test_hooks_of_both_methods_see_and_may_replace_the_whole_dict(world_size: int) -> None:
    pair = Pair(names=["matrix", "small"]).train()
    seen: list[Any] = []

    def after_save(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((optimizer, "after save", len(state_dict["state"])))
        return {**state_dict, "epoch": 3}

    def before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append((optimizer, "before load", len(state_dict["state"])))
        groups = [{**group, "lr": 0.2} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    ours = pair.ours
    ours.register_state_dict_pre_hook(lambda optimizer: seen.append((optimizer, "before save")))
    ours.register_state_dict_post_hook(after_save)
    ours.register_load_state_dict_pre_hook(before_load)
    ours.register_load_state_dict_post_hook(lambda each: seen.append((each, "after load", each.param_groups[0]["lr"])))
    expected = {**pair.plain.state_dict(), "epoch": 3}
    for to in range(world_size):
        state_dict = pair.consolidated(to) or expected
    expect_same(state_dict, expected)
    ours.load_state_dict(state_dict)
    assert all(each[0] is ours for each in seen)
    assert [each[1:] for each in seen] == [("before save",), ("after save", 2), ("before load", 2), ("after load", 0.2)]
    pair.plain.param_groups[0]["lr"] = 0.2
    pair.train()


@distributed(2)
@pytest.mark.parametrize("names", [["matrix", "small"], None, ["left", "right"]], ids=["kept", "absent", "other"])
def test_names_are_kept_and_loaded_as_the_plain_optimizer_does(world_size: int, names: list[str] | None) -> None:
    pair = Pair(names=["matrix", "small"]).train()
    state_dict = copy.deepcopy(pair.plain.state_dict())
    assert state_dict["param_groups"][0].pop("param_names") == ["matrix", "small"]
    if names is not None:
        state_dict["param_groups"][0]["param_names"] = names
    pair.ours.load_state_dict(state_dict)
    pair.plain.load_state_dict(state_dict)
    pair.train().expect_plain()


@distributed(2)
def test_several_groups_keep_their_numbering_where_some_parameters_have_no_state(world_size: int) -> None:
    def groups() -> list[dict[str, Any]]:
        order = [["small", "wave"], [], ["matrix", "nothing"], ["double"]]
        return [{"params": list(make_params(names).values()), "lr": 0.1 + k} for k, names in enumerate(order)]

    ours, plain = ZeroRedundancyOptimizer(groups(), Adam), Adam(groups())
    for optimizer in (ours, plain):
        for param in tensors_of(optimizer)[1:3]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    ours.consolidate_state_dict(to=1)
    if ours.rank == 1:
        expect_same(ours.state_dict(), plain.state_dict())
        assert list(ours.state_dict()["state"]) == [1, 2]
