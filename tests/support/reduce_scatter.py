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
from torch.optim.lr_scheduler import LRScheduler, StepLR

from onecopy import ReduceScatter, ZeroRedundancyOptimizer, reduce_scatter_hook
from onecopy.comm import limits
from tests.support.data_parallel import little_room
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_inputs,
    small_loss,
    small_model,
)

ROUNDING = 1e-6
"""More than two ranks, or another collective: the order in which gradients are added differs."""

TINY = 1e-5
"""A limit for DDP's buckets, in MiB, that gives every parameter one of its own."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ELEMENT: dict[str, Any] = {"shard_by": "element"}
BUCKETS: dict[str, Any] = {"parameters_as_bucket_view": True}


# Models, optimizers, inputs


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


def double_model() -> nn.Module:
    return small_model().double()


def double_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step).double()).square().mean()
    return loss


def half_model() -> nn.Module:
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
                    param.add_(param.grad, alpha=-group["lr"])


@dataclass(frozen=True)
class Part:
    """One optimizer of a model: its class and options, what the sharded one gets on top, and its parameters."""

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
class Case:
    """How to train.

    Attributes:
        name: how the test is called.
        parts: the optimizers.
        ddp: options of DDP.
        model: makes the model.
        loss: this rank's loss in one pass.
        passes: backward passes per step; all but the last are inside ``no_sync()``.
        scheduled: whether schedulers halve the learning rates.
        set_to_none: how gradients are reset.
        tolerance: how far more than two ranks may differ from the reference.
    """

    name: str = ""
    parts: tuple[Part, ...] = (Part(),)
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": TINY})
    model: Callable[[], nn.Module] = small_model
    loss: Callable[[nn.Module, int], Tensor] = small_loss
    passes: int = 1
    scheduled: bool = False
    set_to_none: bool = True
    tolerance: float = ROUNDING


class Run:
    """A model under DDP and its optimizers."""

    def __init__(self, case: Case, ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> None:
        self.case = case
        self.ddp = ddp
        self.optimizers = optimizers
        self.schedulers: list[LRScheduler] = (
            [StepLR(optimizer, step_size=2, gamma=0.5) for optimizer in optimizers] if case.scheduled else []
        )

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


def make_ddp(case: Case, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(case.model(), **{**case.ddp, **options})


def plain_run(case: Case, **ddp_options: Any) -> Run:
    """The reference: plain DDP, the plain optimizers."""
    ddp = make_ddp(case, **ddp_options)
    return Run(case, ddp, [part.optimizer(part.params(ddp.module), **part.options) for part in case.parts])


def scattered_run(case: Case, reduce_dtype: torch.dtype | None = None, **ddp_options: Any) -> Run:
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
    return Run(case, ddp, [*zeros])


def tolerance_of(case: Case) -> float:
    return 0.0 if dist.get_world_size() <= 2 else case.tolerance


def assert_same_values(ours: Run, reference: Run, what: str) -> None:
    assert_equal(ours.params, reference.params, what, tolerance_of(ours.case))


def assert_same_state(ours: Run, reference: Run) -> None:
    """The consolidated states are the plain optimizers'."""
    for zero, plain in zip(ours.zeros, reference.optimizers, strict=True):
        zero.consolidate_state_dict(to=0)
        if zero.rank == 0:
            assert_same_tree(zero.state_dict(), plain.state_dict(), "state", tolerance_of(ours.case))


def train_both(ours: Run, reference: Run, steps: Iterable[int]) -> None:
    """Iterate both; they are equal after every iteration."""
    for step in steps:
        reference.iterate(step)
        ours.iterate(step)
        assert_same_values(ours, reference, f"iteration {step}")


def assert_parity(case: Case, iterations: int = 5) -> None:
    """Equal to plain DDP after every iteration; state and replicas are equal.

    All but the smallest stretches are sent from where they are, the longer ones in several messages, as in a model
    that is large. There is little room to receive them.
    """
    ours, reference = scattered_run(case), plain_run(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 200)
        patch.setattr(limits, "CHUNK_BYTES", 256)
        little_room(patch)
        train_both(ours, reference, range(iterations))
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


# Parity


UNUSED: dict[str, Any] = {
    "model": Branching,
    "loss": branching_loss,
    "ddp": {"find_unused_parameters": True, "bucket_cap_mb": TINY},
}
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}


def make_scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


class Split(nn.Module):
    """Two parameters whose gradients are given, one for each of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(40, 40))
        self.vector = nn.Parameter(torch.ones(3))

    def forward(self, of_matrix: float, of_vector: float) -> Tensor:
        return (self.matrix * of_matrix).sum() + (self.vector * of_vector).sum()
