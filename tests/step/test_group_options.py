"""The user's ``param_groups`` are the truth between calls: a call changes only what the inner optimizer wrote in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from onecopy import (
    PeerFailedError,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
)
from tests.support import both as support
from tests.support.both import set_gradients
from tests.support.harness import distributed
from tests.support.models import small_ddp, small_loss, small_model


def params_of() -> list[tuple[str, nn.Parameter]]:
    """Named parameters, the same on every rank and in every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (40, 70), "square": (30, 30), "vector": (9,)}
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def extra(**options: Any) -> dict[str, Any]:
    """One more group."""
    return {"params": [("extra", nn.Parameter(torch.arange(8.0)))], **options}


def shown(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of all groups, as they are now."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class Both(support.Both):
    """Both optimizers over the same named parameters after a step; their options are compared too."""

    def __init__(self, optimizer_class: Any = SGD) -> None:
        super().__init__(params_of, optimizer_class, {"lr": 0.5})
        self.step()

    def check(self) -> None:
        assert shown(self.ours) == shown(self.plain)
        super().check()


class Counting(Optimizer):
    """Gradient descent that writes into its groups: in its constructor, in each step, and for each group added."""

    def __init__(self, params: Any, lr: float = 0.5, mode: str = "fresh") -> None:
        super().__init__(params, {"lr": lr, "mode": mode})
        for group in self.param_groups:
            group["mode"] = "constructed"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for group in self.param_groups:
            group["groups"] = len(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["steps"])
        return loss


class FailsOnTheLastRank(Counting):
    """Fails in a step with a negative learning rate, after it has written into its groups."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        if self.param_groups[0]["lr"] < 0 and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("a negative learning rate")
        return loss


def schedule_and_add(optimizer: Optimizer) -> None:
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group(extra(weight_decay=0.1))


def edit_and_add(optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.25, note="mine")
    optimizer.add_param_group(extra(lr=0.1))


def edit_in_a_closure(optimizer: Optimizer) -> None:
    def closure() -> float:
        optimizer.param_groups[0]["lr"] *= 0.5
        set_gradients(optimizer, 1)
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.25


def delete(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["note"] = "mine"
    optimizer.zero_grad()
    optimizer.step()
    del optimizer.param_groups[0]["note"]


def consolidate(optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.25, note="mine")
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict()


ACTS = [schedule_and_add, edit_and_add, edit_in_a_closure, delete, consolidate]


@distributed(2, 3)
@pytest.mark.parametrize("optimizer_class", [SGD, Counting])
@pytest.mark.parametrize("act", ACTS)
def test_options_are_those_of_the_plain_optimizer(
    world_size: int, act: Callable[[Any], None], optimizer_class: Any
) -> None:
    both = Both(optimizer_class)
    for optimizer in both.optimizers:
        act(optimizer)
    both.check()
    both.step()
    both.check()


@distributed(2, 3)
def test_a_step_that_fails_leaves_every_option_as_it_was(world_size: int) -> None:
    both = Both(FailsOnTheLastRank)
    both.ours.param_groups[0].update(lr=-0.25, note=["mine"])
    before = shown(both.ours)
    set_gradients(both.ours, 2)
    with pytest.raises((ValueError, PeerFailedError), match="a negative learning rate"):
        both.ours.step()
    assert shown(both.ours) == before


@distributed(2, 3)
def test_wrapping_the_model_leaves_every_option_as_it_was(world_size: int) -> None:
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), Counting, lr=0.5)
    rates = [0.5, 0.25]
    zero.param_groups[0].update(lr=0.25, mode="mine", rates=rates)
    del zero.param_groups[0]["groups"]
    before = shown(zero)
    sharded = ShardedDataParallel(model, zero)
    assert shown(zero) == before
    small_loss(sharded, 0).backward()
    zero.step()
    assert shown(zero) == [{**before[0], "steps": 1}]
    assert zero.param_groups[0]["rates"] is rates


@distributed(2)
@pytest.mark.parametrize("key", ["lr", "note"])
def test_options_changed_while_backward_steps_are_refused_and_stay(world_size: int, key: str) -> None:
    ddp = small_ddp(bucket_cap_mb=1e-5)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.5, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    zero.param_groups[0]["note"] = 0.5
    for step in range(3):
        zero.zero_grad()
        small_loss(ddp, step).backward()
        zero.step()
    handle = next(ddp.parameters()).register_hook(lambda _: zero.param_groups[0].update({key: 0.25}))
    small_loss(ddp, 3).backward()
    handle.remove()
    assert zero.param_groups[0][key] == 0.25
    with pytest.raises(RuntimeError, match=r"changed in backward\(\) or between backward\(\) and step\(\)"):
        zero.step()
    assert zero.param_groups[0][key] == 0.25


@distributed(2, 3)
def test_state_follows_options_and_options_may_be_set_in_any_order(world_size: int) -> None:
    zero = ZeroRedundancyOptimizer(params_of(), Adam, lr=0.5)
    zero.param_groups[0]["amsgrad"] = True
    for state in zero.sharded_state_dict(to_load=True)["state"].values():
        assert "max_exp_avg_sq" in state, "memory for state that is not there yet"
    both = Both()
    for optimizer in both.optimizers:
        for key in ("a", "b") if dist.get_rank() else ("b", "a"):
            optimizer.param_groups[0][key] = 1
    both.step()
    both.check()
