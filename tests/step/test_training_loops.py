"""Training scripts beyond plain steps: closures, schedulers, hooks, scalers, freezing, groups, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from onecopy import ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_ddp,
    small_loss,
    small_model,
    values,
)

Modes = dict[str, Any]

CUT_IN_BUCKETS: Modes = {"shard_by": "element", "parameters_as_bucket_view": True}
MODES: dict[str, Modes] = {
    "whole": {"shard_by": "parameter"},
    "cut": {"shard_by": "element"},
    "cut in buckets": CUT_IN_BUCKETS,
}
ROUNDING = 1e-6
"""More than two ranks: the order in which gradients are added is the process group's affair."""

Loop = Callable[[DistributedDataParallel, Optimizer], object]


def ours(params: Any, optimizer: type[Optimizer], mode: Modes | None = None, **options: Any) -> ZeroRedundancyOptimizer:
    elementwise = True if issubclass(optimizer, Descent) else None
    return ZeroRedundancyOptimizer(params, optimizer, elementwise=elementwise, **(mode or {}), **options)


def assert_parity(
    loop: Loop, optimizer: type[Optimizer], mode: Modes, ddp_options: dict[str, Any] | None = None, **options: Any
) -> None:
    """Run a training loop with the plain and with the sharded optimizer.

    What it returns, the parameters and the state dict must be equal.
    """
    plain, sharded = small_ddp(**(ddp_options or {})), small_ddp(**(ddp_options or {}))
    reference = optimizer(plain.parameters(), **options)
    expected = loop(plain, reference)
    zero = ours(sharded.parameters(), optimizer, mode, **options)
    assert loop(sharded, zero) == expected
    tolerance = 0.0 if dist.get_world_size() <= 2 else ROUNDING
    assert_equal(sharded.parameters(), plain.parameters(), "parameters", tolerance)
    assert_replicas_equal(sharded.parameters())
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_same_tree(zero.state_dict(), reference.state_dict(), "state dict", tolerance)


def fill_gradients(params: Any, scale: float = 1.0) -> None:
    """The same gradients on every rank, another for each parameter."""
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, scale * (index + 1) / 10)


class Descent(Optimizer):
    """Gradient descent with everything a class may add: ``step`` arguments, and new keys in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["from_init"] = "here"

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend(scale)
        return loss

    @torch.no_grad()
    def descend(self, scale: float) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * scale)


class NoClosure(Descent):
    """A class whose ``step`` takes nothing."""

    def step(self) -> None:  # type: ignore[override]
        self.descend(1.0)


# Training loops, each beside the plain optimizer


def one_cycle(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[Any]:
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=8, cycle_momentum=True)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        small_loss(ddp, step).backward()
        optimizer.step()
        scheduler.step()
        group = optimizer.param_groups[0]
        seen.append([group["lr"], group.get("momentum"), group.get("betas"), scheduler.get_last_lr()])
    assert len({row[0] for row in seen}) > 1
    return seen


def scaled(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[tuple[float, bool]]:
    """All ranks skip the same steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(7):
        optimizer.zero_grad()
        loss = small_loss(ddp, step)
        if step in (1, 5) and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")  # one rank overflows; the all-reduce spreads it
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
        before = values(ddp.parameters())
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        seen.append((scaler.get_scale(), moved))
    assert [moved for _, moved in seen] == [step not in (1, 5) for step in range(7)]
    assert [scale for scale, _ in seen] == [1024.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0]
    return seen


def closures(ddp: DistributedDataParallel, optimizer: Optimizer) -> Any:
    losses = []
    for step in range(4):

        def closure(step: int = step) -> float:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = small_loss(ddp, step)
            loss.backward()
            return loss.item()

        losses.append(optimizer.step(closure))
    assert optimizer.step() is None
    return losses if dist.get_world_size() <= 2 else []


