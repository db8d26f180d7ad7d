"""Training with updates inside the backward pass, and beside it with plain DDP: models, cases and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_inputs,
    small_loss,
    small_model,
    values,
)

ROUNDING = 1e-6
"""More than two ranks: the order in which gradients are added is the process group's affair."""

TINY = 1e-5
"""A limit for DDP's buckets, in MiB, that gives every parameter one of its own."""

SMALL = 0.002
"""A limit that gives a weight and a bias a bucket."""

SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

MakeHook = Callable[..., Any]
Params = Callable[[nn.Module], Iterable[Any]]

HOOKS = pytest.mark.parametrize(
    "make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved], ids=["after backward", "interleaved"]
)


# Models and optimizers


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


class TwoTypes(nn.Module):
    """Half of it in single, half in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(8, 160)
        self.double_ = nn.Linear(160, 4).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.double_(torch.tanh(self.single(inputs)).double())
        return outputs


def matrices() -> nn.Sequential:
    """Nothing but matrices, for Muon."""
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))


def half_model() -> nn.Sequential:
    return small_model().to(torch.bfloat16)


def half_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step).bfloat16()).square().mean()
    return loss


def branching_loss(model: nn.Module, step: int) -> Tensor:
    """Rank 0 alone takes the branch, in every other step."""
    rank = dist.get_rank()
    loss: Tensor = model(small_inputs(rank, step), rank == 0 and step % 2 == 0).square().mean()
    return loss


def never_branching_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step), False).square().mean()
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


def all_params(model: nn.Module) -> Iterable[Any]:
    return model.parameters()


def three_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *middle, last = model.parameters()
    return [{"params": [first]}, {"params": middle, "lr": 0.03}, {"params": [last], "weight_decay": 0.0}]


def halving(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.5)


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


@dataclass(frozen=True)
class Case:
    """How to train.

    Attributes:
        name: how the test is called.
        optimizer: the class.
        options: what it is constructed with.
        ddp: options of DDP.
        ours: what the sharded optimizer gets on top.
        model: makes the model.
        loss: this rank's loss in one pass.
        params: what the optimizer is given.
        scheduler: makes the scheduler, if there is one.
        passes: backward passes per step; all but the last are inside ``no_sync()``.
        set_to_none: how gradients are reset.
        tolerance: how far more than two ranks may differ from the reference.
        buckets: how many buckets there are at least, once DDP has regrouped them.
    """

    name: str = ""
    optimizer: type[Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: dict(SGD))
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": TINY})
    ours: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = small_model
    loss: Callable[[nn.Module, int], Tensor] = small_loss
    params: Params = all_params
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    passes: int = 1
    set_to_none: bool = True
    tolerance: float = ROUNDING
    buckets: int = 2


class Run:
    """A model, its optimizer and its scheduler, and in which iterations ``backward()`` changed parameters."""

    def __init__(self, case: Case, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
        self.case = case
        self.ddp = ddp
        self.optimizer = optimizer
        self.scheduler = case.scheduler(optimizer) if case.scheduler is not None else None
        self.updated_in_backward: list[bool] = []
        self.indices: set[int] = set()
        """Of the buckets that our hook has seen."""

    @property
    def params(self) -> list[Tensor]:
        return list(self.ddp.parameters())

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad(self.case.set_to_none)
        before = values(self.params)
        *accumulated, last = range(step * self.case.passes, (step + 1) * self.case.passes)
        with self.ddp.no_sync():
            for number in accumulated:
                self.case.loss(self.ddp, number).backward()
        self.case.loss(self.ddp, last).backward()
        self.updated_in_backward.append(
            any(not torch.equal(new, old) for new, old in zip(self.params, before, strict=True))
        )

    def iterate(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def make_ddp(case: Case, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(case.model(), **{**case.ddp, **options})


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


def tolerance_of(case: Case) -> float:
    return 0.0 if dist.get_world_size() == 2 else case.tolerance


def zero_of(run: Run) -> ZeroRedundancyOptimizer:
    assert isinstance(run.optimizer, ZeroRedundancyOptimizer)
    return run.optimizer


def assert_same_values(ours: Run, reference: Run, what: str) -> None:
    assert_equal(ours.params, reference.params, what, tolerance_of(ours.case))


def assert_same_state(ours: Run, reference: Run) -> None:
    """The consolidated state is the plain optimizer's."""
    zero = zero_of(ours)
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        assert_same_tree(zero.state_dict(), reference.optimizer.state_dict(), "state", tolerance_of(ours.case))


def train_both(ours: Run, reference: Run, steps: Iterable[int]) -> None:
    """Iterate both; they are equal after every iteration."""
    for step in steps:
        reference.iterate(step)
        ours.iterate(step)
        assert_same_values(ours, reference, f"iteration {step}")


def assert_parity(case: Case, ours: Run, reference: Run, iterations: int = 6) -> None:
    """Equal from the first iteration on; updates move into backward when they should; state and replicas are equal."""
    train_both(ours, reference, range(iterations))
    warm_up = 3 if case.ddp.get("static_graph") else 2
    assert ours.updated_in_backward == [step >= warm_up for step in range(iterations)]
    assert len(ours.indices) >= case.buckets
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


# Parity


ELEMENT: dict[str, Any] = {"shard_by": "element"}
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": TINY}
VIEW = {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}
STATIC = {"static_graph": True, "bucket_cap_mb": TINY}
COUNTING: dict[str, Any] = {"optimizer": Counting, "options": {"lr": 0.1}}
UNEVEN: dict[str, Any] = {"model": Branching, "loss": branching_loss, "ddp": UNUSED, "buckets": 1}


# Communication hooks


def reduced_mean(bucket: Any) -> Any:
    """A future of a bucket's mean over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return allreduce_hook(group, bucket)
