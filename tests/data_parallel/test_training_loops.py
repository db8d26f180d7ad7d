"""Training loops with ``ShardedDataParallel``, against DDP: accumulation, clipping, scaling, freezing."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.data_parallel import ROUNDING, SGD, Layers, Side, inputs_of
from tests.support.data_parallel_use import Batched, Checkpointed, closure, loss_of
from tests.support.ddp_training import Branching
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal, values

STEPS = 5


class Twins(Layers):
    """Two parameters have the same gradient, for which autograd uses the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(32))

    def forward(self, inputs: Tensor) -> Tensor:
        both = self.one.unsqueeze(0).squeeze(0) + self.other.view(4, 8)
        return super().forward(inputs) + torch.tanh(both @ inputs.T).sum()


class Searched(Layers):
    """Uses all of its parameters; a submodule's name makes ``Side`` let DDP look for unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Identity()


class Skipping(Layers):
    """Can leave out all of its layers."""

    def forward(self, inputs: Tensor, skip: bool = False) -> Tensor:
        return inputs * 2.0 if skip else super().forward(inputs)


# What one step is made of, for both sides. All begin with gradients let go.


def synchronise_twice(side: Side, step: int) -> None:
    for part in range(3):
        loss_of(side, 10 * step + part, branch=part == 1).backward()
    side.optimizer.step()


def no_sync_then_sync(side: Side, step: int) -> None:
    with side.model.no_sync():
        for part in range(2):
            loss_of(side, 10 * step + part, branch=dist.get_rank() == 0).backward()
    loss_of(side, 10 * step + 9, branch=True).backward()
    side.optimizer.step()


def mixture(side: Side, step: int) -> None:
    loss_of(side, 10 * step, branch=True).backward()
    with side.model.no_sync():
        loss_of(side, 10 * step + 1, branch=dist.get_rank() == 1).backward()
    loss_of(side, 10 * step + 2).backward()
    with side.model.no_sync():
        loss_of(side, 10 * step + 3).backward()
    loss_of(side, 10 * step + 4, branch=dist.get_rank() == 0).backward()
    side.optimizer.step()


def branch_in_no_sync_only(side: Side, step: int) -> None:
    with side.model.no_sync():
        loss_of(side, 10 * step, branch=step % 2 == 0 or dist.get_rank() == 1).backward()
    loss_of(side, 10 * step + 1).backward()
    side.optimizer.step()


def decided_by_the_forward(side: Side, step: int) -> None:
    with side.model.no_sync():
        inside = loss_of(side, 10 * step)
    inside.backward()
    outside = loss_of(side, 10 * step + 1)
    with side.model.no_sync():
        outside.backward()
    side.optimizer.step()


def no_sync_in_evaluation_mode(side: Side, step: int) -> None:
    """Fine-tuning with frozen statistics: gradients are computed although the model is not in training mode."""
    side.model.eval()
    no_sync_then_sync(side, step)


def optimizer_clips(side: Side, step: int) -> None:
    loss_of(side, step).backward()
    if side.ours:
        norm = side.zero.clip_grad_norm_(0.1)
        torch.testing.assert_close(side.zero.grad_norm(), norm.clamp(max=0.1))
    else:
        norm = nn.utils.clip_grad_norm_(side.params, 0.1)
    side.noted.append(norm)
    side.optimizer.step()


def model_clips(side: Side, step: int) -> None:
    loss_of(side, step).backward()
    order = float("inf") if step % 2 else 3.0
    if side.ours:
        side.noted.append(side.sharded.clip_grad_norm_(0.02, order))
        torch.testing.assert_close(side.sharded.grad_norm(order), side.noted[-1].clamp(max=0.02))
    else:
        side.noted.append(nn.utils.clip_grad_norm_(side.params, 0.02, order))
    side.optimizer.step()


def torch_clips(side: Side, step: int) -> None:
    loss_of(side, step).backward()
    order = float("inf") if step == 1 else 2.0
    side.noted.append(nn.utils.clip_grad_norm_(side.params, 0.1, order, foreach=[None, True, False][step % 3]))
    side.optimizer.step()


def scaled(side: Side, step: int) -> None:
    """In the third step one rank finds an infinity, in one element."""
    side.scaler = side.scaler or torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    loss = loss_of(side, step)
    if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
        loss = loss + next(side.module.parameters()).view(-1)[3] * float("inf")
    before = values(side.module.parameters())
    side.scaler.scale(loss).backward()
    side.scaler.unscale_(side.optimizer)
    side.scaler.step(side.optimizer)
    side.scaler.update()
    side.noted.append(torch.tensor(side.scaler.get_scale()))
    moved = not torch.equal(before[0], next(side.module.parameters()))
    assert moved == (step != 2), f"step {step}"


def frozen_and_thawed(side: Side, step: int) -> None:
    weight = next(side.module.parameters())
    weight.requires_grad_(step not in (1, 2))
    loss_of(side, step).backward()
    assert (weight.grad is None) == (step in (1, 2))
    side.optimizer.step()


def frozen_after_no_sync(side: Side, step: int) -> None:
    """DDP reduces what was accumulated before, if it looks for unused parameters; the optimizer steps on it."""
    weight = next(side.module.parameters())
    weight.requires_grad_(True)
    with side.model.no_sync():
        loss_of(side, 10 * step).backward()
    weight.requires_grad_(False)
    before = values([weight])
    loss_of(side, 10 * step + 1).backward()
    side.optimizer.step()
    assert not torch.equal(weight, before[0])


def zeroed_and_frozen_after_no_sync(side: Side, step: int) -> None:
    """Zeros in place are stepped on (momentum, decay), and not what an earlier pass had reduced."""
    weight = next(side.module.parameters())
    weight.requires_grad_(True)
    loss_of(side, 10 * step).backward()
    with side.model.no_sync():
        loss_of(side, 10 * step + 1).backward()
    side.module.zero_grad(set_to_none=False)
    weight.requires_grad_(False)
    loss_of(side, 10 * step + 2).backward()
    side.optimizer.step()


def scheduled(side: Side, step: int) -> None:
    side.scheduler = side.scheduler or StepLR(side.optimizer, step_size=2, gamma=0.5)
    loss_of(side, step).backward()
    side.optimizer.step()
    side.scheduler.step()
    side.noted.append(torch.tensor(side.optimizer.param_groups[0]["lr"]))


def forward_twice(side: Side, step: int) -> None:
    (loss_of(side, 10 * step) + loss_of(side, 10 * step + 1)).backward()
    side.optimizer.step()


def evaluate_between(side: Side, step: int) -> None:
    loss = loss_of(side, step)
    with torch.no_grad():
        loss_of(side, 99)
    loss.backward()
    side.optimizer.step()


def gradient_of_an_input(side: Side, step: int) -> None:
    """A call of ``torch.autograd.grad`` between ``backward()`` and ``step()`` changes nothing."""
    loss_of(side, step).backward()
    torch.autograd.grad(loss_of(side, step + 50), list(side.module.parameters())[:1])
    side.optimizer.step()


def gradients_that_one_rank_asks_for(side: Side, step: int) -> None:
    """``torch.autograd.grad`` through the model reduces nothing, so that other ranks need not know of it."""
    inputs = inputs_of(dist.get_rank(), step).requires_grad_()
    outputs = side.model(inputs)
    if dist.get_rank() == step % dist.get_world_size():
        for wanted in ([inputs], [outputs], side.params[:2], [inputs, *side.params]):
            side.noted += values(torch.autograd.grad(outputs.square().sum(), wanted, retain_graph=True))
    outputs.square().mean().backward()
    side.optimizer.step()


def two_graphs(side: Side, step: int) -> None:
    """Two forward passes, then their two backward passes: the same as one of the sum."""
    losses = [loss_of(side, 10 * step), loss_of(side, 10 * step + 1)]
    for loss in losses if side.ours else [losses[0] + losses[1]]:
        loss.backward()
    side.optimizer.step()


def loss_without_parameters(side: Side, step: int) -> None:
    """On one rank; DDP needs a loss of 0 there."""
    skip = dist.get_rank() == step % dist.get_world_size()
    inputs = inputs_of(dist.get_rank(), step).requires_grad_()
    loss = side.model(inputs, skip if side.ours else False).square().mean()
    (loss * 0.0 if skip and not side.ours else loss).backward()
    side.optimizer.step()


def graph_of_the_pass(side: Side, step: int) -> None:
    """Reduced gradients have no graph; torch warns that a caller who asks for one must release the gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        loss_of(side, step).backward(create_graph=side.ours)
    assert not any(param.grad is not None and param.grad.requires_grad for param in side.params)
    side.optimizer.step()


