"""The path of accelerators, run on gloo: status flags that the host reads one step later.

``tests/accelerator`` runs training and failures on this path, on a simulated accelerator.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecopy import PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm.status_flags import DeferredFlags, DeferredRead
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.harness import distributed
from tests.support.models import small_loss, small_model


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


@distributed(2, 3)
def test_a_parameter_frozen_on_one_rank_raises_in_the_next_forward(world_size: int) -> None:
    # Status flags count as arrived as soon as they are exchanged, as if the accelerator were never behind.
    with as_on_accelerators(), mock.patch.object(DeferredRead, "has_arrived", True):
        module = small_model()
        model = ShardedDataParallel(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1))
        module[0].requires_grad_(dist.get_rank() != 0)
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
