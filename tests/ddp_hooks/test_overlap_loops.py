"""Updates inside the backward pass in loops: what is told, what is refused, failures, saved state."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from tests.support.data_parallel import (
    BRANCHING,
    COUNTERS,
    MOMENTUM,
    OVERLAPS,
    STATIC,
    VIEW,
    Case,
    MakeHook,
    Part,
    Run,
    assert_same_state,
    assert_same_values,
    overlapped_run,
    plain_run,
    reduced_mean,
    train_both,
)
from tests.support.failures import expect_failure_of
from tests.support.harness import distributed
from tests.support.logs import logged
from tests.support.models import small_model

pytestmark = pytest.mark.usefixtures("fresh_processes")


@OVERLAPS
@pytest.mark.parametrize(
    ("case", "warm_up"),
    [(Case("usual"), 2), (Case("static graph", ddp=STATIC), 3), (Case("unused parameters", **BRANCHING), 2)],
    ids=["usual", "static graph", "unused parameters"],
)
@distributed(2)
def test_without_step_each_backward_pass_updates_once_the_buckets_are_final(
    world_size: int, case: Case, warm_up: int, hook: MakeHook
) -> None:
    ours, reference = overlapped_run(case, hook), plain_run(case)
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


@OVERLAPS
@distributed(2)
def test_a_second_synchronising_pass_before_step_raises_once_updates_happen_in_backward(
    world_size: int, hook: MakeHook
) -> None:
    ours, reference = overlapped_run(Case(), hook), plain_run(Case())
    for run in (ours, reference):
        run.loss(50).backward()
        run.loss(51).backward()
        run.update()
    assert_same_values(ours, reference, "two passes before the first step(), while step() does the update")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_both(ours, reference, range(3))
    assert not caught, "a loop with step() is not warned"
    ours.backward(3)
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        ours.loss(4).backward()


class ReadsTwice(nn.Module):
    """Uses a weight a second time through ``detach()``, in a place whose gradient is computed later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 12)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)) @ self.second.weight.detach())
        return outputs


@OVERLAPS
@distributed(2)
def test_a_weight_needed_later_in_the_same_pass_is_used_unchanged(world_size: int, hook: MakeHook) -> None:
    case = Case(model=ReadsTwice, ddp={"bucket_cap_mb": 5e-4})
    train_both(overlapped_run(case, hook), plain_run(case), range(5))


@OVERLAPS
@distributed(2)
def test_two_overlapping_optimizers_on_one_group_do_not_mix(world_size: int, hook: MakeHook) -> None:
    pairs = [(overlapped_run(Case(), hook), plain_run(Case())) for _ in range(2)]
    for step in range(5):
        for runs in zip(*pairs, strict=True):
            for run in runs:
                run.optimizer.zero_grad()
            sum(run.loss(step) for run in runs).backward()
            for run in runs:
                run.update()
    for ours, reference in pairs:
        assert_same_values(ours, reference, "five steps")


# What cannot be combined with an update inside backward


def a_scaler(run: Run, unscales: bool) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    if unscales:
        scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)


def replace_a_gradient(run: Run) -> None:
    assert run.params[0].grad is not None
    run.params[0].grad = run.params[0].grad * 0.5


def a_pass_without_sync(run: Run) -> None:
    with run.model.no_sync():
        run.loss(4).backward()


def change_an_option(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def uneven_inputs(run: Run) -> None:
    with Join([run.ddp, run.zero], model=run.ddp):
        pass


SCALER = r"a GradScaler cannot.*reduce_scatter_hook"
CHANGED = r"gradient of parameter .* was changed.*reduce_scatter_hook"

REFUSED: dict[str, tuple[Callable[[Run], object], str, bool]] = {
    "a closure": (lambda run: run.optimizer.step(lambda: 0.0), r"a closure cannot.*reduce_scatter_hook", True),
    "a scaler": (lambda run: a_scaler(run, False), SCALER, True),
    "a scaler that unscales": (lambda run: a_scaler(run, True), SCALER, False),
    "torch's clipping": (lambda run: torch.nn.utils.clip_grad_norm_(run.params, 0.01), CHANGED, False),
    "our clipping": (lambda run: run.zero.clip_grad_norm_(0.01), CHANGED, False),
    "another gradient": (replace_a_gradient, CHANGED, False),
    "a pass without sync": (a_pass_without_sync, CHANGED, False),
    "another option": (change_an_option, r"changed .* between backward\(\) and step\(\)", False),
    "uneven inputs": (uneven_inputs, "equally many inputs on all ranks", True),
}
"""Uses, the error of the use or of the ``step()`` after it, and whether it comes from the first iteration on."""


def then_step(use: Callable[[Run], object], run: Run) -> None:
    use(run)
    run.update()


@OVERLAPS
@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["copies", "views"])
@pytest.mark.parametrize("use", REFUSED)
@distributed(2)
def test_what_needs_an_update_after_backward_is_refused(
    world_size: int, use: str, ddp: dict[str, Any], hook: MakeHook
) -> None:
    call, text, from_the_start = REFUSED[use]
    for iterations in (0, 3) if from_the_start else (3,):
        ours = overlapped_run(Case(ddp=ddp), hook)
        for step in range(iterations):
            ours.iterate(step)
        ours.backward(iterations)
        with pytest.raises(RuntimeError, match=text):
            then_step(call, ours)


