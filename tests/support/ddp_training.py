"""Training under DDP with a hook of ours, and beside it without: models, cases, runs and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from onecopy import (
    ReduceScatter,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.data_parallel import ADAMW, SGD, Branching, as_if_large
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_inputs,
    small_model,
    values,
)

MakeHook = Callable[..., Any]

HOOKS = pytest.mark.parametrize(
    "hook",
    [reduce_scatter_hook, hook_with_zero_step, hook_with_zero_step_interleaved],
    ids=["reduce-scatter", "after backward", "interleaved"],
)
OVERLAPS = pytest.mark.parametrize(
    "hook", [hook_with_zero_step, hook_with_zero_step_interleaved], ids=["after backward", "interleaved"]
)

ROUNDING = 1e-6
"""With more than two ranks, the order in which gradients are added is the process group's affair."""

TINY = 1e-5
"""A limit for DDP's buckets, in MiB, that gives every parameter one of its own."""

UNUSED: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": TINY}
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}
STATIC: dict[str, Any] = {"static_graph": True, "bucket_cap_mb": TINY}


# Models, losses, optimizers


def loss_of(model: nn.Module, step: int) -> Tensor:
    """This rank's loss, in the type of the model."""
    inputs = small_inputs(dist.get_rank(), step).to(next(model.parameters()).dtype)
    loss: Tensor = model(inputs).square().mean()
    return loss


def branching_loss(model: nn.Module, step: int) -> Tensor:
    """Rank 0 alone takes the branch, in every other step."""
    rank = dist.get_rank()
    loss: Tensor = model(small_inputs(rank, step), rank == 0 and step % 2 == 0).square().mean()
    return loss


BRANCHING: dict[str, Any] = {"model": Branching, "loss": branching_loss, "ddp": UNUSED}
"""A case in which parameters are unused, some on one rank only."""


def half_model() -> nn.Module:
    return small_model().bfloat16()


