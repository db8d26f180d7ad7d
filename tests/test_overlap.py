"""Stepping inside the backward pass: both hooks equal plain DDP with the plain optimizer from the first iteration."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import onecopy.ddp_hooks.hooks
from harness import distributed, pools
from models import assert_equal, assert_replicas_equal, assert_same_tree, small_inputs, small_loss, small_model, values
from models_resnet import ResNet50
from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from onecopy.ddp_hooks.worker import StreamWorker

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


# One description of a training run, and two ways to run it


@pytest.fixture(scope="module", autouse=True)
def _fresh_processes() -> None:
    """Other files leave behind groups that only some ranks are in; torch then cannot make one by its members alone."""
    pools.close()


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

CASES = (
    Case("momentum"),
    Case("momentum, cut", ours=ELEMENT),
    Case("one bucket", ddp={"bucket_cap_mb": 100}, buckets=1),
    Case("default buckets", ddp={}, buckets=1),
    Case("a few buckets", ddp={"bucket_cap_mb": SMALL}, ours=ELEMENT),
    Case("gradients are bucket views", ddp=VIEW, ours=ELEMENT),
    Case("gradients are bucket views, set to zero", ddp=VIEW, set_to_none=False),
    Case("static graph", ddp=STATIC),
    Case("static graph and bucket views", ddp={**STATIC, **VIEW}, ours=ELEMENT),
    Case("static graph with unused parameters", model=Branching, loss=never_branching_loss, ddp=STATIC),
    Case("unused parameters", **UNEVEN),
    Case("unused parameters, cut", **UNEVEN, ours=ELEMENT),
    Case("unused parameters, bucket views", **{**UNEVEN, "ddp": {**UNUSED, **VIEW}}),
    Case("unused parameters, set to zero", **UNEVEN, set_to_none=False),
    Case("several groups", params=three_groups, ours=ELEMENT),
    Case("several groups and a schedule of momentum", params=three_groups, scheduler=one_cycle),
    Case("a schedule", scheduler=halving, ours=ELEMENT),
    Case("fused AdamW", torch.optim.AdamW, {"lr": 1e-2, "fused": True}, ours=ELEMENT, scheduler=halving),
    Case("a tensor learning rate", torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}, scheduler=halving),
    Case("counters in groups and state", **COUNTING, params=three_groups, buckets=4),
    Case("counters, cut", **COUNTING, ours={**ELEMENT, "elementwise": True}),
    Case("Muon", torch.optim.Muon, {"lr": 1e-2}, model=matrices, tolerance=1e-3),
    Case("two types", model=TwoTypes, ours=ELEMENT),
    Case("half precision", model=half_model, loss=half_loss, ours=ELEMENT, tolerance=2e-2),
    Case("accumulation", passes=3, ours=ELEMENT),
    Case("accumulation in bucket views", passes=3, ddp=VIEW),
    Case("accumulation with unused parameters", **UNEVEN, passes=3),
)


@HOOKS
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(2)
def test_a_loop_with_step_equals_plain_ddp_from_the_first_iteration_on(
    world_size: int, case: Case, make_hook: MakeHook
) -> None:
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@pytest.mark.parametrize("case", [case for case in CASES if case.ours][::2], ids=lambda case: case.name)
@distributed(3)
def test_three_ranks_equal_plain_ddp_within_rounding(world_size: int, case: Case, make_hook: MakeHook) -> None:
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@distributed(4)
def test_four_ranks_equal_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, ours=ELEMENT, params=three_groups)
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@distributed(1)
def test_one_rank_equals_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, tolerance=0.0)
    assert_parity(case, overlapped_run(case, make_hook), plain_run(case))


@HOOKS
@distributed(2)
def test_sharding_by_buckets_is_accepted_and_changes_nothing(world_size: int, make_hook: MakeHook) -> None:
    case = Case(ours=ELEMENT)
    make = functools.partial(make_hook, shard_buckets=True)
    assert_parity(case, overlapped_run(case, make), plain_run(case))


@HOOKS
@pytest.mark.parametrize(
    "case",
    [Case("momentum", ours=ELEMENT), Case("unused", **UNEVEN), Case("counters", **COUNTING), Case("views", ddp=VIEW)],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_the_way_of_accelerators_run_in_place_gives_the_same(world_size: int, case: Case, make_hook: MakeHook) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onecopy.ddp_hooks.hooks, "make_worker", StreamWorker)
        ours = overlapped_run(case, make_hook)
    assert_parity(case, ours, plain_run(case))


@distributed(2)
def test_without_a_hook_step_does_everything(world_size: int) -> None:
    case = Case(ours=ELEMENT)
    ddp = make_ddp(case)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **ELEMENT, **SGD)
    train_both(Run(case, ddp, zero), plain_run(case), range(4))


# Communication hooks


def reduced_mean(bucket: Any) -> Any:
    """A future of a bucket's mean over all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return allreduce_hook(group, bucket)


