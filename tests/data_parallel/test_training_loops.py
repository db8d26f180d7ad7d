"""Training loops at levels 2 and 3, against DDP: accumulation, clipping, scaling, freezing."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.data_parallel import (
    ROUNDING,
    SGD,
    Batched,
    Branching,
    Checkpointed,
    Layers,
    Run,
    Searched,
    inputs_of,
    side_of,
)
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


class Skipping(Layers):
    """Can leave out all of its layers."""

    def forward(self, inputs: Tensor, skip: bool = False) -> Tensor:
        return inputs * 2.0 if skip else super().forward(inputs)


# What each step does before ``optimizer.step()``, for both sides. All begin with gradients let go. A function that
# returns True has stepped.


def no_sync_then_sync(side: Run, step: int) -> None:
    with side.model.no_sync():
        for part in range(2):
            side.loss(10 * step + part, dist.get_rank() == 0).backward()
    side.loss(10 * step + 9, True).backward()


def mixture(side: Run, step: int) -> None:
    side.loss(10 * step, True).backward()
    with side.model.no_sync():
        side.loss(10 * step + 1, dist.get_rank() == 1).backward()
    side.loss(10 * step + 2).backward()
    with side.model.no_sync():
        side.loss(10 * step + 3).backward()
    side.loss(10 * step + 4, dist.get_rank() == 0).backward()


def decided_by_the_forward(side: Run, step: int) -> None:
    with side.model.no_sync():
        inside = side.loss(10 * step)
    inside.backward()
    outside = side.loss(10 * step + 1)
    with side.model.no_sync():
        outside.backward()


def clips(side: Run, step: int) -> None:
    """With the model's method, the optimizer's, or torch's function."""
    side.loss(step).backward()
    order = (3.0, float("inf"), 2.0)[step % 3]
    if step == 1 and side.zeros:
        side.noted.append(side.zero.clip_grad_norm_(0.02, order))
    elif step in (2, 4):
        side.noted.append(nn.utils.clip_grad_norm_(side.params, 0.02, order, foreach=step == 2))
    else:
        side.noted.append(side.clip(0.02, order))
    if side.zeros:
        torch.testing.assert_close(side.zero.grad_norm(order), side.noted[-1].clamp(max=0.02))


def scaled(side: Run, step: int) -> bool:
    """In the third step one rank finds an infinity, in one element."""
    side.scaler = side.scaler or torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    loss = side.loss(step)
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
    return True


def frozen_after_no_sync(side: Run, step: int) -> bool:
    """DDP reduces what was accumulated before, if it looks for unused parameters; the optimizer steps on it."""
    weight = next(side.module.parameters())
    weight.requires_grad_(True)
    with side.model.no_sync():
        side.loss(10 * step).backward()
    weight.requires_grad_(False)
    before = values([weight])
    side.loss(10 * step + 1).backward()
    side.optimizer.step()
    assert not torch.equal(weight, before[0])
    return True


def zeroed_and_frozen_after_no_sync(side: Run, step: int) -> None:
    """Zeros in place are stepped on (momentum, decay), and not what an earlier pass had reduced."""
    weight = next(side.module.parameters())
    weight.requires_grad_(True)
    side.loss(10 * step).backward()
    with side.model.no_sync():
        side.loss(10 * step + 1).backward()
    side.module.zero_grad(set_to_none=False)
    weight.requires_grad_(False)
    side.loss(10 * step + 2).backward()


def several_graphs(side: Run, step: int) -> None:
    """Forward passes, also without gradients, and then their backward passes: the same as one of the sum."""
    losses = [side.loss(10 * step + number) for number in range(3)]
    with torch.no_grad():
        side.loss(99)
    for loss in (losses[0], losses[1] + losses[2]) if side.zeros else [sum(losses, torch.zeros(()))]:
        loss.backward()


def gradients_that_one_rank_asks_for(side: Run, step: int) -> None:
    """``torch.autograd.grad`` through the model reduces nothing, so that other ranks need not know of it."""
    inputs = inputs_of(dist.get_rank(), step).requires_grad_()
    outputs = side.model(inputs)
    if dist.get_rank() == step % dist.get_world_size():
        for wanted in ([inputs], [outputs], side.params[:2], [inputs, *side.params]):
            side.noted += values(torch.autograd.grad(outputs.square().sum(), wanted, retain_graph=True))
    outputs.square().mean().backward()
    torch.autograd.grad(side.loss(step + 50), side.params[:1])


