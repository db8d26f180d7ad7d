"""``ShardedDataParallel`` with state dicts, groups, meshes, several modules and buffers, against DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.optim import Optimizer

from onecopy.comm import limits
from tests.support.data_parallel import SGD, Batched, Layers, Run, as_if_large, inputs_of, side_of
from tests.support.harness import distributed
from tests.support.models import Everything, assert_equal, assert_replicas_equal, assert_same_tree, everything_inputs

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
OPTIMIZERS = pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor], ids=["cut", "whole"])
LR: dict[str, Any] = {"lr": 1e-2}


# Groups and meshes


@OPTIMIZERS
@distributed(3)
def test_a_group_of_some_ranks(world_size: int, optimizer: type[Optimizer]) -> None:
    """Also its state dicts, to the plain optimizer's form and back."""
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
    assert list(ours.model.state_dict()) == list(plain.model.state_dict())
    for saved in (plain.model, plain.module):  # with DDP's prefix and without it
        plain.iterate(5)
        ours.model.load_state_dict(saved.state_dict())
        ours.optimizer.load_state_dict(plain.optimizer.state_dict())
        for side in (plain, ours):
            side.iterate(6)
        assert_equal(ours.params, plain.params, "loaded")
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.model.load_state_dict({"module.first.weight": ours.params[0].detach()})


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
        self.never = nn.Identity()
        self.meets = meets

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.always(inputs)
        if self.meets:
            hidden.register_hook(lambda _gradient: dist.barrier())
        return hidden if dist.get_rank() == 1 else hidden + self.sometimes(hidden)


@distributed(2, 3)
def test_buckets_of_two_modules_that_take_turns_differently_are_not_mixed_up(world_size: int) -> None:
    """A bucket that one rank cannot fill is launched after the other module's there, and before them elsewhere."""
    plain, ours = ([side_of(which, make, bucket_bytes=1) for make in (Layers, Branch)] for which in (False, True))
    for below, above in (plain, ours):
        for run in (below, above):
            run.optimizer.zero_grad()
        above.model(below.model(inputs_of(dist.get_rank(), 0))).square().sum().backward()
        for run in (below, above):
            run.update()
    for mine, theirs in zip(ours, plain, strict=True):
        assert_equal(mine.params, theirs.params, "one step", 1e-5)


@distributed(2, 3)
def test_a_rank_that_waits_inside_its_backward_pass_does_not_keep_others_from_getting_there(world_size: int) -> None:
    """It has launched fewer buckets than they have, and uses their messages only when its pass has ended."""
    with as_if_large(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BUCKET_BYTES", 1)
        ours = side_of(True, lambda: nn.Sequential(nn.Linear(8, 8), Branch(meets=True)), bucket_bytes=1)
        for step in range(2):
            ours.iterate(step)
    assert_replicas_equal(ours.params)


# Buffers


def accumulate(side: Run, number: int) -> None:
    with side.model.no_sync():
        side.loss(number).backward()


def train_in_evaluation_mode(side: Run, number: int) -> None:
    """With the averages of earlier batches, so that gradients depend on buffers."""
    side.model.eval()
    side.iterate(number)
    side.model.train()


@torch.no_grad()
def evaluate(side: Run, number: int) -> None:
    side.model.eval()
    side.noted.append(side.loss(number))
    side.model.train()


@torch.no_grad()
def forward_without_gradients(side: Run, number: int) -> None:
    """In training mode, so that buffers change."""
    side.noted.append(side.loss(number))


def wrong_inputs(side: Run, number: int) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        side.model(torch.ones(2, 3))


PASSES = (Run.iterate, accumulate, train_in_evaluation_mode, evaluate, forward_without_gradients, wrong_inputs)


@pytest.mark.parametrize("second", PASSES, ids=lambda kind: kind.__name__)
@distributed(2)
def test_buffers_are_those_of_ddp_after_every_pass(world_size: int, second: Callable[[Run, int], None]) -> None:
    """DDP sends them before a pass if the pass before it had gradients that are reduced."""
    plain, ours = side_of(False, Batched), side_of(True, Batched)
    number = 0
    for first in PASSES:
        for kind in (Run.iterate, first, second, Run.iterate):
            number += 1
            for side in (plain, ours):
                kind(side, number)
            text = f"{first.__name__}, {second.__name__}: after {kind.__name__}"
            assert_equal(ours.module.buffers(), plain.module.buffers(), text)
        assert_equal(ours.params, plain.params, f"{first.__name__}, {second.__name__}")
    assert_equal(ours.noted, plain.noted, "outputs")


class Counting(Layers):
    """Puts a new tensor in the place of its buffer in every forward pass."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + 1 + dist.get_rank()
        return super().forward(inputs)


@pytest.mark.parametrize("broadcast", [True, False])
@distributed(2, 3)
def test_a_buffer_that_the_module_replaces_follows_if_wished(world_size: int, broadcast: bool) -> None:
    side = side_of(True, Counting, broadcast_buffers=broadcast)
    for step in range(3):
        side.iterate(step)
        expected = step + 1 + dist.get_rank() if broadcast else (step + 1) * (1 + dist.get_rank())
        assert side.module.get_buffer("seen").item() == expected, "rank 0 adds one each time"


@distributed(2, 3)
def test_buffers_of_every_kind_begin_as_those_of_the_first_rank(world_size: int) -> None:
    def make(first: bool) -> Layers:
        module = Layers()
        scale = 1.0 if first else 7.0
        module.register_buffer("rows", torch.arange(12.0).view(3, 4).t() * scale)
        module.register_buffer("some", torch.arange(12.0).view(3, 4)[:, ::2] * scale)
        module.register_buffer("part", (torch.arange(24.0) * scale).view(3, 8)[:, ::2])
        module.register_buffer("flags", torch.tensor([first, True]))
        module.register_buffer("count", torch.tensor(3 if first else 4))
        module.register_buffer("nothing", torch.zeros(0))
        return module

    module, expected = side_of(True, lambda: make(dist.get_rank() == 0)).module, make(True)
    for found, wanted in zip(module.buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