def doubling_hook(state: Any, bucket: Any) -> Any:
    """Yields another tensor than the bucket's."""
    return reduced_mean(bucket).then(lambda future: future.value() * 2)


def scaling_hook(state: list[int], bucket: Any) -> Any:
    """Needs its state: how often it was called, by which gradients are scaled."""
    state.append(bucket.index())
    scale = 1 + 0.1 * len(state)
    return reduced_mean(bucket).then(lambda future: future.value().mul_(scale))


def power_state() -> PowerSGDState:
    return PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)


COMM_HOOKS = pytest.mark.parametrize(
    ("comm_hook", "make_state"),
    [
        (fp16_compress_hook, None),
        (bf16_compress_hook, None),
        (powerSGD_hook, power_state),
        (doubling_hook, None),
        (scaling_hook, list),
    ],
    ids=["fp16", "bf16", "PowerSGD", "another tensor", "with a state"],
)


@HOOKS
@COMM_HOOKS
@distributed(2)
def test_any_communication_hook_equals_plain_ddp_with_the_same_hook(
    world_size: int, make_hook: MakeHook, comm_hook: Any, make_state: Any
) -> None:
    # PowerSGD starts collectives in callbacks, so on this backend plain DDP itself needs all in one bucket.
    buckets = 1 if comm_hook is powerSGD_hook else 2
    ddp = {"bucket_cap_mb": SMALL if buckets == 2 else 100, "gradient_as_bucket_view": make_hook is hook_with_zero_step}
    case = Case(ours=ELEMENT, ddp=ddp, buckets=buckets)
    states: list[Any] = [make_state() if make_state is not None else None for _ in range(2)]
    ours = overlapped_run(case, make_hook, comm_hook, states[0])
    assert_parity(case, ours, plain_run(case, comm_hook, states[1]), iterations=7)
    if isinstance(states[0], PowerSGDState):
        assert states[0].iter == states[1].iter > states[0].start_powerSGD_iter
        assert states[0].error_dict.keys() == states[1].error_dict.keys()
        assert states[0].error_dict
    elif make_state is not None:
        assert states[0] == states[1] != []


# No update lost, none doubled


@dataclass(frozen=True)
class Count:
    """A training loop, and how many updates each layer gets in six iterations of it."""

    name: str
    case: Case
    expected: dict[str, int]
    freeze_at: int | None = None


COUNTS = (
    Count("every pass synchronises", Case(**COUNTING), {"0": 6, "2": 6}),
    Count("static graph", Case(**COUNTING, ddp=STATIC), {"0": 6, "2": 6}),
    Count("accumulation", Case(**COUNTING, passes=3), {"0": 6, "2": 6}),
    Count(
        "unused parameters",
        Case(**COUNTING, **UNEVEN),
        {"first": 6, "middle": 6, "last": 6, "sometimes": 3, "never": 0},
    ),
    Count(
        "unused parameters, with accumulation of even and odd passes",
        Case(**COUNTING, **UNEVEN, passes=2),
        {"first": 6, "middle": 6, "last": 6, "sometimes": 6, "never": 0},
    ),
    Count(
        "frozen half way",
        Case(**COUNTING, **UNEVEN),
        {"first": 6, "middle": 3, "last": 6, "sometimes": 3, "never": 0},
        freeze_at=3,
    ),
)