def loss_without_parameters(side: Run, step: int) -> None:
    """On one rank; DDP needs a loss of 0 there."""
    skip = dist.get_rank() == step % dist.get_world_size()
    inputs = inputs_of(dist.get_rank(), step).requires_grad_()
    loss = side.model(inputs, skip if side.zeros else False).square().mean()
    (loss * 0.0 if skip and not side.zeros else loss).backward()


def hook_that_is_registered_late(side: Run, step: int) -> None:
    """It sees the local gradient, and changes it."""

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        side.noted.append(param.grad.detach().clone())
        param.grad.clamp_(-1e-3, 1e-3)

    if step == 1:
        side.params[2].register_post_accumulate_grad_hook(clamp)
    side.loss(step).backward()


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@dataclass(frozen=True)
class Use:
    """What to do in every step, with which model and optimizer; exact is bit by bit with two ranks.

    At level 2 too, if it is about gradients that are there already, or that are not reduced.
    """

    step: Callable[[Run, int], object]
    model: Callable[[], nn.Module] = Branching
    exact: bool = True
    set_to_none: bool = True
    levels: tuple[int, ...] = (3,)
    options: dict[str, Any] = field(default_factory=lambda: dict(SGD))

    @property
    def name(self) -> str:
        return f"{self.step.__name__}{'' if self.set_to_none else ', zeroed'}, {self.model.__name__}"


BOTH = (2, 3)
USES = (
    Use(no_sync_then_sync, levels=BOTH),
    Use(no_sync_then_sync, set_to_none=False, levels=BOTH),
    Use(no_sync_then_sync, Checkpointed),
    Use(no_sync_then_sync, Batched, exact=False),
    Use(mixture, exact=False, levels=BOTH),
    Use(mixture, exact=False, set_to_none=False, levels=BOTH),
    Use(decided_by_the_forward),
    Use(clips, exact=False, levels=BOTH),
    Use(scaled, levels=BOTH, options={"lr": 0.1}),
    Use(scaled, Batched, levels=BOTH),
    Use(frozen_after_no_sync, levels=BOTH),
    Use(frozen_after_no_sync, Searched),
    Use(frozen_after_no_sync, Searched, set_to_none=False),
    Use(zeroed_and_frozen_after_no_sync),
    Use(zeroed_and_frozen_after_no_sync, Searched),
    Use(gradients_that_one_rank_asks_for, Layers, levels=BOTH),
    Use(several_graphs, Layers, exact=False),
    Use(loss_without_parameters, Skipping),
    Use(hook_that_is_registered_late, Layers, levels=BOTH),
)


AT_LEVELS = [(use, level) for use in USES for level in use.levels]


@pytest.mark.parametrize("case", AT_LEVELS, ids=lambda case: f"{case[0].name}, level {case[1]}")
@distributed(2, 3)
def test_use_equals_plain_ddp(world_size: int, case: tuple[Use, int]) -> None:
    use, level = case
    plain, ours = (side_of(which, use.model, options=use.options, level=level) for which in (False, True))
    before = values(plain.params)
    schedulers = [StepLR(side.optimizer, step_size=2, gamma=0.5) for side in (plain, ours)]
    tolerance = 0.0 if use.exact and world_size == 2 else 4 * ROUNDING
    for step in range(STEPS):
        for side in (plain, ours):
            side.optimizer.zero_grad(use.set_to_none)
            if not use.step(side, step):
                side.optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_equal(ours.params, plain.params, f"{use.name}, step {step}", tolerance)
        have = [[param.grad is not None for param in side.params] for side in (ours, plain)]
        assert have[0] == have[1], f"{use.name}, step {step}"
    assert not torch.equal(before[0], plain.params[0]), "the reference does not train"
    assert len(ours.noted) == len(plain.noted)
    for mine, theirs in zip(ours.noted, plain.noted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert_replicas_equal(ours.params)


@distributed(2, 3)
def test_gradients_that_share_memory_are_accumulated_apart(world_size: int) -> None:
    """torch itself adds to such memory once for each parameter, so the reference is computed by hand."""
    ours = side_of(True, Twins, options={"lr": 0.1})
    by_hand = copy.deepcopy(ours.module)
    params = list(by_hand.parameters())
    for step in range(3):
        ours.optimizer.zero_grad()
        totals = [torch.zeros_like(param) for param in params]
        for part in range(3):
            with ours.model.no_sync() if part < 2 else contextlib.nullcontext():
                ours.loss(10 * step + part).backward()
            loss = by_hand(inputs_of(dist.get_rank(), 10 * step + part)).square().mean()
            for total, gradient in zip(totals, torch.autograd.grad(loss, params), strict=True):
                total += gradient
        ours.optimizer.step()
        for param, total in zip(params, totals, strict=True):
            dist.all_reduce(total)
            param.data.sub_(total, alpha=0.1 / world_size)
        assert_equal(ours.params, params, f"step {step}", 2 * ROUNDING)


@distributed(2)
def test_a_graph_is_let_go_with_its_outputs(world_size: int) -> None:
    """By counting, without waiting for the garbage collector."""
    ours = side_of(True, Layers)
    gc.collect()
    gc.disable()
    try:
        for use in (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, ours.params), lambda _: None):
            inputs = inputs_of(dist.get_rank(), 0).requires_grad_().clone()
            mark = threading.Event()
            node: Any = inputs.grad_fn
            node.metadata["mark"] = mark
            alive, outputs = weakref.ref(mark), ours.model(inputs)
            del inputs, mark, node
            use(outputs.sum())
            assert alive() is not None
            del outputs
            assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("zeroed", [False, True])
