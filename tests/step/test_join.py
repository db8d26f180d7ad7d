"""Uneven inputs: ``Join([ddp, optimizer], model=ddp)`` equals plain DDP with the plain optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, hook_with_zero_step, reduce_scatter_hook
from onecopy.step import join
from tests.support.failures import expect, expect_failure_of, expect_no_memory, failing, failure_of
from tests.support.harness import distributed
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    more_for_earlier_ranks,
    more_for_later_ranks,
    small_ddp,
    small_loss,
    small_model,
    values,
)

ROUNDING = 1e-6
"""More than two ranks: the order in which gradients are added is the process group's affair."""

Counts = Callable[[int], int]


@dataclass(frozen=True)
class Setting:
    """How to train; ``contexts`` says how many inputs a rank has in each of the join contexts."""

    name: str
    contexts: tuple[Counts, ...] = (more_for_later_ranks,)
    optimizer: type[Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    ours: dict[str, Any] = field(default_factory=lambda: {"shard_by": "element"})
    scheduler: bool = False
    closure: bool = False
    join: dict[str, Any] = field(default_factory=dict)


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
WHOLE: dict[str, Any] = {"shard_by": "parameter"}
CUT: dict[str, Any] = {"shard_by": "element"}
VIEW: dict[str, Any] = {"parameters_as_bucket_view": True}
EARLIER = (more_for_earlier_ranks,)

SETTINGS = (
    Setting("whole parameters in buckets", ours={**WHOLE, **VIEW}),
    Setting("cut parameters in buckets", ours={**CUT, **VIEW}),
    Setting("the first rank goes on longest", EARLIER),
    Setting("closures and a scheduler", EARLIER, ours={**CUT, **VIEW}, closure=True, scheduler=True),
    Setting("gradients divided by the active ranks", join={"divide_by_initial_world_size": False}),
    Setting(
        "a tensor as learning rate", optimizer=torch.optim.Adam, options={"lr": torch.tensor(0.01)}, scheduler=True
    ),
    Setting("two contexts", (more_for_later_ranks, more_for_earlier_ranks), torch.optim.SGD, {"lr": 0.1}),
)


def one_step(model: nn.Module, optimizer: Optimizer, step: int, closure: bool = False) -> None:
    def evaluate() -> float:
        optimizer.zero_grad()
        loss = small_loss(model, step)
        loss.backward()
        return loss.item()

    if closure:
        assert isinstance(optimizer.step(evaluate), float)
    else:
        evaluate()
        optimizer.step()


def train(setting: Setting, sharded: bool) -> tuple[DistributedDataParallel, Any]:
    """Train on uneven inputs; plain DDP and the plain optimizer are the reference."""
    ddp = small_ddp()
    optimizer: Optimizer
    options = copy.deepcopy(setting.options)  # a scheduler changes a tensor in place
    if sharded:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), setting.optimizer, **setting.ours, **options)
    else:
        optimizer = setting.optimizer(ddp.parameters(), **options)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5) if setting.scheduler else None  # on the active ranks
    joinables: list[Any] = [ddp, optimizer] if sharded else [ddp]
    for counts in setting.contexts:
        with Join(joinables, **setting.join):
            for step in range(counts(dist.get_rank())):
                one_step(ddp, optimizer, step, setting.closure)
                if scheduler is not None:
                    scheduler.step()
            gradients = [param.grad for param in ddp.parameters()]
            before = values(gradient for gradient in gradients if gradient is not None)
    if sharded:  # a rank that has joined keeps its own gradients, and a tensor its identity
        assert len(before) == 4
        assert all(param.grad is each for param, each in zip(ddp.parameters(), gradients, strict=True))
        assert_same_tree(gradients, before, "gradients")
        assert not isinstance(rate, Tensor) or optimizer.param_groups[0]["lr"] is rate
    return ddp, optimizer


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@distributed(2, 3)
def test_uneven_inputs_equal_plain_ddp(world_size: int, setting: Setting) -> None:
    """In the join contexts, and in the steps that all ranks make afterwards."""
    tolerance = 0.0 if world_size == 2 else ROUNDING
    (plain, reference), (ddp, zero) = train(setting, sharded=False), train(setting, sharded=True)
    assert bool(zero.layout.cut_params) == (setting.ours["shard_by"] == "element")
    assert_equal(ddp.parameters(), plain.parameters(), setting.name, tolerance)
    assert_replicas_equal(ddp.parameters())
    if len(setting.contexts) > 1:
        return  # no rank's plain optimizer has seen all steps
    last = max(range(world_size), key=setting.contexts[0])
    zero.consolidate_state_dict(to=last)
    if dist.get_rank() == last:
        assert_same_tree(zero.state_dict(), reference.state_dict(), setting.name, tolerance)
    # A plain optimizer on a joined rank has missed steps: it takes over the state of the one that has not.
    box: list[Any] = [reference.state_dict()]
    dist.broadcast_object_list(box, src=last)
    reference.load_state_dict(box[0])
    assert float(zero.param_groups[0]["lr"]) == float(reference.param_groups[0]["lr"])
    for step in range(20, 23):
        one_step(plain, reference, step)
        one_step(ddp, zero, step)
        assert_equal(ddp.parameters(), plain.parameters(), f"step {step}", tolerance)
    assert_replicas_equal(ddp.parameters())