@HOOKS
@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count.name)
@distributed(3)
def test_every_iteration_updates_every_parameter_with_a_gradient_once(
    world_size: int, count: Count, make_hook: MakeHook
) -> None:
    ours = overlapped_run(count.case, make_hook)
    for step in range(6):
        if step == count.freeze_at:
            ours.ddp.module.get_submodule("middle").requires_grad_(False)
        ours.iterate(step)
    zero = zero_of(ours)
    assert zero.param_groups[0]["steps"] == 6
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        state = zero.state_dict()["state"]
        for index, (name, _) in enumerate(ours.ddp.module.named_parameters()):
            updates = state.get(index, {}).get("updates", 0)
            assert updates == count.expected[name.split(".")[0]], name


@HOOKS
@distributed(2, 3)
def test_a_layer_frozen_half_way_stays_equal_to_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, ours=ELEMENT)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(4))
    for run in (ours, reference):
        run.ddp.module.get_submodule("middle").requires_grad_(False)
    train_both(ours, reference, range(4, 7))
    for run in (ours, reference):
        run.ddp.module.get_submodule("middle").requires_grad_(True)
    train_both(ours, reference, range(7, 9))
    assert_same_state(ours, reference)


# Loops that do not call step()


@HOOKS
@pytest.mark.parametrize(
    ("case", "warm_up"),
    [
        (Case("usual"), 2),
        (Case("static", ddp=STATIC), 3),
        (Case("unused", model=Branching, loss=branching_loss, ddp=UNUSED, buckets=1), 2),
    ],
    ids=["usual", "static graph", "unused parameters"],
)
@distributed(2)
def test_without_step_each_backward_pass_updates_once_the_buckets_are_final(
    world_size: int, case: Case, warm_up: int, make_hook: MakeHook
) -> None:
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(warm_up + 3):
            ours.backward(step)
            if step >= warm_up:
                reference.iterate(step)
            assert_same_values(ours, reference, f"backward pass {step}")
            assert len(caught) == (step >= warm_up)
    assert "step() was never called" in str(caught[0].message)
    assert_same_state(ours, reference)


@HOOKS
@distributed(2)
def test_a_loop_with_step_is_not_warned(world_size: int, make_hook: MakeHook) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = overlapped_run(Case(), make_hook)
        for step in range(4):
            ours.iterate(step)
    assert not caught


@pytest.mark.parametrize("make_hook", [hook_with_zero_step_interleaved])
@distributed(2)
def test_a_resnet_without_step_equals_plain_ddp_after_the_warm_up(world_size: int, make_hook: MakeHook) -> None:
    static_graph = make_hook is hook_with_zero_step
    warm_up = 3 if static_graph else 2
    ddp = {"gradient_as_bucket_view": True, "static_graph": static_graph}
    case = Case(model=ResNet50, loss=image_loss, ddp=ddp, ours=ELEMENT if static_graph else {})
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    for _ in range(warm_up):
        ours.backward(0)
    with pytest.warns(UserWarning, match=r"step\(\) was never called"):
        ours.backward(0)
    for step in range(1, 3):
        ours.backward(step)
    for step in range(3):
        reference.iterate(step)
    assert len(ours.indices) > 2
    assert_same_values(ours, reference, "after three updates")


def image_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    logits: Tensor = model(torch.randn(2, 3, 32, 32, generator=generator))
    return logits.square().mean()


# Several synchronising passes before one step()


@HOOKS
@distributed(2)
def test_a_second_synchronising_pass_before_step_raises_once_updates_happen_in_backward(
    world_size: int, make_hook: MakeHook
) -> None:
    case = Case(ours=ELEMENT)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    for run in (ours, reference):
        case.loss(run.ddp, 50).backward()
        case.loss(run.ddp, 51).backward()
        run.optimizer.step()
    assert_same_values(ours, reference, "two passes before the first step(), while step() does the update")
    train_both(ours, reference, range(3))
    ours.backward(3)
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        case.loss(ours.ddp, 4).backward()


@HOOKS
@distributed(2)
def test_a_pass_inside_no_sync_after_the_synchronising_one_is_refused(world_size: int, make_hook: MakeHook) -> None:
    ours = overlapped_run(Case(), make_hook)
    for step in range(3):
        ours.iterate(step)
    ours.backward(3)
    with ours.ddp.no_sync():
        small_loss(ours.ddp, 4).backward()
    with pytest.raises(RuntimeError, match="was changed between"):
        ours.optimizer.step()


