"""Training with updates inside the backward pass, and beside it with plain DDP: models, cases and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.support.ddp_training import (
    BRANCHING,
    SGD,
    Counting,
    DDPCase,
    DDPRun,
    assert_same_state,
    make_ddp,
    train_both,
)
from tests.support.models import assert_replicas_equal, values

MakeHook = Callable[..., Any]
Params = Callable[[nn.Module], Iterable[Any]]

HOOKS = pytest.mark.parametrize(
    "make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved], ids=["after backward", "interleaved"]
)

COUNTING: dict[str, Any] = {"optimizer": Counting, "options": {"lr": 0.1}}
UNEVEN: dict[str, Any] = {**BRANCHING, "buckets": 1}


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *middle, last = model.parameters()
    return [{"params": [first]}, {"params": middle, "lr": 0.03}, {"params": [last], "weight_decay": 0.0}]


@dataclass(frozen=True)
class Case(DDPCase):
    """How to train with one optimizer.

    Attributes:
        optimizer: the class.
        options: what it is constructed with.
        ours: what the sharded optimizer gets on top.
        params: what the optimizer is given.
        scheduler: makes the scheduler, if there is one.
        buckets: how many buckets there are at least, once DDP has regrouped them.
    """

    optimizer: type[Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: dict(SGD))
    ours: dict[str, Any] = field(default_factory=dict)
    params: Params = nn.Module.parameters
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    buckets: int = 2


class Run(DDPRun):
    """A model, its optimizer and its scheduler, and in which iterations ``backward()`` changed parameters."""

    def __init__(self, case: Case, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
        super().__init__(case, ddp, [optimizer], [case.scheduler(optimizer)] if case.scheduler is not None else [])
        self.updated_in_backward: list[bool] = []
        self.indices: set[int] = set()
        """Of the buckets that our hook has seen."""

    @property
    def optimizer(self) -> Optimizer:
        (optimizer,) = self.optimizers
        return optimizer

    def backward(self, step: int) -> None:
        before = values(self.params)
        super().backward(step)
        self.updated_in_backward.append(
            any(not torch.equal(new, old) for new, old in zip(self.params, before, strict=True))
        )


def plain_run(case: Case, comm_hook: Any = None, state: Any = None, **ddp_options: Any) -> Run:
    """The reference: plain DDP, the plain optimizer."""
    ddp = make_ddp(case, **ddp_options)
    if comm_hook is not None:
        # DDP wants its own types where a hook has annotations, and knows some of its hooks by their names.
        ddp.register_comm_hook(state, lambda state, bucket: comm_hook(state, bucket))
    return Run(case, ddp, case.optimizer(case.params(ddp.module), **case.options))


def overlapped_run(
    case: Case, make_hook: MakeHook, comm_hook: Any = allreduce_hook, state: Any = None, **ddp_options: Any
) -> Run:
    """The same through one of our hooks; it notes how many buckets there are."""
    ddp = make_ddp(case, **ddp_options)
    optimizer = ZeroRedundancyOptimizer(
        case.params(ddp.module),
        case.optimizer,
        overlap_with_ddp=True,
        process_group=ddp.process_group,
        **case.ours,
        **case.options,
    )
    run = Run(case, ddp, optimizer)
    indices = run.indices  # and not the run: DDP keeps its hook alive, which must not keep DDP alive

    def noting_buckets(state: Any, bucket: Any) -> Any:
        indices.add(bucket.index())
        return comm_hook(state, bucket)

    ddp.register_comm_hook(state, make_hook(noting_buckets, ddp, optimizer))
    return run


def assert_parity(case: Case, ours: Run, reference: Run, iterations: int = 6) -> None:
    """Equal from the first iteration on; updates move into backward when they should; state and replicas are equal."""
    train_both(ours, reference, range(iterations))
    warm_up = 3 if case.ddp.get("static_graph") else 2
    assert ours.updated_in_backward == [step >= warm_up for step in range(iterations)]
    assert len(ours.indices) >= case.buckets
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


def reduced_mean(bucket: Any) -> Any:
    """A future of a bucket's mean over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return allreduce_hook(group, bucket)
