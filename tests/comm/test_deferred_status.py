"""The path of accelerators, run on gloo: standard collectives, and status flags that the host reads one step later."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecopy import PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm.status_flags import DeferredFlags, DeferredRead
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.data_parallel import ROUNDING, train
from tests.support.harness import EVERYTHING, distributed
from tests.support.models import assert_replicas_equal, small_loss, small_model
from tests.support.parity import IN_ANY_ORDER, Case, Run, compare


def arriving_at_once() -> Any:
    """Status flags count as arrived as soon as they are exchanged, as if the accelerator were never behind."""
    return mock.patch.object(DeferredRead, "has_arrived", True)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("case", IN_ANY_ORDER if EVERYTHING else IN_ANY_ORDER[::3], ids=lambda case: case.name)
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
def test_different_options_are_told_one_step_later(world_size: int) -> None:
    with as_on_accelerators():
        model, zero = sharded()
        zero.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        small_loss(model, 0).backward()
        zero.step()
        small_loss(model, 1).backward()
        with pytest.raises(RanksDisagreeError, match=r"disagree in the previous step\(\): .* have different options"):
            zero.step()


@distributed(2, 3)
def test_a_bucket_without_elements(world_size: int) -> None:
    with as_on_accelerators():
        module = nn.Linear(4, 4)
        module.register_parameter("nothing", nn.Parameter(torch.zeros(0, dtype=torch.float64)))  # in its own bucket
        module.register_forward_hook(lambda layer, _, outputs: outputs.sum() + layer.nothing.sum())
        before = module.bias.detach().clone()
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        ShardedDataParallel(module, zero)(torch.ones(2, 4)).backward()
        zero.step()
        torch.testing.assert_close(module.bias.detach(), before - 0.2)


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


@distributed(2, 3)
def test_a_failed_backward_raises_at_once_there_and_in_the_next_forward_elsewhere(world_size: int) -> None:
    with as_on_accelerators(), arriving_at_once():
        module = nn.Sequential(nn.Embedding(8, 4, sparse=dist.get_rank() == 0), nn.Linear(4, 4))
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, zero, bucket_bytes=64)
        words = torch.arange(8)
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="sparse gradient"):
                model(words).sum().backward()
        else:
            model(words).sum().backward()
            with pytest.raises(PeerFailedError, match=r"previous backward\(\) failed on global rank 0"):
                model(words)


@distributed(2, 3)
def test_a_parameter_frozen_on_one_rank_raises_in_the_next_forward(world_size: int) -> None:
    with as_on_accelerators(), arriving_at_once():
        model, _ = sharded()
        next(model.module.parameters()).requires_grad_(dist.get_rank() != 0)
        small_loss(model, 0).backward()
        with pytest.raises(RanksDisagreeError, match="is frozen on some ranks"):
            small_loss(model, 0)


def failing_check(_flags: Tensor) -> None:
    raise PeerFailedError("that one")


def test_flags_are_checked_in_order_and_forgotten_behind_a_failure() -> None:
    """A rank that has failed takes part in no later exchange: its later flags would never arrive."""
    flags, checked = DeferredFlags(), list[int]()
    never = mock.Mock(wait=mock.Mock(side_effect=AssertionError("waited for flags that never arrive")))
    numbers = [flags.put(torch.tensor([each]), None, lambda flag: checked.append(int(flag))) for each in range(2)]
    flags.check_through(numbers[0])
    assert checked == [0]
    flags.put(torch.tensor([2]), None, failing_check)
    last = flags.put(torch.tensor([3]), never, failing_check)
    with pytest.raises(PeerFailedError, match="that one"):
        flags.check_through(last)
    assert checked == [0, 1]
    flags.check_through(last)
    flags.check_all()