# What autograd still needs


@HOOKS
@distributed(2)
def test_a_retained_graph_is_out_of_date_after_the_update(world_size: int, make_hook: MakeHook) -> None:
    ours = overlapped_run(Case(ours=ELEMENT), make_hook)
    for step in range(5):
        ours.optimizer.zero_grad()
        inputs = small_inputs(dist.get_rank(), step).requires_grad_()
        loss = ours.ddp(inputs).square().mean()
        loss.backward(retain_graph=True)
        if step < 2:
            torch.autograd.grad(loss, inputs)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, inputs)
        ours.optimizer.step()


class ReadsTwice(nn.Module):
    """Uses a weight a second time through ``detach()``, in a place whose gradient is computed later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 12)
        self.before_second_use: Callable[[], None] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs)) @ self.second.weight.detach()
        if self.before_second_use is not None:
            wait = self.before_second_use
            hidden.register_hook(lambda _gradient: wait())
        outputs: Tensor = self.second(hidden)
        return outputs


@HOOKS
@distributed(2)
def test_a_weight_needed_later_in_the_same_pass_is_used_unchanged_or_autograd_raises(
    world_size: int, make_hook: MakeHook
) -> None:
    case = Case(model=ReadsTwice, ddp={"bucket_cap_mb": 5e-4})
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(2))
    module = ours.ddp.module
    assert isinstance(module, ReadsTwice)
    weight = module.second.weight
    version = weight._version

    def until_updated() -> None:
        deadline = time.monotonic() + 10
        while weight._version == version and time.monotonic() < deadline:
            time.sleep(0.005)

    if make_hook is hook_with_zero_step:
        train_both(ours, reference, range(2, 5))
        return
    module.before_second_use = until_updated
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours.backward(2)


# What cannot be combined with an update inside backward


@HOOKS
@pytest.mark.parametrize("iterations", [0, 3], ids=["first iteration", "fourth iteration"])
@distributed(2)
def test_a_closure_is_refused(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    ours = overlapped_run(Case(), make_hook)
    for step in range(iterations):
        ours.iterate(step)
    with pytest.raises(RuntimeError, match=r"a closure cannot.*reduce_scatter_hook"):
        ours.optimizer.step(lambda: 0.0)


@HOOKS
@pytest.mark.parametrize(
    ("iterations", "unscale"), [(0, False), (3, False), (3, True)], ids=["first iteration", "later", "later, unscaled"]
)
@distributed(2)
def test_a_gradient_scaler_is_refused(world_size: int, iterations: int, unscale: bool, make_hook: MakeHook) -> None:
    ours = overlapped_run(Case(), make_hook)
    for step in range(iterations):
        ours.iterate(step)
    scaler = torch.amp.GradScaler("cpu")
    ours.optimizer.zero_grad()
    scaler.scale(small_loss(ours.ddp, 3)).backward()
    if unscale:
        scaler.unscale_(ours.optimizer)
    with pytest.raises(RuntimeError, match=r"a GradScaler cannot.*reduce_scatter_hook"):
        scaler.step(ours.optimizer)


@HOOKS
@distributed(2)
def test_a_scaler_that_is_switched_off_works(world_size: int, make_hook: MakeHook) -> None:
    ours, reference = overlapped_run(Case(), make_hook), plain_run(Case())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(4):
        for run in (ours, reference):
            run.optimizer.zero_grad()
            scaler.scale(small_loss(run.ddp, step)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        assert_same_values(ours, reference, f"iteration {step}")


def clip_with_torch(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.params, 0.01)


def clip_with_ours(run: Run) -> None:
    zero_of(run).clip_grad_norm_(0.01)


def replace_gradient(run: Run) -> None:
    param = run.params[0]
    assert param.grad is not None
    param.grad = param.grad * 0.5


@HOOKS
@pytest.mark.parametrize(
    ("change", "bucket_view"),
    [(clip_with_torch, False), (clip_with_torch, True), (clip_with_ours, True), (replace_gradient, False)],
)
@distributed(2)
def test_changing_gradients_between_backward_and_step_is_refused(
    world_size: int, change: Callable[[Run], None], bucket_view: bool, make_hook: MakeHook
) -> None:
    ours = overlapped_run(Case(ddp={**VIEW, "gradient_as_bucket_view": bucket_view}), make_hook)
    for step in range(3):
        ours.iterate(step)
    ours.backward(3)
    change(ours)
    with pytest.raises(RuntimeError, match=r"gradient of parameter .* was changed.*reduce_scatter_hook"):
        ours.optimizer.step()


# State


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4], ids=["at once", "before updates move", "after updates moved"])
@distributed(2, 3)
def test_a_saved_run_goes_on_as_if_it_had_never_stopped(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    case = Case(optimizer=torch.optim.AdamW, options={"lr": 1e-2}, ours=ELEMENT)
    first, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(first, reference, range(iterations))
    saved: list[Any] = [None]
    zero_of(first).consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = [zero_of(first).state_dict()]
        assert_same_tree(saved[0], reference.optimizer.state_dict(), "saved", tolerance_of(case))
    dist.broadcast_object_list(saved, src=0)
    second = overlapped_run(case, make_hook)
    second.ddp.module.load_state_dict(first.ddp.module.state_dict())
    second.optimizer.load_state_dict(saved[0])
    for step in range(iterations, iterations + 5):
        first.iterate(step)
        second.iterate(step)
        reference.iterate(step)
        assert_same_values(first, reference, f"iteration {step} of the run that went on")
        # Two ranks give the same bits; with more, the order of additions follows DDP's regrouping of its buckets.
        assert_equal(second.params, first.params, f"iteration {step} of the resumed run", tolerance_of(case))
    assert_same_state(second, reference)


@HOOKS
@distributed(2)
def test_an_older_state_can_be_loaded_while_updates_happen_in_backward(world_size: int, make_hook: MakeHook) -> None:
    case = Case(ours=ELEMENT, scheduler=None)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(1))
    older = reference.optimizer.state_dict()
    older = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, older)
    older["param_groups"][0]["lr"] = 0.02
    train_both(ours, reference, range(1, 5))
    for run in (ours, reference):
        run.optimizer.load_state_dict(older)
    train_both(ours, reference, range(5, 8))
    assert ours.updated_in_backward[-1]
    assert ours.optimizer.param_groups[0]["lr"] == 0.02
    assert_same_state(ours, reference)


@HOOKS
@distributed(2)
def test_state_after_a_loop_without_step_is_out_of_date_until_consolidated(
    world_size: int, make_hook: MakeHook
) -> None:
    ours = overlapped_run(Case(), make_hook)
    for step in range(3):
        ours.iterate(step)
    zero_of(ours).consolidate_state_dict(to=0)
    ours.backward(3)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        ours.optimizer.state_dict()


# Groups and parameters that come later


def first_layer(model: nn.Module) -> Iterable[Any]:
    return model.get_submodule("0").parameters()


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4])
@distributed(2, 3)
def test_a_group_can_be_added_after_registration(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    case = Case(params=first_layer, ours=ELEMENT)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(iterations))
    for run in (ours, reference):
        run.optimizer.add_param_group({"params": list(run.ddp.module.get_submodule("2").parameters()), "lr": 0.05})
    train_both(ours, reference, range(iterations, iterations + 5))
    assert ours.updated_in_backward[-1]
    assert_same_state(ours, reference)


class WithExtra(nn.Module):
    """A model with a parameter that DDP does not see, because it is frozen when DDP is made."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.extra = nn.Parameter(torch.ones(50), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs


