"""Training with ``ShardedDataParallel`` or our hooks, and beside it with plain DDP: models, cases, runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch.utils.checkpoint import checkpoint

import onecopy
from onecopy import (
    ReduceScatter,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from onecopy.comm import limits
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_inputs,
    small_loss,
    small_model,
    values,
)

Model = ShardedDataParallel | DistributedDataParallel
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
"""More than two ranks, or several reductions, which are added up in another order."""

SMALL = 4000
"""A size of buckets of ``ShardedDataParallel``, in bytes, with which every model here has several."""

TINY = 1e-5
"""A limit for DDP's buckets, in MiB, that gives every parameter one of its own."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
UNUSED: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": TINY}
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}
STATIC: dict[str, Any] = {"static_graph": True, "bucket_cap_mb": TINY}


# Models


class Layers(nn.Module):
    """A few linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))
        return outputs


class Searched(Layers):
    """Uses all of its parameters; a submodule's name makes ``side_of`` let DDP look for unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Identity()


class Batched(nn.Module):
    """Buffers that change in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64, bias=False)  # a bias would have a gradient of nothing but rounding
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.norm(self.first(inputs))))
        return outputs


class Checkpointed(Layers):
    """The middle is computed again in the backward pass."""

    reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        outputs: Tensor = self.last(torch.tanh(hidden))
        return outputs


class Branching(nn.Module):
    """A branch that is never used, one that is used at will, and a layer that can be frozen without a loss of path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 160)
        self.middle = nn.Linear(160, 16)
        self.sometimes = nn.Linear(160, 4)
        self.never = nn.Linear(8, 4)
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, take_branch: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        outputs: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return outputs + self.sometimes(hidden) if take_branch else outputs


class Split(nn.Module):
    """Two parameters whose gradients are given, one for each of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(40, 40))
        self.vector = nn.Parameter(torch.ones(3))

    def forward(self, of_matrix: float | Tensor, of_vector: float) -> Tensor:
        return (self.matrix * of_matrix).sum() + (self.vector * of_vector).sum()


# Losses, optimizers


def branching_loss(model: nn.Module, step: int) -> Tensor:
    """Rank 0 alone takes the branch, in every other step."""
    rank = dist.get_rank()
    loss: Tensor = model(small_inputs(rank, step), rank == 0 and step % 2 == 0).square().mean()
    return loss


BRANCHING: dict[str, Any] = {"model": Branching, "loss": branching_loss, "ddp": UNUSED}
"""A case in which parameters are unused, some on one rank only."""


def half_model() -> nn.Module:
    return small_model().bfloat16()


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
    loss: Callable[..., Tensor] = small_loss  # of this rank, in one pass
    passes: int = 1  # for a step; all but the last are inside no_sync()
    set_to_none: bool = True  # how gradients are reset
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    tolerance: float = ROUNDING  # for more than two ranks


class Run:
    """A model, its optimizers and schedulers, ours or the reference."""

    def __init__(self, case: Case, model: Model, optimizers: Sequence[Optimizer]) -> None:
        self.case, self.model, self.optimizers = case, model, optimizers
        self.module: nn.Module = model.module
        self.schedulers = [] if case.scheduler is None else [*map(case.scheduler, optimizers)]
        self.updated_in_backward: list[bool] = []
        """Whether ``backward()`` changed parameters, for each step."""
        self.buckets: set[int] = set()
        """The indices of the buckets that an overlap hook has seen."""
        self.noted: list[Tensor] = []
        """What a test compares between two runs."""
        self.scaler: torch.amp.GradScaler | None = None

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

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

    @property
    def sharded(self) -> ShardedDataParallel:
        assert isinstance(self.model, ShardedDataParallel)
        return self.model

    @property
    def ddp(self) -> DistributedDataParallel:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    def freeze(self, *names: str, frozen: bool = True) -> None:
        """Freeze or unfreeze parameters, by name."""
        for name in names:
            self.module.get_parameter(name).requires_grad_(not frozen)

    def clip(self, max_norm: float, order: float = 2.0) -> Tensor:
        """Clip the gradients with our function, or with torch's."""
        if self.zeros:
            return onecopy.clip_grad_norm_(self.zeros, max_norm, order)
        return nn.utils.clip_grad_norm_(self.params, max_norm, order)

    def loss(self, step: int, *more: Any) -> Tensor:
        return self.case.loss(self.model, step, *more)

    def backward(self, step: int) -> None:
        # To read the parameters of ShardedDataParallel would wait for those that are on their way.
        watched = self.params if isinstance(self.model, DistributedDataParallel) else []
        before = values(watched)
        for optimizer in self.optimizers:
            optimizer.zero_grad(self.case.set_to_none)
        *accumulated, last = range(step * self.case.passes, (step + 1) * self.case.passes)
        with self.model.no_sync():
            for number in accumulated:
                self.loss(number).backward()
        self.loss(last).backward()
        self.updated_in_backward.append(any(not torch.equal(*pair) for pair in zip(watched, before, strict=True)))

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def iterate(self, step: int) -> None:
        self.backward(step)
        self.update()


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def layers_loss(model: nn.Module, step: int, branch: bool = False) -> Tensor:
    arguments = (branch,) if isinstance(model.module, Branching) else ()
    loss: Tensor = model(inputs_of(dist.get_rank(), step), *arguments).square().mean()
    return loss


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
    if reduce_dtype is not None or ddp_options.get("process_group") is not None:
        state = ReduceScatter(state, reduce_dtype=reduce_dtype, ddp=run.ddp)
    run.ddp.register_comm_hook(state, reduce_scatter_hook)
    return run


def side_of(
    ours: bool,
    make: Callable[[], nn.Module],
    optimizer: type[Optimizer] = torch.optim.SGD,
    options: dict[str, Any] | None = None,
    group: Any = None,
    frozen: Sequence[str] = (),
    level: int = 3,
    **wrap: Any,
) -> Run:
    """In ``ShardedDataParallel``, or with the reduce-scatter hook, or the reference, from the same seed."""
    torch.manual_seed(5)
    module = make()
    unused = any("never" in name for name, _ in module.named_modules())
    ddp = {"find_unused_parameters": unused}
    case = Case("", (Part(optimizer, options or SGD),), model=make, loss=layers_loss, ddp=ddp)
    if ours and level == 3:
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        zero = ZeroRedundancyOptimizer(module.parameters(), optimizer, process_group=group, **(options or SGD))
        return Run(case, ShardedDataParallel(module, zero, **{"bucket_bytes": SMALL, **wrap}), [zero])
    run = (scattered_run if ours else plain_run)(case, process_group=group)
    run.freeze(*frozen)  # DDP never reduces what was frozen when it was constructed
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


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Make a tiny model be treated as a large one.

    Every bucket is updated and sent on its own, so that several are on their way at once; all but the smallest
    gradients are sent from where they are, the longer ones in several messages.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SEGMENT_GROWTH", 0)
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 200)
        patch.setattr(limits, "CHUNK_BYTES", 256)
        patch.setattr(limits, "REDUCE_MESSAGE_BYTES", 256)
        yield


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
