"""``ShardedDataParallel`` with uneven inputs, checkpoints, groups of some ranks and meshes, against DDP."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.optim import Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.limits import TAGS
from tests.support.data_parallel import ROUNDING, SGD, Layers, Side, as_if_large, different_layers, inputs_of, one_step
from tests.support.data_parallel import Batched, Meeting
from tests.support.harness import distributed
from tests.support.models import (
    Everything,
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    everything_inputs,
)

# Checkpoints


@pytest.mark.parametrize("overlap", [False, True])
@distributed(2, 3)
def test_state_dicts_with_and_without_prefix(world_size: int, overlap: bool) -> None:
    plain, ours = Side(False, Batched), Side(True, Batched, overlap_forward=overlap)
    for side in (plain, ours):
        one_step(side, 0)
    wrapped, bare = ours.model.state_dict(), ours.module.state_dict()
    assert_same_tree(dict(wrapped), dict(plain.model.state_dict()), "wrapped", 0.0 if world_size == 2 else ROUNDING)
    assert list(wrapped) == ["module." + name for name in bare]
    for saved in (wrapped, bare):
        copied = {name: value.clone() for name, value in saved.items()}
        other = Side(True, Batched, overlap_forward=overlap)
        one_step(other, 7)
        assert not torch.equal(other.params[0], ours.params[0])
        other.model.load_state_dict(copied)
        assert_equal(other.params, ours.params, "loaded")
        one_step(other, 1)
        assert_replicas_equal(other.params)
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.model.load_state_dict({"module.first.weight": wrapped["module.first.weight"]})


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor], ids=["cut", "whole"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@distributed(2, 3)
def test_optimizer_state_to_plain_and_back(world_size: int, optimizer: type[Optimizer], overlap: bool) -> None:
    options = {"lr": 1e-2}
    sides = [Side(False, Layers, optimizer, options)]
    sides += [Side(True, Layers, optimizer, options, overlap_forward=overlap) for _ in range(2)]
    plain, ours, back = sides
    for step in range(3):
        one_step(ours, step)
    ours.zero.consolidate_state_dict(to=0)
    box: list[Any] = [ours.zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    plain.model.load_state_dict(ours.model.state_dict())
    plain.optimizer.load_state_dict(box[0])
    for step in range(3, 6):
        for side in (plain, ours):
            one_step(side, step)
    exact = 0.0 if world_size == 2 else 1e-5
    assert_equal(ours.params, plain.params, "plain goes on", exact)
    back.model.load_state_dict(plain.model.state_dict())
    back.optimizer.load_state_dict(plain.optimizer.state_dict())
    for step in range(6, 9):
        for side in (plain, back):
            one_step(side, step)
    assert_equal(back.params, plain.params, "and back", exact)
    assert_replicas_equal(back.params)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor], ids=["cut", "whole"])
@distributed(3)
def test_a_group_of_some_ranks(world_size: int, optimizer: type[Optimizer]) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    plain, ours = (Side(which, Batched, optimizer, {"lr": 1e-2}, group) for which in (False, True))
    assert ours.zero.rank == dist.get_rank() - 1
    for name in ("process_group", "device", "device_type", "is_multi_device_module"):
        assert getattr(ours.model, name) == getattr(plain.model, name), name
    for step in range(5):
        for side in (plain, ours):
            one_step(side, step)
        assert_equal(ours.params, plain.params, f"step {step}")
        assert_equal(ours.module.buffers(), plain.module.buffers(), f"step {step}")
    norm = ours.sharded.grad_norm()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in plain.params if p.grad is not None]))
    ours.zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 2:
        assert_same_tree(ours.zero.state_dict(), plain.optimizer.state_dict(), "state")


# Several machines


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor], ids=["cut", "whole"])
@distributed(4)
def test_a_mesh_trains_like_ddp_on_all_ranks(world_size: int, optimizer: type[Optimizer], overlap: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = SGD if optimizer is torch.optim.SGD else {"lr": 1e-2}
    plain = Side(False, Everything, optimizer, options)
    ours = Side(True, Everything, optimizer, options, mesh.get_group("shard"), mesh=mesh, overlap_forward=overlap)
    assert ours.zero.world_size == 2
    for step in range(12):
        norms = []
        for side in (plain, ours):
            words, targets, take_branch = everything_inputs(dist.get_rank(), step)
            side.optimizer.zero_grad()
            functional.cross_entropy(side.model(words, take_branch), targets).backward()
            if side.ours:
                norms.append(side.sharded.clip_grad_norm_(0.5))
            else:
                norms.append(nn.utils.clip_grad_norm_(side.params, 0.5))
            side.optimizer.step()
        torch.testing.assert_close(norms[0], norms[1])
        assert_equal(ours.params, plain.params, f"step {step}", 1e-5)
        assert_replicas_equal(ours.params)
    ours.zero.consolidate_state_dict(to=1)
    if ours.zero.rank == 1:
        mine, theirs = ours.zero.state_dict(), copy.deepcopy(plain.optimizer.state_dict())
        for key, state in theirs["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(mine["state"][key][name], value, rtol=1e-4, atol=1e-5)


@distributed(4)
def test_a_mesh_accumulates_and_begins_with_the_values_of_the_first_rank(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, ours = Side(False, Layers), Side(True, different_layers, group=mesh.get_group(1), mesh=mesh)
    assert_equal(ours.params, plain.params, "at the beginning")
    for step in range(4):
        for side in (plain, ours):
            side.optimizer.zero_grad()
            for part in range(2):
                side.model(inputs_of(dist.get_rank(), 2 * step + part)).square().mean().backward()
            with side.model.no_sync():
                side.model(inputs_of(dist.get_rank(), 40 + step)).square().mean().backward()
            side.model(inputs_of(dist.get_rank(), 50 + step)).square().mean().backward()
            side.optimizer.step()
        assert_equal(ours.params, plain.params, f"step {step}", ROUNDING)
    assert_replicas_equal(ours.params)


# Ranks that launch their buckets at different times


class Branch(nn.Module):
    """Has a layer that one rank does not use."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.sometimes = nn.Linear(size, size, bias=False)
        self.always = nn.Linear(size, size, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.always(inputs)
        return hidden if dist.get_rank() == 1 else hidden + self.sometimes(hidden)


def wrapped(module: nn.Module) -> tuple[ShardedDataParallel, ZeroRedundancyOptimizer]:
    """Every parameter in a bucket of its own."""
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    return ShardedDataParallel(module, optimizer, bucket_bytes=1), optimizer


@distributed(2, 3)
def test_buckets_of_two_modules_that_take_turns_differently_are_not_mixed_up(world_size: int) -> None:
    """A bucket that one rank cannot fill is launched after the other module's there, and before them elsewhere."""
    torch.manual_seed(3)
    below, above = nn.Linear(32, 32, bias=False), Branch(32)
    plain = copy.deepcopy(nn.ModuleList([below, above]))
    inputs = torch.randn(4, 32)
    plain[1](plain[0](inputs)).square().sum().backward()
    for param in plain.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad)
    (lower, first), (upper, second) = wrapped(below), wrapped(above)
    upper(lower(inputs)).square().sum().backward()
    for optimizer in (first, second):
        optimizer.step()
    expected = [param.detach() - param.grad / world_size for param in plain.parameters() if param.grad is not None]
    assert_equal([*below.parameters(), *above.parameters()], expected, "one step", 1e-3)


@distributed(2)
def test_a_group_that_was_destroyed_is_let_go(world_size: int) -> None:
    group = dist.new_group()
    collectives = Collectives(group)
    tags = [collectives.reserve_tags(), Collectives(group).reserve_tags()]
    assert tags[1] - tags[0] == TAGS, "users of one group have tags of their own"
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, collectives
    gc.collect()
    assert reference() is None


@distributed(2, 3)
def test_a_rank_that_waits_inside_its_backward_pass_does_not_keep_others_from_getting_there(world_size: int) -> None:
    """It has launched fewer buckets than they have, and uses their messages only when its pass has ended."""

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 32)
            self.branch = Branch(32)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.branch(Meeting.apply(self.first(inputs)))
            return outputs

    with as_if_large(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BUCKET_BYTES", 1)
        model, optimizer = wrapped(Meets())
        for step in range(2):
            model(inputs_of(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_replicas_equal(list(model.parameters()))
