"""DDP with the sharded optimizer trains exactly like DDP with the plain one, for every optimizer of the table."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy import ZeroRedundancyOptimizer
from onecopy.step.optimizer_classes import ELEMENTWISE
from tests.support.harness import EVERYTHING, distributed
from tests.support.parity import CASES, STEPS, Case, compare, make_plain, train


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(2)
def test_training_equals_ddp_with_the_plain_optimizer(world_size: int, case: Case) -> None:
    assert_parity(world_size, case)


@pytest.mark.parametrize("case", CASES if EVERYTHING else CASES[::2], ids=lambda case: case.name)
@distributed(3, 4)
def test_training_with_more_ranks_equals_ddp_within_rounding(world_size: int, case: Case) -> None:
    assert_parity(world_size, case)


def make_sharded(
    wanted: dict[str, Any], params: list[Tensor], optimizer: type[Optimizer], options: dict[str, Any]
) -> Optimizer:
    return ZeroRedundancyOptimizer(params, optimizer, **wanted, **options)


def assert_parity(world_size: int, case: Case) -> None:
    """Bit by bit with two ranks, within rounding with more, where every policy is run once."""
    plain = train(case, make_plain)
    assert not torch.equal(plain.steps[0][0], plain.steps[-1][0]), "the reference does not train"
    assert torch.equal(plain.steps[STEPS // 2][5], plain.steps[-1][5]) or case.schedule_free
    for number, policy in enumerate(case.policies):
        for bucket_view in (False, True) if world_size == 2 else ((number + world_size) % 2 == 0,):
            wanted = {"shard_by": policy, "parameters_as_bucket_view": bucket_view, "elementwise": case.elementwise}
            ours = train(case, functools.partial(make_sharded, wanted))
            what = f"{case.name}, {world_size} ranks, shard_by={policy!r}, parameters_as_bucket_view={bucket_view}"
            first: Any = ours.optimizers[0]
            assert bool(first.layout.cut_params) == (case.cuts and policy == "element"), what
            compare(ours, plain, what, 0.0 if world_size == 2 else case.tolerance)


def test_the_table_covers_every_class_known_to_be_elementwise() -> None:
    assert {case.optimizer for case in CASES} >= ELEMENTWISE