@HOOKS
@pytest.mark.parametrize("trainable", [True, False], ids=["unfrozen", "frozen with a gradient"])
@distributed(2, 3)
def test_a_parameter_in_no_bucket_is_updated_by_step(world_size: int, trainable: bool, make_hook: MakeHook) -> None:
    case = Case(**COUNTING, model=WithExtra)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(1))
    for run in (ours, reference):
        extra = run.ddp.module.get_parameter("extra")
        extra.requires_grad_(trainable)
    for step in range(1, 6):
        for run in (ours, reference):
            run.backward(step)
            extra = run.ddp.module.get_parameter("extra")
            extra.grad = torch.full_like(extra, 0.1 * step)
            before = extra.detach().clone()
            run.optimizer.step()
            assert not torch.equal(extra, before)
        assert_same_values(ours, reference, f"iteration {step}")
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


# Construction and logging


@HOOKS
@distributed(2)
def test_parameters_as_bucket_views_are_ignored_and_that_is_logged(world_size: int, make_hook: MakeHook) -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("onecopy"), Keep()
    logger.addHandler(handler)
    try:
        case = Case(ours={"parameters_as_bucket_view": True})
        ours = overlapped_run(case, make_hook)
    finally:
        logger.removeHandler(handler)
    messages = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    assert len(messages) == 1
    assert "parameters_as_bucket_view=True is ignored" in messages[0]
    pointers = [param.data_ptr() for param in ours.params]
    assert_parity(case, ours, plain_run(case))
    assert [param.data_ptr() for param in ours.params] == pointers


