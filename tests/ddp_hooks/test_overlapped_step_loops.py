"""Updates inside the backward pass in training loops: without ``step()``, with several passes, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecopy import hook_with_zero_step, hook_with_zero_step_interleaved
from tests.support.ddp_training import (
    ELEMENT,
    STATIC,
    UNUSED,
    VIEW,
    Branching,
    assert_same_state,
    assert_same_values,
    branching_loss,
    train_both,
)
from tests.support.harness import distributed
from tests.support.models import (
    small_inputs,
    small_loss,
)
from tests.support.overlapped_step import HOOKS, Case, MakeHook, Run, overlapped_run, plain_run
from tests.support.resnet import ResNet50

pytestmark = pytest.mark.usefixtures("fresh_processes")


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

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)) @ self.second.weight.detach())
        return outputs


@HOOKS
@distributed(2)
def test_a_weight_needed_later_in_the_same_pass_is_used_unchanged(world_size: int, make_hook: MakeHook) -> None:
    case = Case(model=ReadsTwice, ddp={"bucket_cap_mb": 5e-4})
    train_both(overlapped_run(case, make_hook), plain_run(case), range(5))


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
    run.zero.clip_grad_norm_(0.01)


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
