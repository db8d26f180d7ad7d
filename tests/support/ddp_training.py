"""Training under DDP with a hook of ours, and beside it without: models, cases, runs and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from onecopy import ZeroRedundancyOptimizer
from tests.support.models import assert_equal, assert_same_tree, small_inputs, small_loss, small_model

ROUNDING = 1e-6
"""With more than two ranks, the order in which gradients are added is the process group's affair."""

TINY = 1e-5
"""A limit for DDP's buckets, in MiB, that gives every parameter one of its own."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

ELEMENT: dict[str, Any] = {"shard_by": "element"}

UNUSED: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": TINY}
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}
STATIC: dict[str, Any] = {"static_graph": True, "bucket_cap_mb": TINY}


# Models, losses, optimizers


class Branching(nn.Module):
    """A branch that is never used, one that is used at will, and a layer that can be frozen without a loss of path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 160)
        self.middle = nn.Linear(160, 16)
        self.sometimes = nn.Linear(160, 4)
        self.never = nn.Linear(8, 4)
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, take_branch: bool) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        outputs: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return outputs + self.sometimes(hidden) if take_branch else outputs


def branching_loss(model: nn.Module, step: int) -> Tensor:
    """Rank 0 alone takes the branch, in every other step."""
    rank = dist.get_rank()
    loss: Tensor = model(small_inputs(rank, step), rank == 0 and step % 2 == 0).square().mean()
    return loss


BRANCHING: dict[str, Any] = {"model": Branching, "loss": branching_loss, "ddp": UNUSED}
"""A case in which parameters are unused, some on one rank only."""


def half_model() -> nn.Sequential:
    return small_model().to(torch.bfloat16)


def half_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step).bfloat16()).square().mean()
    return loss


class Counting(Optimizer):
    """Gradient descent that counts: updates of a parameter in its state, its own steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["updates"] = self.state[param].get("updates", 0) + 1
                    param.add_(param.grad, alpha=-group["lr"] / group["steps"])


def halving(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.5)


# One description of a training run, and one runner


@dataclass(frozen=True)
class DDPCase:
    """How to train under DDP.

    Attributes:
        name: how the test is called.
        ddp: options of DDP.
        model: makes the model.
        loss: this rank's loss in one pass.
        passes: backward passes per step; all but the last are inside ``no_sync()``.
        set_to_none: how gradients are reset.
        tolerance: how far more than two ranks may differ from the reference.
    """

    name: str = ""
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": TINY}, kw_only=True)
    model: Callable[[], nn.Module] = field(default=small_model, kw_only=True)
    loss: Callable[[nn.Module, int], Tensor] = field(default=small_loss, kw_only=True)
    passes: int = field(default=1, kw_only=True)
    set_to_none: bool = field(default=True, kw_only=True)
    tolerance: float = field(default=ROUNDING, kw_only=True)


class DDPRun:
    """A model under DDP with its optimizers and their schedulers."""

    def __init__(
        self,
        case: DDPCase,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler] = (),
    ) -> None:
        self.case = case
        self.ddp = ddp
        self.optimizers = optimizers
        self.schedulers = schedulers

    @property
    def params(self) -> list[Tensor]:
        return list(self.ddp.parameters())

    @property
    def zeros(self) -> list[ZeroRedundancyOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        (zero,) = self.zeros
        return zero

    def backward(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(self.case.set_to_none)
        *accumulated, last = range(step * self.case.passes, (step + 1) * self.case.passes)
        with self.ddp.no_sync():
            for number in accumulated:
                self.case.loss(self.ddp, number).backward()
        self.case.loss(self.ddp, last).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def iterate(self, step: int) -> None:
        self.backward(step)
        self.update()


def make_ddp(case: DDPCase, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(case.model(), **{**case.ddp, **options})


def tolerance_of(case: DDPCase) -> float:
    return 0.0 if dist.get_world_size() <= 2 else case.tolerance


def assert_same_values(ours: DDPRun, reference: DDPRun, what: str) -> None:
    assert_equal(ours.params, reference.params, what, tolerance_of(ours.case))


def assert_same_state(ours: DDPRun, reference: DDPRun, to: int = 0) -> None:
    """The consolidated states on one rank are the plain optimizers'."""
    for zero, plain in zip(ours.zeros, reference.optimizers, strict=True):
        zero.consolidate_state_dict(to=to)
        if zero.rank == to:
            assert_same_tree(zero.state_dict(), plain.state_dict(), "state", tolerance_of(ours.case))


def train_both(ours: DDPRun, reference: DDPRun, steps: Iterable[int]) -> None:
    """Iterate both; they are equal after every iteration."""
    for step in steps:
        reference.iterate(step)
        ours.iterate(step)
        assert_same_values(ours, reference, f"iteration {step}")
