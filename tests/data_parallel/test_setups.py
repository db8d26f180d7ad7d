"""``ShardedDataParallel`` with state dicts, groups of some ranks, meshes and several modules, against DDP."""

from __future__ import annotations

import copy
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
from tests.support.data_parallel import SGD, Batched, Run, as_if_large, inputs_of, side_of
from tests.support.harness import distributed
from tests.support.models import Everything, assert_equal, assert_replicas_equal, assert_same_tree, everything_inputs

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
OPTIMIZERS = pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor], ids=["cut", "whole"])
LR: dict[str, Any] = {"lr": 1e-2}


# State dicts


@OPTIMIZERS
@OVERLAP
@distributed(2, 3)
def test_state_to_plain_and_back(world_size: int, optimizer: type[Optimizer], overlap: bool) -> None:
    """The state dict of the model has DDP's prefix, and is loaded with and without it."""
    plain = side_of(False, Batched, optimizer, LR)
    ours, back = (side_of(True, Batched, optimizer, LR, overlap_forward=overlap) for _ in range(2))
    for step in range(3):
        ours.iterate(step)
    ours.zero.consolidate_state_dict(to=0)
    box: list[Any] = [ours.zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    wrapped = ours.model.state_dict()
    assert list(wrapped) == list(plain.model.state_dict()) == ["module." + name for name in ours.module.state_dict()]
    plain.model.load_state_dict(wrapped)
    plain.optimizer.load_state_dict(box[0])
    for other, saved in ((ours, None), (back, plain.model), (back, plain.module)):
        if saved is not None:
            other.model.load_state_dict(saved.state_dict())
            other.optimizer.load_state_dict(plain.optimizer.state_dict())
        for step in range(3, 6):
            for side in (plain, other):
                side.iterate(step)
        assert_equal(other.params, plain.params, f"loaded: {saved is not None}", 0.0 if world_size == 2 else 1e-5)
        assert_replicas_equal(other.params)
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.model.load_state_dict({"module.first.weight": wrapped["module.first.weight"]})


# Groups and meshes


@OPTIMIZERS
@distributed(3)
def test_a_group_of_some_ranks(world_size: int, optimizer: type[Optimizer]) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    plain, ours = (side_of(which, Batched, optimizer, LR, group) for which in (False, True))
    assert ours.zero.rank == dist.get_rank() - 1
    for name in ("process_group", "device", "device_type", "is_multi_device_module"):
        assert getattr(ours.model, name) == getattr(plain.model, name), name
    for step in range(5):
        for side in (plain, ours):
            side.iterate(step)
        assert_equal(ours.params, plain.params, f"step {step}")
        assert_equal(ours.module.buffers(), plain.module.buffers(), f"step {step}")
    norm = nn.utils.get_total_norm([param.grad for param in plain.params if param.grad is not None])
    torch.testing.assert_close(ours.sharded.grad_norm(), norm)
    ours.zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 2:
        assert_same_tree(ours.zero.state_dict(), plain.optimizer.state_dict(), "state")


def everything_of_this_rank() -> nn.Module:
    """The seeded values on rank 0, others elsewhere."""
    model = Everything()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(float(dist.get_rank()))
    return model


def everything_loss(side: Run, number: int) -> Tensor:
    words, targets, take_branch = everything_inputs(dist.get_rank(), number)
    return functional.cross_entropy(side.model(words, take_branch), targets)


@OVERLAP
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor], ids=["cut", "whole"])
@distributed(4)
def test_a_mesh_trains_like_ddp_on_all_ranks(world_size: int, optimizer: type[Optimizer], overlap: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = SGD if optimizer is torch.optim.SGD else LR
    plain = side_of(False, Everything, optimizer, options)
    ours = side_of(
        True, everything_of_this_rank, optimizer, options, mesh.get_group("shard"), mesh=mesh, overlap_forward=overlap
    )
    assert ours.zero.world_size == 2
    for step in range(8):
        for side in (plain, ours):
            side.optimizer.zero_grad()
            with side.model.no_sync():
                everything_loss(side, 40 + step).backward()
            everything_loss(side, step).backward()
            if step % 2:
                everything_loss(side, 20 + step).backward()
            side.noted.append(side.clip(0.5))
            side.optimizer.step()
        torch.testing.assert_close(ours.noted[-1], plain.noted[-1])
        assert_equal(ours.params, plain.params, f"step {step}", 1e-5)
        assert_replicas_equal(ours.params)
    ours.zero.consolidate_state_dict(to=1)
    if ours.zero.rank == 1:
        mine, theirs = ours.zero.state_dict()["state"], plain.optimizer.state_dict()["state"]
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# Ranks that launch their buckets at different times


class Branch(nn.Module):
    """Has a layer that one rank does not use. Before it, ranks may meet in the backward pass."""

    def __init__(self, meets: bool = False) -> None:
        super().__init__()
        self.sometimes = nn.Linear(8, 8, bias=False)
        self.always = nn.Linear(8, 8, bias=False)
        self.meets = meets

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.always(inputs)
        if self.meets:
            hidden.register_hook(lambda _gradient: dist.barrier())
        return hidden if dist.get_rank() == 1 else hidden + self.sometimes(hidden)


def wrapped(module: nn.Module) -> tuple[ShardedDataParallel, ZeroRedundancyOptimizer]:
    """Every parameter in a bucket of its own."""
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    return ShardedDataParallel(module, optimizer, bucket_bytes=1), optimizer


@distributed(2, 3)
def test_buckets_of_two_modules_that_take_turns_differently_are_not_mixed_up(world_size: int) -> None:
    """A bucket that one rank cannot fill is launched after the other module's there, and before them elsewhere."""
    torch.manual_seed(3)
    below, above = nn.Linear(8, 8, bias=False), Branch()
    plain = copy.deepcopy(nn.ModuleList([below, above]))
    inputs = torch.randn(4, 8)
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


@distributed(2, 3)
def test_a_rank_that_waits_inside_its_backward_pass_does_not_keep_others_from_getting_there(world_size: int) -> None:
    """It has launched fewer buckets than they have, and uses their messages only when its pass has ended."""
    with as_if_large(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BUCKET_BYTES", 1)
        model, optimizer = wrapped(nn.Sequential(nn.Linear(8, 8), Branch(meets=True)))
        for step in range(2):
            model(inputs_of(dist.get_rank(), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_replicas_equal(model.parameters())