# Uneven inputs


def more_for_later_ranks(rank: int) -> int:
    return 1 + 2 * rank


def more_for_earlier_ranks(rank: int) -> int:
    return 8 - 2 * rank


def join_run(run: Run, joinables: list[Any], count: int) -> None:
    with Join(joinables):
        for step in range(count):
            run.iterate(step)


@HOOKS
@pytest.mark.parametrize(
    ("case", "counts"),
    [
        (Case(scheduler=halving, ours=ELEMENT), more_for_later_ranks),
        (Case(**COUNTING, scheduler=halving), more_for_earlier_ranks),
    ],
    ids=["the last rank goes on longest", "the first rank goes on longest"],
)
@distributed(2, 3, 4)
def test_uneven_inputs_equal_plain_ddp(
    world_size: int, case: Case, counts: Callable[[int], int], make_hook: MakeHook
) -> None:
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    count = counts(dist.get_rank())
    join_run(reference, [reference.ddp], count)
    join_run(ours, [ours.ddp, ours.optimizer], count)
    assert_same_values(ours, reference, "after uneven inputs")
    assert_replicas_equal(ours.params)
    last = max(range(world_size), key=counts)
    zero_of(ours).consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        expected = reference.optimizer.state_dict()
        assert_same_tree(zero_of(ours).state_dict(), expected, "state", tolerance_of(case))


@HOOKS
@distributed(2, 3)
def test_uneven_inputs_with_unused_parameters_equal_plain_ddp(world_size: int, make_hook: MakeHook) -> None:
    case = Case(**UNEVEN, ours=ELEMENT)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    count = more_for_later_ranks(dist.get_rank())
    join_run(reference, [reference.ddp], count)
    join_run(ours, [ours.ddp, ours.optimizer], count)
    assert_same_values(ours, reference, "after uneven inputs")
    assert_replicas_equal(ours.params)


# Process groups


@HOOKS
@pytest.mark.parametrize("case", [Case(ours=ELEMENT), Case(**UNEVEN)], ids=["cut", "unused parameters"])
@distributed(4)
def test_a_subgroup_whose_ranks_are_numbered_otherwise_equals_plain_ddp(
    world_size: int, case: Case, make_hook: MakeHook
) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    assert isinstance(group, dist.ProcessGroup)
    ours = overlapped_run(case, make_hook, allreduce_hook, group, process_group=group)
    reference = plain_run(case, process_group=group)
    for step in range(5):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}")
    assert ours.updated_in_backward == [False, False, True, True, True]
    zero = zero_of(ours)
    assert zero.rank == {1: 0, 3: 1}[dist.get_rank()]
    zero.consolidate_state_dict(to=1)
    if zero.rank == 1:
        assert_same_tree(zero.state_dict(), reference.optimizer.state_dict(), "state")


# Failures


