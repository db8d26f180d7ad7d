"""``ShardedDataParallel`` trains like DDP with the plain optimizer, for every optimizer of the table."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.optim import Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.data_parallel import Side, as_if_large, in_rank_order, train
from tests.support.harness import EVERYTHING, distributed
from tests.support.models import Everything, assert_equal, everything_inputs
from tests.support.parity import CASES, IN_ANY_ORDER, Case, Run, compare

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "not overlapped"])


@EVERY_CASE
@OVERLAP
@distributed(2)
def test_training_equals_ddp_with_the_plain_optimizer(world_size: int, case: Case, overlap: bool) -> None:
    """20 steps (or 50) with two ranks, bit by bit."""
    compare_runs(case, 50 if EVERYTHING else 20, overlap, in_order=False, tolerance=0.0)


@pytest.mark.parametrize("case", CASES if EVERYTHING else CASES[::4], ids=lambda case: case.name)
@OVERLAP
@distributed(3, 4)
def test_training_with_more_ranks_equals_ddp_that_adds_in_the_same_order(
    world_size: int, case: Case, overlap: bool
) -> None:
    """10 steps (or 50), bit by bit."""
    compare_runs(case, 50 if EVERYTHING else 10, overlap, in_order=True, tolerance=0.0)


@pytest.mark.parametrize("case", IN_ANY_ORDER if EVERYTHING else IN_ANY_ORDER[::5], ids=lambda case: case.name)
@distributed(4)
def test_training_with_four_ranks_equals_ddp_within_rounding(world_size: int, case: Case) -> None:
    """10 steps, against DDP that adds up gradients in its own order."""
    compare_runs(case, 10, overlap=True, in_order=False, tolerance=case.tolerance)


def compare_runs(case: Case, steps: int, overlap: bool, in_order: bool, tolerance: float) -> None:
    plain = train(case, steps, ours=False, hook=in_rank_order if in_order else None)
    assert not torch.equal(plain.steps[0][0], plain.steps[-1][0]), "the reference does not train"
    with as_if_large():
        ours = train(case, steps, ours=True, overlap=overlap)
    first = ours.optimizers[0]
    assert isinstance(first, ZeroRedundancyOptimizer)
    assert bool(first.layout.cut_params) == case.cuts, f"cut parameters are {first.layout.cut_params}"
    if overlap:
        plain = Run(plain.steps[-1:], plain.evaluation, plain.optimizers)
    compare(ours, plain, f"{case.name}, overlap_forward={overlap}", tolerance)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2)
def test_gradients_are_let_go_alike(world_size: int, optimizer: type[Optimizer], set_to_none: bool) -> None:
    """Zeros left behind are stepped on (momentum, decay), None is not; the branch is taken in every other step."""
    plain, ours = (Side(which, Everything, optimizer, {"lr": 1e-2, "weight_decay": 0.1}) for which in (False, True))
    for step in range(8):
        for side in (plain, ours):
            for who in (side.optimizer, side.model, side.module):
                who.zero_grad(set_to_none)
            words, targets, take_branch = everything_inputs(dist.get_rank(), step)
            functional.cross_entropy(side.model(words, take_branch), targets).backward()
            side.optimizer.step()
        assert_equal(ours.params, plain.params, f"step {step}")
    have = [[param.grad is not None for param in side.params] for side in (plain, ours)]
    assert have[0] == have[1]
    assert have[0].count(False) == (4 if set_to_none else 2), "the branch, and what is never used"
