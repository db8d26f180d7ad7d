"""``ShardedDataParallel`` trains like DDP with the plain optimizer, for every optimizer of the table."""

from __future__ import annotations

import pytest
import torch

from onecopy import ZeroRedundancyOptimizer
from tests.support.data_parallel import as_if_large, in_rank_order, train
from tests.support.harness import EVERYTHING, distributed
from tests.support.parity import CASES, Case, Run, compare

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "not overlapped"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@OVERLAP
@distributed(2)
def test_training_equals_ddp_with_the_plain_optimizer(world_size: int, case: Case, overlap: bool) -> None:
    compare_runs(case, overlap, in_order=False)


@pytest.mark.parametrize("case", CASES if EVERYTHING else CASES[::4], ids=lambda case: case.name)
@OVERLAP
@distributed(3, 4)
def test_training_with_more_ranks_equals_ddp_that_adds_in_the_same_order(
    world_size: int, case: Case, overlap: bool
) -> None:
    compare_runs(case, overlap, in_order=True)


def compare_runs(case: Case, overlap: bool, in_order: bool) -> None:
    """10 steps (or 50), bit by bit."""
    steps = 50 if EVERYTHING else 10
    plain = train(case, steps, ours=False, hook=in_rank_order if in_order else None)
    assert not torch.equal(plain.steps[0][0], plain.steps[-1][0]), "the reference does not train"
    with as_if_large():
        ours = train(case, steps, ours=True, overlap=overlap)
    first = ours.optimizers[0]
    assert isinstance(first, ZeroRedundancyOptimizer)
    assert bool(first.layout.cut_params) == case.cuts, f"cut parameters are {first.layout.cut_params}"
    if overlap:
        plain = Run(plain.steps[-1:], plain.evaluation, plain.optimizers)
    compare(ours, plain, f"{case.name}, overlap_forward={overlap}", tolerance=0.0)
