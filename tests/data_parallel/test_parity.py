"""``ShardedDataParallel`` trains like DDP with the plain optimizer, for every optimizer of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.data_parallel import SMALL, Model, as_if_large
from tests.support.harness import EVERYTHING, distributed
from tests.support.models import Everything, values
from tests.support.parity import CASES, Case, Run, compare, make_plain, parts_of, train_steps

Hook = Callable[[Any, Any], Future[Tensor]]
OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "not overlapped"])


def train(case: Case, steps: int, ours: bool, overlap: bool = False, hook: Hook | None = None) -> Run:
    """Train the model that has everything, from the same weights and on the same data every time."""
    torch.manual_seed(11)
    module = Everything()
    params: list[Tensor] = list(module.parameters())
    model: Model
    optimizers: list[Optimizer] = []
    parts = parts_of(case, params)
    if ours:
        zeros = [
            ZeroRedundancyOptimizer(part, optimizer, elementwise=case.elementwise, **options)
            for part, optimizer, options in parts
        ]
        model = ShardedDataParallel(module, zeros, bucket_bytes=SMALL, overlap_forward=overlap)
        optimizers += zeros
    else:
        model = DistributedDataParallel(module, find_unused_parameters=True)
        if hook is not None:
            # A lambda, because DDP compares annotations, which are strings here.
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        optimizers += [make_plain(*part) for part in parts]
    history = []
    for step in train_steps(case, model, optimizers, steps):
        if step % 2:
            model.zero_grad()
        else:
            for param in params:
                param.grad = None
        if not overlap:
            history.append(values(params))
        elif step == steps - 1:
            history.append(values(model.parameters()))
    return Run(history, values(model.parameters()), optimizers)


def in_rank_order(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A hook for DDP that scales gradients first, as DDP does, and adds them up in the order of ranks."""
    mine = bucket.buffer() * (1.0 / dist.get_world_size())
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    for row in rows[1:]:
        rows[0].add_(row)
    done: Future[Tensor] = Future()
    done.set_result(rows[0])
    return done


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
