"""Training with the reduce-scatter hook, and beside it with plain DDP: models, cases and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import ReduceScatter, ZeroRedundancyOptimizer, reduce_scatter_hook
from onecopy.comm import limits
from tests.support.ddp_training import (
    ADAMW,
    ELEMENT,
    DDPCase,
    DDPRun,
    assert_same_state,
    halving,
    make_ddp,
    train_both,
)
from tests.support.models import assert_replicas_equal, small_inputs, small_model

BUCKETS: dict[str, Any] = {"parameters_as_bucket_view": True}


def double_model() -> nn.Module:
    return small_model().double()


def double_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step).double()).square().mean()
    return loss


class Split(nn.Module):
    """Two parameters whose gradients are given, one for each of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(40, 40))
        self.vector = nn.Parameter(torch.ones(3))

    def forward(self, of_matrix: float, of_vector: float) -> Tensor:
        return (self.matrix * of_matrix).sum() + (self.vector * of_vector).sum()


def make_scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


@dataclass(frozen=True)
class Part:
    """One optimizer of a model: its class and options, further options of the sharded one, and its parameters."""

    optimizer: type[Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    ours: dict[str, Any] = field(default_factory=lambda: dict(ELEMENT))
    params: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters


def matrices(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dim() == 2]


def vectors(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dim() < 2]


MUON_AND_ADAMW = (
    Part(torch.optim.Muon, {"lr": 1e-2}, {}, matrices),
    Part(torch.optim.AdamW, ADAMW, ELEMENT, vectors),
)

TWO_ADAMWS = (Part(params=matrices), Part(params=vectors, options={"lr": 1e-3}))


@dataclass(frozen=True)
class Case(DDPCase):
    """How to train with one or several optimizers.

    Attributes:
        parts: the optimizers.
        scheduled: whether schedulers halve the learning rates.
    """

    parts: tuple[Part, ...] = (Part(),)
    scheduled: bool = False


def run_of(case: Case, ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> DDPRun:
    return DDPRun(case, ddp, optimizers, [*map(halving, optimizers)] if case.scheduled else [])


def plain_run(case: Case, **ddp_options: Any) -> DDPRun:
    """The reference: plain DDP, the plain optimizers."""
    ddp = make_ddp(case, **ddp_options)
    return run_of(case, ddp, [part.optimizer(part.params(ddp.module), **part.options) for part in case.parts])


def scattered_run(case: Case, reduce_dtype: torch.dtype | None = None, **ddp_options: Any) -> DDPRun:
    """The same through the hook: with one optimizer, a list of them, or a :class:`ReduceScatter` as its state."""
    ddp = make_ddp(case, **ddp_options)
    zeros = [
        ZeroRedundancyOptimizer(
            part.params(ddp.module), part.optimizer, process_group=ddp.process_group, **part.ours, **part.options
        )
        for part in case.parts
    ]
    state: Any = zeros[0] if len(zeros) == 1 else zeros
    if reduce_dtype is not None or "process_group" in ddp_options:
        state = ReduceScatter(state, reduce_dtype=reduce_dtype, ddp=ddp)
    ddp.register_comm_hook(state, reduce_scatter_hook)
    return run_of(case, ddp, [*zeros])


def assert_parity(case: Case, iterations: int = 5) -> None:
    """Equal to plain DDP after every iteration; state and replicas are equal.

    All but the smallest stretches are sent from where they are, the longer ones in several messages, as in a model
    that is large. There is little room to receive them.
    """
    ours, reference = scattered_run(case), plain_run(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 200)
        patch.setattr(limits, "CHUNK_BYTES", 256)
        patch.setattr("onecopy.comm.limits.REDUCE_MESSAGE_BYTES", 256)
        train_both(ours, reference, range(iterations))
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)