@distributed(2, 3)
def test_early_termination_raises_on_all_ranks(world_size: int) -> None:
    ddp = small_ddp()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    steps = 0

    def until_exhausted() -> None:
        nonlocal steps
        with Join([ddp, optimizer], throw_on_early_termination=True):
            for _ in range(more_for_later_ranks(dist.get_rank())):
                one_step(ddp, optimizer, 0)
                steps += 1

    with pytest.raises(RuntimeError, match="exhausted"):
        until_exhausted()
    assert steps == more_for_later_ranks(0), "every rank stops after the steps of the shortest one"
    assert_replicas_equal(ddp.parameters())


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@distributed(2, 3)
def test_the_optimizer_alone_in_the_join_context(world_size: int, counts: Counts) -> None:
    """Without DDP every rank computes the same gradients, so the result is that of the longest run in one process."""
    model, reference = small_model(), small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, shard_by="element")
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)

    def same_step(model: torch.nn.Module, optimizer: Optimizer, step: int) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 8), 1.0 + step)).square().mean().backward()
        next(model.parameters()).grad = None  # it stays without an update on a rank that has joined, too
        optimizer.step()

    with Join([optimizer]):
        for step in range(counts(dist.get_rank())):
            same_step(model, optimizer, step)
    for step in range(max(map(counts, range(world_size)))):
        same_step(reference, plain, step)
    assert_equal(model.parameters(), reference.parameters(), "alone")
    assert_replicas_equal(model.parameters())


# Accumulation under no_sync()


WAYS = ("with DDP", "reduce_scatter_hook")
INPUTS = (11, 15, 22)
"""The first rank ends before a step, the second one after one, the third one in between."""


def train_accumulating(way: str) -> list[nn.Parameter]:
    """One step after three passes; what is left over at the end of a rank's inputs is not stepped on."""
    model = small_ddp()
    params = list(model.parameters())
    optimizer: Any = torch.optim.SGD(params, **SGD)
    if way in WAYS:
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, shard_by="element", **SGD)
    if way == "reduce_scatter_hook":
        model.register_comm_hook(optimizer, reduce_scatter_hook)
    joinables: list[Any] = [model, optimizer] if way in WAYS else [model]
    with Join(joinables, model=model):
        for number in range(INPUTS[dist.get_rank()]):
            last = number % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                small_loss(model, number).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return params


@pytest.mark.parametrize("way", WAYS)
@distributed(2, 3)
def test_accumulation_without_synchronising_equals_plain_ddp(world_size: int, way: str) -> None:
    """A rank that has joined takes part in no step after a pass under ``no_sync()``: the others make none."""
    ours, plain = train_accumulating(way), train_accumulating("plain")
    assert not torch.equal(plain[0], next(small_model().parameters())), "the reference does not train"
    assert_equal(ours, plain, way, 0.0 if world_size == 2 else 10 * ROUNDING)
    assert_replicas_equal(ours)


# What is refused


@distributed(2)
def test_what_does_not_fit_into_a_join_context_is_refused(world_size: int) -> None:
    ddp = small_ddp()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, **SGD)
    with pytest.raises(TypeError, match=r"model= .*got Sequential.*Join\(\[ddp, optimizer\], model=ddp\)"):
        Join([ddp, zero], model=ddp.module)
    Join([ddp, zero], model=ddp, another_argument=1)

    def run() -> None:
        with Join([ddp, zero], model=ddp), ddp.no_sync():
            one_step(ddp, zero, 0)

    expect(failure_of(run), RuntimeError, rf"rank {dist.get_rank()}: step\(\) after a pass under no_sync\(\)")
    one_step(ddp, zero, 0)  # outside a join context

    module = small_model()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, **SGD)
    model = ShardedDataParallel(module, zero)
    refused: list[list[Any]] = [[model], [zero], [model, zero]]
    for joinables in refused:
        with pytest.raises(RuntimeError, match=r"equally many inputs.*use DistributedDataParallel"):
            Join(joinables)

    ddp = small_ddp()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, **SGD)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    by_hooks = pytest.raises(RuntimeError, match=r"equally many inputs.*overlap_with_ddp")
    with by_hooks:
        Join([ddp, zero])
    with by_hooks, Join([ddp]):  # the hook itself raises, in the first pass
        small_loss(ddp, 0).backward()


# Failures while a rank has joined


@distributed(2, 3)
@pytest.mark.parametrize("policy", ["parameter", "element"])
def test_a_joined_rank_without_memory_or_with_edited_groups_makes_all_ranks_raise(world_size: int, policy: str) -> None:
    ddp = small_ddp()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, shard_by=policy, **SGD)

    def run(before_exit: Callable[[], object]) -> None:
        with Join([ddp, optimizer]):
            for step in range(4 if dist.get_rank() == world_size - 1 else 1):
                one_step(ddp, optimizer, step)
            before_exit()

    def edit() -> None:
        if dist.get_rank() == 0:
            optimizer.param_groups.append({"params": []})

    seen_by_join = SimpleNamespace(**vars(torch))
    with pytest.MonkeyPatch.context() as patch, failing(seen_by_join, "empty", 0):
        patch.setattr(join, "torch", seen_by_join)
        expect_no_memory(0, lambda: run(lambda: None))
    one_step(ddp, optimizer, 9)
    assert_replicas_equal(list(ddp.parameters()))
    expect_failure_of([0], lambda: run(edit), ValueError, "zip")
    if dist.get_rank() == 0:
        optimizer.param_groups.pop()
    one_step(ddp, optimizer, 9)