@distributed(2)
def test_a_backward_pass_that_fails_leaves_the_gradients_it_did_not_reach(world_size: int, zeroed: bool) -> None:
    """Gradients that the module has zeroed after it, of which the optimizer is not told, stay zero."""
    side = side_of(True, Layers)
    side.loss(0).backward()
    before = side.zero.grad_norm()
    outputs = side.model(inputs_of(dist.get_rank(), 1))
    outputs.register_hook(_fail)
    with pytest.raises(LookupError):
        outputs.square().mean().backward()
    if zeroed:
        side.model.zero_grad()
    side.model(inputs_of(dist.get_rank(), 2))  # ends the interrupted pass
    assert side.zero.grad_norm() == (0.0 if zeroed else before)
    plain = side_of(False, Layers)
    for each in (side, plain):
        each.iterate(3)
    assert_equal(side.params, plain.params, "a step after it")


READS: tuple[Callable[[Tensor], object], ...] = (
    torch.sum,
    lambda gradient: gradient[0],
    lambda gradient: torch.empty_like(torch.zeros(gradient.shape)).copy_(gradient),
    lambda gradient: gradient.add_(1.0),
    lambda gradient: gradient.mul_(torch.ones(gradient.shape)),
)


@distributed(2, 3)
def test_a_gradient_shows_this_ranks_range(world_size: int) -> None:
    plain, ours = side_of(False, Layers), side_of(True, Layers)
    for side in (plain, ours):
        side.loss(0).backward()
    owned = {id(each.param): slice(each.shard.start, each.shard.stop) for each in ours.zero.engine.inner.owned}
    seen = torch.zeros(())
    for param, other in zip(ours.params, plain.params, strict=True):
        assert isinstance(param.grad, ShardGrad)
        assert other.grad is not None
        assert param.grad.shape == param.shape
        torch.testing.assert_close(param.grad.local, other.grad.flatten()[owned.get(id(param), slice(0))])
        seen += param.grad.local.numel()
        for read in READS:
            with pytest.raises(RuntimeError, match=r"only this rank's range of it is here \(param.grad.local\)"):
                read(param.grad)
        with pytest.raises(RuntimeError, match="over some dimensions"):
            torch.linalg.vector_norm(param.grad, dim=0)
        assert "ShardGrad(" in repr(param.grad)
    dist.all_reduce(seen)
    assert int(seen) == sum(param.numel() for param in ours.params)


@pytest.mark.parametrize("zeroes_first", [False, True])
@distributed(2)
def test_zeroing_the_gradients_of_one_optimizer_keeps_those_of_another(world_size: int, zeroes_first: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plain = copy.deepcopy(module)
    optimizers = [ZeroRedundancyOptimizer(part.parameters(), torch.optim.SGD, lr=1.0) for part in module]
    model = ShardedDataParallel(module, optimizers)
    model(torch.ones(2, 4)).sum().backward()
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    if zeroes_first:
        optimizers[0].zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    (3 * plain(torch.ones(2, 4)).sum()).backward()
    gradients = [param.grad for param in plain.parameters() if param.grad is not None]
    for optimizer, gradient, passes in zip(optimizers, gradients, (1 if zeroes_first else 3, 3), strict=True):
        torch.testing.assert_close(optimizer.grad_norm(), gradient.norm() * passes / 3)
