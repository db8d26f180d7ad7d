"""The vote of the ranks: what its row tells, ranks in different calls, and flags that the host reads one step later.

``tests/accelerator`` runs training and failures with such flags, on a simulated accelerator.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onecopy import PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm.agreement import Vote, check_vote, vote_at_once, vote_row
from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import DeferredRead
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.failures import expect, failure_of
from tests.support.harness import distributed
from tests.support.models import small_loss, small_model


def vote(call: str = "here()", failed: bool = False, digest: int = 1, number: int = 0, later: bool = False) -> Vote:
    """One vote of all ranks."""
    collectives = Collectives()
    row = vote_row(collectives, call, failed, [digest], at_once=not later, number=number)
    return vote_at_once(collectives, row, call)


@pytest.mark.parametrize("accelerated", [False, True], ids=["pairwise", "all-reduce"])
@distributed(1, 2, 3)
def test_all_ranks_read_the_same(world_size: int, accelerated: bool) -> None:
    rank, last = dist.get_rank(), world_size - 1
    with as_on_accelerators() if accelerated else pytest.MonkeyPatch.context():
        found = vote(number=rank + 7)
        assert (found.failed_rank, found.different(1), found.number) == (None, None, last + 7)
        assert vote(failed=rank == last).failed_rank == last
        assert vote(digest=2 if rank == last else 1).different(1) == ((0, last) if last else None)


@pytest.mark.parametrize("accelerated", [False, True], ids=["pairwise", "all-reduce"])
@distributed(2, 3)
def test_ranks_in_different_calls_are_all_told(world_size: int, accelerated: bool) -> None:
    call = "first()" if dist.get_rank() == 0 else "second()"
    with as_on_accelerators() if accelerated else pytest.MonkeyPatch.context():
        error = failure_of(lambda: check_vote(vote(call), Collectives(), call))
        expect(error, RanksDisagreeError, r"different calls\. rank 0: first\(\); rank 1: second\(\)[;.]")
        # A rank that reads its row later takes part in no exchange of names.
        error = failure_of(lambda: check_vote(vote(call, later=call == "first()"), Collectives(), call))
        expect(error, RanksDisagreeError, r"lobal ranks \d and \d differ; this rank: (first|second)\(\)")
        check_vote(vote(), Collectives(), "here()")


@distributed(2)
def test_a_row_that_is_read_later_tells_what_was_wrong(world_size: int) -> None:
    collectives, rank = Collectives(), dist.get_rank()
    with pytest.raises(PeerFailedError, match=r"the previous step\(\) failed on global rank 1; see its error"):
        check_vote(vote(failed=rank == 1, later=True), collectives, "step()")
    with pytest.raises(RanksDisagreeError, match="the previous update: global ranks 0 and 1 have different lengths"):
        check_vote(vote(digest=1 + rank, later=True), collectives, "the update", values=["lengths"])
    check_vote(vote(later=True), collectives, "step()", values=["lengths"])


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