def hook_that_is_registered_late(side: Side, step: int) -> None:
    """It sees the local gradient, and changes it."""

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        side.noted.append(param.grad.detach().clone())
        param.grad.clamp_(-1e-3, 1e-3)

    if step == 1:
        side.params[2].register_post_accumulate_grad_hook(clamp)
    loss_of(side, step).backward()
    side.optimizer.step()


def scaled_by_hand(side: Side, step: int) -> None:
    loss_of(side, step).backward()
    for param in side.params:
        if param.grad is not None:
            param.grad.mul_(0.5).div_(2.0)
    side.optimizer.step()


def interrupted(side: Side, step: int) -> None:
    """A backward pass that fails before it reaches a parameter leaves nothing behind."""
    loss = loss_of(side, step)
    failing = loss * 1.0
    failing.register_hook(_fail)
    with pytest.raises(LookupError):
        failing.backward(retain_graph=True)
    side.optimizer.zero_grad()
    loss_of(side, step).backward()
    side.optimizer.step()


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@dataclass(frozen=True)
class Use:
    """What to do in every step, with which model and optimizer; exact is bit by bit with two ranks."""

    step: Callable[[Side, int], None]
    model: Callable[[], nn.Module] = Branching
    exact: bool = True
    set_to_none: bool = True
    optimizer: type[Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: dict(SGD))

    @property
    def name(self) -> str:
        return f"{self.step.__name__}{'' if self.set_to_none else ', zeroed'}, {self.model.__name__}"


