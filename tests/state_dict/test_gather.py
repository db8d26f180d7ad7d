"""A consolidated state dict is the plain optimizer's, whatever the number of ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from onecopy import ZeroRedundancyOptimizer
from tests.support.exact_training import KINDS, ExactTraining
from tests.support.harness import distributed
from tests.support.state_dicts import Factory, Pair, expect_same, part


def expect_not_consolidated(optimizer: ZeroRedundancyOptimizer) -> None:
    line = r"optimizer\.consolidate_state_dict\(\)  # on all ranks, before state_dict\(\)"
    with pytest.raises(RuntimeError, match=rf"rank {optimizer.rank}: .*{line}"):
        dict(optimizer.state_dict()["state"])  # after a consolidation on another rank only reading raises


@distributed(2, 3)
@pytest.mark.parametrize("shard_by", ["parameter", "element"])
@pytest.mark.parametrize("factory", [part(Adam, lr=0.1, amsgrad=True), part(Adagrad, lr=0.1)], ids=["Adam", "Adagrad"])
def test_a_consolidated_dict_is_the_plain_optimizers(world_size: int, factory: Factory, shard_by: str) -> None:
    """With parameters of every kind. ``tests/step/test_parity.py`` does the same with every class."""
    pair = Pair(factory, shard_by=shard_by).train()
    assert len(pair.ours.layout.cut_params) >= (5 if shard_by == "element" else 0)
    pair.expect_plain()


@distributed(2, 3)
def test_the_state_goes_to_the_rank_that_asks_for_it_and_to_no_other(world_size: int) -> None:
    pair = Pair(shard_by="element").train()
    for to in range(world_size):
        pair.expect_plain(to)
        if pair.ours.rank != to:
            expect_not_consolidated(pair.ours)


@distributed(2)
def test_the_state_must_be_gathered_again_after_a_step(world_size: int) -> None:
    pair = Pair(shard_by="element").train()
    expect_not_consolidated(pair.ours)
    pair.ours.consolidate_state_dict(to=0)
    state_dict = pair.ours.state_dict()  # Accelerate calls it on all ranks and saves on rank 0
    expect_same(state_dict["param_groups"], pair.plain.state_dict()["param_groups"])
    if pair.ours.rank == 0:
        expect_same(state_dict, pair.plain.state_dict())
    else:
        for use in (copy.deepcopy, pickle.dumps, lambda each: dict(each["state"]), pair.plain.load_state_dict):
            with pytest.raises(RuntimeError, match="was gathered on another rank"):
                use(state_dict)
    pair.train(1)
    with pytest.raises(RuntimeError, match=rf"rank {pair.ours.rank}: .* has changed since it was gathered"):
        pair.ours.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@distributed(2, 4)
def test_every_level_gives_the_state_of_the_plain_optimizer(world_size: int, kind: str) -> None:
    training = ExactTraining(kind)
    for to in (0, world_size - 1) * 2:
        training.accumulate()
        training.step()
        training.zero.consolidate_state_dict(to)
        training.accumulate()
        if dist.get_rank() == to:
            training.expect_plain(training.zero.state_dict())
        training.step()


@distributed(2, 3)
def test_only_a_class_whose_constructor_makes_state_must_be_consolidated_at_once(world_size: int) -> None:
    for optimizer_class in (SGD, Adam):
        pair = Pair(part(optimizer_class, lr=0.1))
        expect_same(pair.ours.state_dict(), pair.plain.state_dict())
        pair.expect_plain()
    for names in (["small"], ["matrix", "small", "scalar"]):
        pair = Pair(part(Adagrad, lr=0.1), names=names)
        expect_not_consolidated(pair.ours)
        for to in range(world_size):
            pair.expect_plain(to)


def assign_an_entry(pair: Pair) -> None:
    param = next(iter(pair.ours.state))
    pair.ours.state[param] = pair.ours.state[param]


def delete_an_entry(pair: Pair) -> None:
    del pair.ours.state[next(iter(pair.ours.state))]


CHANGES: dict[str, Callable[[Pair], object]] = {
    "a step": lambda pair: pair.train(1),
    "a load": lambda pair: pair.ours.load_state_dict(pair.plain.state_dict()),
    "a group": lambda pair: pair.ours.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))]}),
    "no state": lambda pair: setattr(pair.ours, "state", {}),
    "an entry is assigned": assign_an_entry,
    "an entry is deleted": delete_an_entry,
}


@distributed(2, 3)
@pytest.mark.parametrize("case", CHANGES)
def test_a_consolidation_is_stale_after_a_change(world_size: int, case: str) -> None:
    pair = Pair(names=["matrix", "small"], shard_by="element").train()
    for to in range(world_size):
        pair.consolidated(to)
    dist.barrier()
    CHANGES[case](pair)
    expect_not_consolidated(pair.ours)
    pair.ours.consolidate_state_dict(to=1)
    if pair.ours.rank == 1:
        found = sorted(pair.ours.state_dict()["state"])
        assert found == [0, 1] or case in ("no state", "an entry is deleted")


@distributed(2)
def test_every_dict_is_a_fresh_one_that_shares_no_memory_with_live_state(world_size: int) -> None:
    pair = Pair(shard_by="element")
    pair.train()
    pair.ours.consolidate_state_dict()
    if pair.ours.rank == 0:
        first, second = pair.ours.state_dict(), pair.ours.state_dict()
        kept = copy.deepcopy(second)
        first["state"].clear()
        first["param_groups"][0]["params"].clear()
        expect_same(second, kept)
        expect_same(pair.ours.state_dict(), kept)
    pair.train(1)
    if pair.ours.rank == 0:
        expect_same(second, kept)