class Split(nn.Module):
    """Two parameters whose gradients are given, one for each of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(40, 40))
        self.vector = nn.Parameter(torch.ones(3))

    def forward(self, of_matrix: float | Tensor, of_vector: float) -> Tensor:
        return (self.matrix * of_matrix).sum() + (self.vector * of_vector).sum()


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


def make_scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


def matrices(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dim() == 2]


def vectors(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dim() < 2]


# One description of a training run, and one runner


@dataclass(frozen=True)
class Part:
    """One optimizer of a model: its class and options, further options of the sharded one, and its parameters."""

    optimizer: type[Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    ours: dict[str, Any] = field(default_factory=dict)
    params: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters


WHOLE = (Part(ours={"shard_by": "parameter"}),)
MOMENTUM = (Part(torch.optim.SGD, SGD),)
COUNTERS = (Part(Counting, {"lr": 0.1}, {"elementwise": True}),)
TWO_ADAMWS = (Part(params=matrices), Part(params=vectors, options={"lr": 1e-3}))


@dataclass(frozen=True)
class Case:
    """How to train under DDP."""

    name: str = ""  # of the test
    parts: tuple[Part, ...] = (Part(),)
    _: KW_ONLY
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": TINY})
    model: Callable[[], nn.Module] = small_model
    loss: Callable[[nn.Module, int], Tensor] = loss_of  # of this rank, in one pass
    passes: int = 1  # for a step; all but the last are inside no_sync()
    set_to_none: bool = True  # how gradients are reset
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    tolerance: float = ROUNDING  # for more than two ranks


class Run:
    """A model under DDP with its optimizers and schedulers, and in which steps ``backward()`` changed parameters."""

    def __init__(self, case: Case, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        self.case, self.ddp, self.optimizers = case, ddp, optimizers
        self.schedulers = [] if case.scheduler is None else [*map(case.scheduler, optimizers)]
        self.updated_in_backward: list[bool] = []
        self.buckets: set[int] = set()
        """The indices of the buckets that an overlap hook has seen."""

    @property
    def params(self) -> list[Tensor]:
        return list(self.ddp.parameters())

    @property
    def optimizer(self) -> Optimizer:
        (optimizer,) = self.optimizers
        return optimizer

    @property
    def zeros(self) -> list[ZeroRedundancyOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        (zero,) = self.zeros
        return zero

    def loss(self, step: int) -> Tensor:
        return self.case.loss(self.ddp, step)

    def backward(self, step: int) -> None:
        before = values(self.params)
        for optimizer in self.optimizers:
            optimizer.zero_grad(self.case.set_to_none)
        *accumulated, last = range(step * self.case.passes, (step + 1) * self.case.passes)
        with self.ddp.no_sync():
            for number in accumulated:
                self.loss(number).backward()
        self.loss(last).backward()
        self.updated_in_backward.append(any(not torch.equal(*pair) for pair in zip(self.params, before, strict=True)))

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


def plain_run(case: Case, comm_hook: Any = None, state: Any = None, **ddp_options: Any) -> Run:
    """The reference: plain DDP, the plain optimizers."""
    ddp = make_ddp(case, **ddp_options)
    if comm_hook is not None:
        # DDP wants its own types where a hook has annotations, and knows some of its hooks by their names.
        ddp.register_comm_hook(state, lambda state, bucket: comm_hook(state, bucket))
    return Run(case, ddp, [part.optimizer(part.params(ddp.module), **part.options) for part in case.parts])


def sharded_run(case: Case, *, overlaps: bool = False, **ddp_options: Any) -> Run:
    """DDP with sharded optimizers and without a hook."""
    ddp = make_ddp(case, **ddp_options)
    given: dict[str, Any] = {"process_group": ddp.process_group, "overlap_with_ddp": overlaps}
    zeros = [
        ZeroRedundancyOptimizer(part.params(ddp.module), part.optimizer, **given, **part.ours, **part.options)
        for part in case.parts
    ]
    return Run(case, ddp, zeros)


def scattered_run(case: Case, reduce_dtype: torch.dtype | None = None, **ddp_options: Any) -> Run:
    """Through the reduce-scatter hook: with one optimizer, a list of them, or a :class:`ReduceScatter` as its state."""
    run = sharded_run(case, **ddp_options)
    state: Any = run.zeros[0] if len(run.zeros) == 1 else run.zeros
    if reduce_dtype is not None or "process_group" in ddp_options:
        state = ReduceScatter(state, reduce_dtype=reduce_dtype, ddp=run.ddp)
    run.ddp.register_comm_hook(state, reduce_scatter_hook)
    return run


def overlapped_run(
    case: Case, hook: MakeHook, comm_hook: Any = allreduce_hook, state: Any = None, **ddp_options: Any
) -> Run:
    """Through an overlap hook."""
    run = sharded_run(case, overlaps=True, **ddp_options)
    buckets = run.buckets  # and not the run: DDP keeps its hook alive, which must not keep DDP alive

    def noting_buckets(state: Any, bucket: Any) -> Any:
        buckets.add(bucket.index())
        return comm_hook(state, bucket)

    run.ddp.register_comm_hook(state, hook(noting_buckets, run.ddp, run.zero))
    return run


def hooked_run(case: Case, hook: MakeHook, **ddp_options: Any) -> Run:
    """Through any of our hooks."""
    if hook is reduce_scatter_hook:
        return scattered_run(case, **ddp_options)
    return overlapped_run(case, hook, allreduce_hook, ddp_options.get("process_group"), **ddp_options)


# Comparisons


def tolerance_of(case: Case) -> float:
    return 0.0 if dist.get_world_size() <= 2 else case.tolerance


def assert_same_values(ours: Run, reference: Run, what: str) -> None:
    assert_equal(ours.params, reference.params, what, tolerance_of(ours.case))


def assert_same_state(ours: Run, reference: Run, to: int = 0) -> None:
    """The consolidated states on one rank are the plain optimizers', and all ranks have the same parameters."""
    assert_replicas_equal(ours.params)
    for zero, plain in zip(ours.zeros, reference.optimizers, strict=True):
        zero.consolidate_state_dict(to=to)
        if zero.rank == to:
            assert_same_tree(zero.state_dict(), plain.state_dict(), "state", tolerance_of(ours.case))


def train_both(ours: Run, reference: Run, steps: Iterable[int]) -> None:
    """Iterate both; they are equal after every iteration."""
    for step in steps:
        reference.iterate(step)
        ours.iterate(step)
        assert_same_values(ours, reference, f"iteration {step}")


def assert_parity(ours: Run, reference: Run, iterations: int = 6) -> None:
    """Equal from the first iteration on; updates move into backward when they should.

    Ranges of gradients are sent as in a large model: most from where they are, the longer ones in several messages.
    """
    with as_if_large():
        train_both(ours, reference, range(iterations))
    assert_same_state(ours, reference)
    overlaps, options = ours.zeros[0].overlap_with_ddp, ours.case.ddp
    warm_up = 3 if options.get("static_graph") else 2
    assert ours.updated_in_backward == [overlaps and step >= warm_up for step in range(iterations)]
    if overlaps and options.get("bucket_cap_mb", 100) < 1 and not options.get("find_unused_parameters"):
        assert len(ours.buckets) > 1, "DDP does not regroup its buckets if it looks for unused parameters"


def reduced_mean(bucket: Any) -> Any:
    """A future of a bucket's mean over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return allreduce_hook(group, bucket)