USES = (
    Use(synchronise_twice, exact=False),
    Use(synchronise_twice, exact=False, set_to_none=False),
    Use(no_sync_then_sync),
    Use(no_sync_then_sync, set_to_none=False),
    Use(no_sync_then_sync, Checkpointed),
    Use(mixture, exact=False),
    Use(mixture, exact=False, set_to_none=False),
    Use(branch_in_no_sync_only),
    Use(branch_in_no_sync_only, set_to_none=False),
    Use(decided_by_the_forward),
    Use(no_sync_in_evaluation_mode),
    Use(optimizer_clips, exact=False),
    Use(model_clips, exact=False),
    Use(torch_clips, exact=False),
    Use(scaled, options={"lr": 0.1}),
    Use(scaled, Batched),
    Use(frozen_and_thawed),
    Use(frozen_after_no_sync),
    Use(frozen_after_no_sync, Searched),
    Use(frozen_after_no_sync, Searched, set_to_none=False),
    Use(zeroed_and_frozen_after_no_sync),
    Use(zeroed_and_frozen_after_no_sync, Searched),
    Use(scheduled),
    Use(closure),
    Use(forward_twice),
    Use(evaluate_between),
    Use(gradient_of_an_input),
    Use(gradients_that_one_rank_asks_for, Layers),
    Use(two_graphs, Layers, exact=False),
    Use(loss_without_parameters, Skipping),
    Use(graph_of_the_pass, Layers),
    Use(hook_that_is_registered_late, Layers),
    Use(scaled_by_hand),
    Use(interrupted),
    Use(no_sync_then_sync, Batched, exact=False),
)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.name)
@distributed(2, 3)
def test_use_equals_plain_ddp(world_size: int, use: Use) -> None:
    plain, ours = (Side(which, use.model, use.optimizer, use.options) for which in (False, True))
    before = values(plain.params)
    tolerance = 0.0 if use.exact and world_size == 2 else 2 * ROUNDING
    for step in range(STEPS):
        for side in (plain, ours):
            side.optimizer.zero_grad(use.set_to_none)
            use.step(side, step)
        assert_equal(ours.params, plain.params, f"{use.name}, step {step}", tolerance)
    assert not torch.equal(before[0], plain.params[0]), "the reference does not train"
    assert len(ours.noted) == len(plain.noted)
    for mine, theirs in zip(ours.noted, plain.noted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert_replicas_equal(ours.params)


@distributed(2, 3)
def test_gradients_that_share_memory_are_accumulated_apart(world_size: int) -> None:
    """torch itself adds to such memory once for each parameter, so the reference is computed by hand."""
    ours = Side(True, Twins, options={"lr": 0.1})
    by_hand = copy.deepcopy(ours.module)
    params = list(by_hand.parameters())
    for step in range(3):
        ours.optimizer.zero_grad()
        totals = [torch.zeros_like(param) for param in params]
        for part in range(3):
            with ours.model.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(ours, 10 * step + part).backward()
            loss = by_hand(inputs_of(dist.get_rank(), 10 * step + part)).square().mean()
            for total, gradient in zip(totals, torch.autograd.grad(loss, params), strict=True):
                total += gradient
        ours.optimizer.step()
        for param, total in zip(params, totals, strict=True):
            dist.all_reduce(total)
            param.data.sub_(total, alpha=0.1 / world_size)
        assert_equal(ours.params, params, f"step {step}", ROUNDING)


class Marked(torch.autograd.Function):
    """A part of the graph that tells when it is let go."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.mark = threading.Event()
        Marked.mark = weakref.ref(ctx.mark)
        return inputs.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0]

    mark: weakref.ref[threading.Event]


@distributed(2)
def test_a_graph_is_let_go_with_its_outputs(world_size: int) -> None:
    """By counting, without waiting for the garbage collector."""
    ours = Side(True, Layers)
    gc.collect()
    gc.disable()
    try:
        for use in (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, ours.params), lambda _: None):
            outputs = ours.model(Marked.apply(inputs_of(dist.get_rank(), 0).requires_grad_()))
            use(outputs.sum())
            assert Marked.mark() is not None
            del outputs
            assert Marked.mark() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("zeroed", [False, True])
@distributed(2)
def test_a_backward_pass_that_fails_leaves_the_gradients_it_did_not_reach(world_size: int, zeroed: bool) -> None:
    """Gradients that the module has zeroed after it, of which the optimizer is not told, stay zero."""
    side = Side(True, Layers)
    assert isinstance(side.model, ShardedDataParallel)
    loss_of(side, 0).backward()
    before = side.model.grad_norm()

    def fail(_gradient: Tensor) -> None:
        raise RuntimeError("no more")

    output = side.model(inputs_of(dist.get_rank(), 1))
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        output.square().mean().backward()
    if zeroed:
        side.model.zero_grad()
    side.model(inputs_of(dist.get_rank(), 2))  # ends the interrupted pass
    assert side.model.grad_norm() == (0.0 if zeroed else before)


@distributed(2, 3)
def test_a_gradient_shows_this_ranks_range(world_size: int) -> None:
    plain, ours = Side(False, Layers), Side(True, Layers)
    for side in (plain, ours):
        loss_of(side, 0).backward()
    seen = torch.zeros(())
    for spec, mine, theirs in zip(ours.zero.layout.params, ours.params, plain.params, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.shape == mine.shape
        own = [shard for shard in ours.zero.layout.shards_of(spec.index) if shard.owner == ours.zero.rank]
        local: Tensor = mine.grad.local  # type: ignore[attr-defined]
        expected = [theirs.grad.reshape(-1)[shard.start : shard.stop] for shard in own]
        assert local.numel() == sum(part.numel() for part in expected)
        seen += local.numel()
        for part in expected:
            torch.testing.assert_close(local, part)
        with pytest.raises(RuntimeError, match="only this rank's range"):
            mine.grad.sum()
        with pytest.raises(RuntimeError, match="over some dimensions"):
            torch.linalg.vector_norm(mine.grad, dim=0)
        assert "ShardGrad(" in repr(mine.grad)
    dist.all_reduce(seen)
    assert int(seen) == sum(param.numel() for param in ours.params)


@distributed(2)
def test_zeroing_the_gradients_of_one_optimizer_keeps_those_of_another(world_size: int) -> None:
    def norm_of_second(zeroes_first: bool) -> float:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        optimizers = [ZeroRedundancyOptimizer(part.parameters(), torch.optim.SGD, lr=1.0) for part in module]
        model = ShardedDataParallel(module, optimizers)
        model(torch.ones(2, 4)).sum().backward()
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        if zeroes_first:
            optimizers[0].zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        return float(optimizers[1].grad_norm())

    assert norm_of_second(True) == norm_of_second(False)