# Failures


def break_here(*_: Any) -> None:
    raise KeyError("it broke here")


def broken_hook(state: dict[str, bool], bucket: Any) -> Any:
    def check(future: Any) -> Tensor:
        if state["broken"] and bucket.index() == 0:
            raise ValueError("it broke here")
        reduced: Tensor = future.value()
        return reduced

    return reduced_mean(bucket).then(check)


@OVERLAPS
@pytest.mark.parametrize("culprit", ["the update", "the communication hook"])
@distributed(2, 3)
def test_a_failure_is_an_error_on_every_rank_that_names_the_one_that_failed(
    world_size: int, culprit: str, hook: MakeHook
) -> None:
    state = {"broken": False}
    ours = overlapped_run(Case("", MOMENTUM), hook, broken_hook, state)
    for step in range(3):
        ours.iterate(step)
    breaks = dist.get_rank() == 1
    state["broken"] = breaks and culprit == "the communication hook"
    if breaks and culprit == "the update":
        ours.zero.optim.register_step_pre_hook(break_here)
    start = time.monotonic()
    with pytest.raises(Exception, match="it broke here") as caught:
        ours.iterate(3)
    assert time.monotonic() - start < 10
    assert breaks or "failed on rank 1" in str(caught.value)


# Saved state, and parameters in no bucket


@OVERLAPS
@pytest.mark.parametrize("iterations", [1, 4], ids=["before updates move", "after updates moved"])
@distributed(2, 3)
def test_a_saved_run_goes_on_as_if_it_had_never_stopped(world_size: int, iterations: int, hook: MakeHook) -> None:
    case = Case("", (Part(ours={"parameters_as_bucket_view": True}),))
    with logged(logging.WARNING) as messages:
        first, reference = overlapped_run(case, hook), plain_run(case)
    assert ["parameters_as_bucket_view=True is ignored" in message for message in messages] == [True]
    train_both(first, reference, range(iterations))
    assert_same_state(first, reference)
    saved: list[Any] = [first.zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    second = overlapped_run(case, hook)
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(saved[0])
    train_both(second, reference, range(iterations, iterations + 5))
    first.optimizer.load_state_dict(saved[0])  # an older one, while updates happen in backward
    reference.optimizer.load_state_dict(saved[0])
    for run in (first, reference):
        run.module.load_state_dict(second.module.state_dict())
    train_both(first, reference, range(3))
    assert_same_state(first, reference)


class WithExtra(nn.Module):
    """A model with a parameter that DDP does not see, because it is frozen when DDP is made."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.extra = nn.Parameter(torch.ones(50), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs


@OVERLAPS
@pytest.mark.parametrize("trainable", [True, False], ids=["unfrozen", "frozen with a gradient"])
@distributed(2, 3)
def test_a_parameter_in_no_bucket_is_updated_by_step(world_size: int, trainable: bool, hook: MakeHook) -> None:
    case = Case("", COUNTERS, model=WithExtra)
    ours, reference = overlapped_run(case, hook), plain_run(case)
    train_both(ours, reference, range(1))
    for step in range(1, 6):
        for run in (ours, reference):
            extra = run.model.module.get_parameter("extra").requires_grad_(trainable)
            run.backward(step)
            extra.grad = torch.full_like(extra, 0.1 * step)
            run.update()
        assert_same_values(ours, reference, f"iteration {step}")
    assert_same_state(ours, reference)


@OVERLAPS
@pytest.mark.parametrize("change", ["an option", "a gradient"])
@distributed(2, 3)
def test_a_change_on_one_rank_before_a_step_that_communicates_is_an_error_on_all(
    world_size: int, change: str, hook: MakeHook
) -> None:
    ours = overlapped_run(Case("", MOMENTUM, model=WithExtra), hook)
    extra = ours.model.module.get_parameter("extra")
    for step in range(4):
        ours.backward(step)
        extra.grad = torch.ones_like(extra)
        if step < 3:
            ours.update()
    if dist.get_rank() == 1:
        gradient = ours.params[-1].grad
        assert gradient is not None
        gradient.mul_(0.5 if change == "a gradient" else 1.0)
        ours.optimizer.param_groups[0]["lr"] *= 0.5 if change == "an option" else 1.0
    expect_failure_of([1], ours.zero.step, RuntimeError, "was changed|options in param_groups were changed")