def freezing(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    params = list(ddp.parameters())
    for step in range(9):
        # Everything can be frozen but the last layer: DDP needs something to synchronise.
        params[0].requires_grad_(step not in (2, 3, 4))
        params[1].requires_grad_(step < 4)
        params[3].requires_grad_(step >= 3)
        optimizer.zero_grad()
        small_loss(ddp, step).backward()
        before = values(params)
        optimizer.step()
        for param, value in zip(params, before, strict=True):
            assert torch.equal(param, value) == (param.grad is None) == (not param.requires_grad)


def with_keywords(ddp: DistributedDataParallel, optimizer: Any) -> None:
    for scale in (3.0, 0.5):
        fill_gradients(ddp.parameters())
        optimizer.step(scale=scale)


def with_inner_hooks(ddp: DistributedDataParallel, optimizer: Any) -> list[float]:
    """Hooks on the inner optimizer fire, and may change its arguments."""
    inner, seen = getattr(optimizer, "optim", optimizer), list[float]()
    inner.register_step_pre_hook(lambda _which, args, kwargs: (args, {**kwargs, "scale": 2.0}))
    inner.register_step_post_hook(lambda _which, _args, kwargs: seen.append(kwargs["scale"]))
    fill_gradients(ddp.parameters())
    optimizer.step()
    return seen


def adding_a_group(ddp: DistributedDataParallel, optimizer: Any) -> list[Any]:
    late = small_model(seed=4)
    for step in range(6):
        if step == 3:
            before = getattr(optimizer, "layout", None)
            held = list(optimizer.state.values())
            optimizer.add_param_group({"params": late.parameters(), "lr": 0.05})
            if before is not None:
                assert optimizer.layout.shards[: len(before.shards)] == before.shards
                assert [group["lr"] for group in optimizer.optim.param_groups] == [0.1, 0.05]
            assert all(any(state is each for each in optimizer.state.values()) for state in held)
        fill_gradients((*ddp.parameters(), *late.parameters()), 1.0 + step)
        optimizer.step()
    return [param.tolist() for param in late.parameters()]


def adding_keys(ddp: DistributedDataParallel, optimizer: Optimizer) -> list[Any]:
    optimizer.add_param_group({"params": small_model(seed=4).parameters(), "lr": 0.2})
    seen = []
    for _ in range(3):
        fill_gradients(ddp.parameters())
        optimizer.step()
        seen.append([(group.get("from_init"), group["steps"]) for group in optimizer.param_groups])
        optimizer.param_groups[0]["steps"] += 7
    return seen


def compiled(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    """The step itself, and a function that calls it; the plain optimizer is not compiled."""

    def step() -> Tensor:
        optimizer.step()
        return torch.ones(1) + 1

    functions: list[Callable[[], Any]] = [optimizer.step, step]
    for function in functions:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            function = torch.compile(function, backend="eager")
        for _ in range(2):
            fill_gradients(ddp.parameters())
            function()


SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "lr": 1e-2}

LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "closures": (closures, ADAMW),
    "one cycle, SGD": (one_cycle, SGD),
    "one cycle, AdamW": (one_cycle, ADAMW),
    "scaler and clipping, fused": (scaled, {**ADAMW, "fused": True}),
    "freezing": (freezing, {**ADAMW, "weight_decay": 0.1, "ddp_options": {"find_unused_parameters": True}}),
    "arguments of step": (with_keywords, {"optimizer": Descent}),
    "hooks on the inner optimizer": (with_inner_hooks, {"optimizer": Descent}),
    "keys that the class adds to its groups": (adding_keys, {"optimizer": Descent}),
    "a group added later": (adding_a_group, SGD),
    "a compiled step": (compiled, ADAMW),
}


@pytest.mark.parametrize("name", LOOPS)
@distributed(1, 2, 3)
def test_a_loop_equals_the_plain_optimizer(world_size: int, name: str) -> None:
    loop, options = LOOPS[name]
    for mode in MODES.values() if world_size == 2 else [CUT_IN_BUCKETS]:
        assert_parity(loop, mode=mode, **options)


# Closures


@distributed(2)
def test_a_class_whose_step_takes_no_closure_has_it_evaluated_first(world_size: int) -> None:
    model, reference = small_model(), small_model()
    optimizer = ours(model.parameters(), NoClosure, lr=0.1)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        fill_gradients(model.parameters())
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert calls == [True]
    fill_gradients(reference.parameters())
    NoClosure(reference.parameters(), lr=0.1).step()
    assert_equal(model.parameters(), reference.parameters(), "parameters")
    assert optimizer.step() is None


# Hooks


@pytest.mark.parametrize("everywhere", [False, True], ids=["of this instance", "global"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Descent, NoClosure])
@distributed(2)
def test_step_hooks_see_this_instance_exactly_once_per_step(
    world_size: int, optimizer_class: type[Optimizer], everywhere: bool
) -> None:
    model = small_model()
    optimizer = ours(model.parameters(), optimizer_class, lr=0.1)
    seen: list[tuple[str, Optimizer]] = []
    before = register_optimizer_step_pre_hook if everywhere else optimizer.register_step_pre_hook
    after = register_optimizer_step_post_hook if everywhere else optimizer.register_step_post_hook
    first = before(lambda which, *_: seen.append(("pre", which)))
    last = after(lambda which, *_: seen.append(("post", which)))
    try:
        for _ in range(2):
            fill_gradients(model.parameters())
            optimizer.step()
    finally:
        first.remove()
        last.remove()
    assert seen == [("pre", optimizer), ("post", optimizer)] * 2


# Gradients: zeroing, scaling, clipping, accumulating, missing


@distributed(2)
def test_zero_grad_clears_the_gradients_of_every_parameter(world_size: int) -> None:
    model = small_model()
    optimizer = ours(model.parameters(), torch.optim.AdamW, CUT_IN_BUCKETS, lr=0.1)
    fill_gradients(model.parameters())
    optimizer.step()
    kept = [param.grad for param in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    for param, gradient in zip(model.parameters(), kept, strict=True):
        assert gradient is not None
        assert param.grad is gradient
        assert not gradient.any()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@distributed(2)
def test_a_step_makes_backward_through_an_older_graph_raise(world_size: int, mode: Modes, fused: bool) -> None:
    """On all ranks alike, also where torch's fused kernels write unseen by autograd."""
    model = small_model()
    optimizer = ours(model.parameters(), torch.optim.AdamW, mode, lr=0.1, fused=fused)
    old = [(param * torch.ones_like(param, requires_grad=True)).sum() for param in model.parameters()]
    fill_gradients(model.parameters())
    without = list(model.parameters())[-1]
    without.grad = None
    optimizer.step()
    for output in old[:-1]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
    old[-1].backward()  # a parameter without a gradient was not changed, so its graph is still good


@distributed(2)
def test_groups_edited_by_hand_are_refused(world_size: int) -> None:
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = ours(model.parameters(), torch.optim.SGD, lr=0.1)
    for param in (other.weight, model.weight):  # another one, and one a second time
        optimizer.param_groups[0]["params"].append(param)
        with pytest.raises(RuntimeError, match=r"edited by hand.*add_param_group"):
            optimizer.step()
        optimizer.param_groups[0]["params"].pop()
