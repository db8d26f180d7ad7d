"""The path of accelerators, run on gloo: standard collectives, and status flags that the host reads one step later."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecopy import PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm.status_flags import DeferredRead
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.data_parallel import ROUNDING, train
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal, small_ddp, small_loss, small_model
from tests.support.parity import IN_ANY_ORDER, Case, Run, compare


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("case", IN_ANY_ORDER, ids=lambda case: case.name)
@distributed(2, 3)
def test_sharded_training_equals_ddp(world_size: int, case: Case, overlap: bool) -> None:
    """One rank alone takes a branch, and the others learn of its gradients from the status flags."""
    plain = train(case, 8, ours=False)
    with as_on_accelerators():
        ours = train(case, 8, ours=True, overlap=overlap)
    if overlap:
        plain = Run(plain.steps[-1:], plain.evaluation, plain.optimizers)
    compare(ours, plain, case.name, max(case.tolerance, ROUNDING))


def sharded(**options: Any) -> tuple[ShardedDataParallel, ZeroRedundancyOptimizer]:
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), options.pop("optimizer", torch.optim.SGD), lr=0.1, **options)
    return ShardedDataParallel(model, zero, bucket_bytes=64), zero


@distributed(2)
def test_the_host_reads_nothing_where_every_parameter_has_a_gradient(world_size: int) -> None:
    """Until the next step: by then the accelerator has long finished the exchange of the flags."""
    with as_on_accelerators():
        model, zero = sharded()
        small_loss(model, 0).backward()
        zero.step()
        small_loss(model, 1).backward()
        with mock.patch.object(DeferredRead, "read", side_effect=AssertionError("the host waited")):
            model, zero = sharded()
            small_loss(model, 0).backward()
            zero.clip_grad_norm_(1.0)
            zero.step()


@distributed(2, 3)
def test_the_drop_in_optimizer_defers_its_reads_too(world_size: int) -> None:
    plain, ours = small_ddp(), small_ddp()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with as_on_accelerators():
        zero = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, lr=0.01)
        for step in range(5):
            for model, optimizer in ((plain, reference), (ours, zero)):
                optimizer.zero_grad()
                small_loss(model, step).backward()
                optimizer.step()
            assert_equal(ours.parameters(), plain.parameters(), f"step {step}")


@distributed(2)
def test_different_options_are_told_one_step_later(world_size: int) -> None:
    with as_on_accelerators():
        model, zero = sharded()
        zero.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        small_loss(model, 0).backward()
        zero.step()
        small_loss(model, 1).backward()
        with pytest.raises(RanksDisagreeError, match=r"in the previous step\(\) ranks"):
            zero.step()


class FailsOnRankZero(torch.optim.SGD):
    """An optimizer whose update raises on one rank."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 0:
            raise LookupError("no update today")
        return super().step(closure)


@distributed(2, 3)
def test_a_failed_update_raises_at_once_there_and_in_the_next_step_elsewhere(world_size: int) -> None:
    with as_on_accelerators():
        model, zero = sharded(optimizer=FailsOnRankZero)
        small_loss(model, 0).backward()
        if dist.get_rank() == 0:
            with pytest.raises(LookupError, match="no update today"):
                zero.step()
        else:
            zero.step()
        assert_replicas_equal(model.parameters())
        small_loss(model, 1).backward()
        if dist.get_rank() != 0:
            with pytest.raises(PeerFailedError, match=r"the previous step\(\) failed"):
                zero.step()
    dist.barrier()


class Sparse(nn.Module):
    """Has a sparse gradient on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=dist.get_rank() == 0)
        self.more = nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.more(self.words(words)).sum()
        return out


@distributed(2, 3)
def test_a_failed_backward_raises_at_once_there_and_in_the_next_one_elsewhere(world_size: int) -> None:
    with as_on_accelerators():
        module = Sparse()
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, zero, bucket_bytes=64)
        words = torch.arange(8)
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="sparse gradient"):
                model(words).backward()
            module.words.sparse = False
        else:
            model(words).backward()
        module.zero_grad()
        if dist.get_rank() != 0:
            with pytest.raises(PeerFailedError, match=r"the previous backward\(\) failed on another rank"):
                model(words).backward()
        else:
            model(words).backward()


@distributed(2, 3)
def test_a_parameter_frozen_on_one_rank_raises_at_once_there_and_in_the_next_pass_elsewhere(world_size: int) -> None:
    with as_on_accelerators():
        model, _ = sharded()
        weight = next(model.module.parameters())
        weight.requires_grad_(dist.get_rank() != 0)
        if dist.get_rank() == 0:
            with pytest.raises(RanksDisagreeError, match="is frozen on some ranks"):
                small_loss(model, 0).backward()
            weight.requires_grad_(True)
        else:
            small_loss(model, 0).backward()
        model.zero_grad()
        if dist.get_rank() != 0:
            with pytest.raises(RanksDisagreeError, match="is frozen on some ranks"):
                small_loss(model, 0).backward()
        else:
            small_loss(model, 0).backward()