class Fragile(torch.optim.SGD):
    """Raises when told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if Fragile.broken:
            raise KeyError("the update broke here")
        return super().step(closure)


@HOOKS
@distributed(2, 3)
def test_a_failing_update_is_an_error_on_every_rank_that_names_the_one_that_failed(
    world_size: int, make_hook: MakeHook
) -> None:
    ours = overlapped_run(Case(optimizer=Fragile), make_hook)
    for step in range(3):
        ours.iterate(step)
    Fragile.broken = dist.get_rank() == 1
    start = time.monotonic()
    try:
        with pytest.raises(Exception, match="the update broke here") as caught:
            ours.iterate(3)
    finally:
        Fragile.broken = False
    assert time.monotonic() - start < 5
    if dist.get_rank() != 1:
        assert "failed on rank 1" in str(caught.value)


def broken_hook(state: dict[str, bool], bucket: Any) -> Any:
    def check(future: Any) -> Tensor:
        if state["broken"] and bucket.index() == 0:
            raise ValueError("the reduction broke here")
        reduced: Tensor = future.value()
        return reduced

    return reduced_mean(bucket).then(check)


@HOOKS
@distributed(2, 3)
def test_a_failing_communication_hook_is_an_error_on_every_rank(world_size: int, make_hook: MakeHook) -> None:
    state = {"broken": False}
    ours = overlapped_run(Case(), make_hook, broken_hook, state)
    for step in range(3):
        ours.iterate(step)
    state["broken"] = dist.get_rank() == 1
    start = time.monotonic()
    with pytest.raises(Exception, match="the reduction broke here"):
        ours.iterate(3)
    assert time.monotonic() - start < 5


# Lifetime


@HOOKS
@distributed(2)
def test_a_new_hook_can_be_made_after_an_older_one_went_away(world_size: int, make_hook: MakeHook) -> None:
    case = Case()
    older, ours = overlapped_run(case, make_hook), overlapped_run(case, make_hook)
    older.iterate(0)
    del older
    gc.collect()
    newer = overlapped_run(case, make_hook)
    reference = plain_run(case)
    for step in range(4):
        newer.iterate(step)
        ours.iterate(step)
        reference.iterate(step)
    assert_same_values(newer, reference, "the newer run")
    assert_same_values(ours, reference, "the run in between")


@HOOKS
@distributed(2)
def test_ranks_may_let_go_of_an_older_hook_at_different_times(world_size: int, make_hook: MakeHook) -> None:
    case = Case()
    gc.collect()
    gc.disable()
    try:
        older = overlapped_run(case, make_hook)
        older.iterate(0)
        del older
        if dist.get_rank() == 0:
            gc.collect()
        newer, reference = overlapped_run(case, make_hook), plain_run(case)
        train_both(newer, reference, range(4))
    finally:
        gc.enable()


def overlap_threads() -> set[threading.Thread]:
    # Thread objects, not idents: an ident is used again once its thread has ended.
    return {thread for thread in threading.enumerate() if thread.name == "onecopy-overlap"}


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4])
@distributed(2)
def test_nothing_is_left_behind_when_model_and_optimizer_go_away(
    world_size: int, iterations: int, make_hook: MakeHook
) -> None:
    gc.collect()
    before = overlap_threads()
    ours = overlapped_run(Case(ours=ELEMENT), make_hook)
    for step in range(iterations):
        ours.iterate(step)
    assert len(overlap_threads() - before) == 1
    remains: list[Any] = [weakref.ref(ours.ddp), weakref.ref(ours.optimizer), weakref.ref(ours.params[0])]
    del ours
    # The worker may still be on its way out of its last job, which it entered before backward() returned.
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        gc.collect()
        if not any(reference() for reference in remains) and not overlap_threads() - before:
            break
        time.sleep(0.01)
    assert [reference() for reference in remains] == [None, None, None]
    assert not overlap_threads() - before


# Wrong use


def make_zero(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, **{"lr": 0.1, "overlap_with_ddp": True, **options}
    )


@HOOKS
@distributed(2)
def test_an_optimizer_that_does_not_overlap_is_refused(world_size: int, make_hook: MakeHook) -> None:
    ddp = make_ddp(Case())
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        make_hook(allreduce_hook, ddp, make_zero(ddp, overlap_with_ddp=False))


@HOOKS
@distributed(2)
def test_parameters_of_another_model_are_refused_by_name(world_size: int, make_hook: MakeHook) -> None:
    ddp, other = make_ddp(Case()), make_ddp(Case())
    zero = ZeroRedundancyOptimizer(other.named_parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(ValueError, match=r"'module.0.weight'.*not a parameter of the model"):
        make_hook(allreduce_hook, ddp, zero)


@HOOKS
@distributed(2)
def test_a_second_hook_for_one_optimizer_is_refused(world_size: int, make_hook: MakeHook) -> None:
    ddp = make_ddp(Case())
    zero = make_zero(ddp)
    make_hook(allreduce_hook, ddp, zero)
    with pytest.raises(ValueError, match="already"):
        make_hook(allreduce_hook, ddp, zero)


@HOOKS
@distributed(2)
def test_a_model_without_ddp_is_refused(world_size: int, make_hook: MakeHook) -> None:
    ddp = make_ddp(Case())
    with pytest.raises(TypeError, match="DistributedDataParallel, got Sequential"):
        make_hook(allreduce_hook, ddp.module, make_zero(ddp))


@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
@distributed(2)
def test_torchs_hooks_refuse_our_optimizer(world_size: int, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    ddp = make_ddp(Case())
    with pytest.raises(ValueError, match=r"onecopy\.hook_with_zero_step"):
        getattr(ddp_zero_hook, name)(allreduce_hook, ddp, make_zero(ddp))


@HOOKS
@distributed(2)
def test_our_hooks_refuse_torchs_optimizer(world_size: int, make_hook: MakeHook) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    ddp = make_ddp(Case())
    zero = TorchZero(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"onecopy\.ZeroRedundancyOptimizer, got torch\.distributed\.optim"):
        make_hook(allreduce_hook, ddp, zero)


@HOOKS
@distributed(2)
def test_other_process_groups_than_ddps_are_refused(world_size: int, make_hook: MakeHook) -> None:
    ddp = make_ddp(Case())
    alone = [dist.new_group([rank]) for rank in range(world_size)]
    zero = make_zero(ddp, process_group=alone[dist.get_rank()])
    with pytest.raises(ValueError, match=r"optimizer is on ranks \[.\], but DDP is on ranks \[0, 1\]"):
        make_hook(allreduce_hook, ddp, zero)


@distributed(2)
def test_ranks_that_make_different_hooks_are_told(world_size: int) -> None:
    ddp = make_ddp(Case())
    zero = make_zero(ddp)
    make_hook = hook_with_zero_step if dist.get_rank() == 0 else hook_with_zero_step_interleaved
    with pytest.raises(onecopy.RanksDisagreeError, match="interleaved"):
        make_hook(allreduce_hook, ddp, zero)


@HOOKS
@distributed(2)
def test_a_wrong_registration_on_one_rank_is_an_error_on_all(world_size: int, make_hook: MakeHook) -> None:
    ddp, other = make_ddp(Case()), make_ddp(Case())
    zero = make_zero(ddp)
    with pytest.raises(Exception, match="not a parameter of the model"):
        make_hook(allreduce_hook, ddp if dist.get_rank() == 0 else other, zero)


@HOOKS
@distributed(2)
def test_options_changed_between_backward_and_step_are_refused(world_size: int, make_hook: MakeHook) -> None:
    ours = overlapped_run(Case(), make_hook)
    for step in range(3):
        ours.iterate(step)
    ours.case.loss(ours.ddp, 3).backward()
    ours.optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match=r"changed .* between backward\(\) and step\(\)"):
        ours.optimizer.step()


@HOOKS
@distributed(2)
def test_two_overlapping_optimizers_on_one_group_do_not_mix(world_size: int, make_hook: MakeHook) -> None:
    case = Case()
    pairs = [(overlapped_run(case, make_hook), plain_run(case)) for _ in range(2)]
    for step in range(5):
        for runs in zip(*pairs, strict=True):
            for run in runs:
                run.optimizer.zero_grad()
            sum(case.loss(run.ddp, step) for run in runs).backward()  # type: ignore[union-attr]
            for run in runs:
                run.optimizer.step()
    for ours, reference in pairs:
        assert all(torch.equal(a, b) for a, b in zip(ours.params, reference.params, strict=True))
