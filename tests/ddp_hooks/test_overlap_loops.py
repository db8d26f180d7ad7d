"""Updates inside the backward pass in loops: what is told, what is refused, failures, saved state, lifetime."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

from tests.support.ddp_training import (
    ELEMENT,
    STATIC,
    UNUSED,
    VIEW,
    Branching,
    assert_same_state,
    assert_same_values,
    branching_loss,
    tolerance_of,
    train_both,
)
from tests.support.failures import expect_failure_of
from tests.support.harness import distributed
from tests.support.logs import logged
from tests.support.models import assert_equal, assert_replicas_equal, assert_same_tree, small_inputs, small_model
from tests.support.overlapped_step import (
    COUNTING,
    HOOKS,
    UNEVEN,
    Case,
    MakeHook,
    Run,
    assert_parity,
    overlapped_run,
    plain_run,
    reduced_mean,
)

pytestmark = pytest.mark.usefixtures("fresh_processes")

# Loops that do not call step(), and several passes


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
def test_a_second_synchronising_pass_before_step_raises_once_updates_happen_in_backward(
    world_size: int, make_hook: MakeHook
) -> None:
    case = Case()
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    for run in (ours, reference):
        case.loss(run.ddp, 50).backward()
        case.loss(run.ddp, 51).backward()
        run.optimizer.step()
    assert_same_values(ours, reference, "two passes before the first step(), while step() does the update")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_both(ours, reference, range(3))
    assert not caught, "a loop with step() is not warned"
    ours.backward(3)
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        case.loss(ours.ddp, 4).backward()


@HOOKS
@distributed(2)
def test_a_retained_graph_is_out_of_date_after_the_update(world_size: int, make_hook: MakeHook) -> None:
    ours = overlapped_run(Case(), make_hook)
    for step in range(4):
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


def a_closure(run: Run) -> None:
    run.optimizer.step(lambda: 0.0)


def a_scaler(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(run.optimizer)


def a_scaler_that_unscales(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)


def clip_with_torch(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.params, 0.01)
    run.optimizer.step()


def clip_with_ours(run: Run) -> None:
    run.zero.clip_grad_norm_(0.01)
    run.optimizer.step()


def replace_a_gradient(run: Run) -> None:
    assert run.params[0].grad is not None
    run.params[0].grad = run.params[0].grad * 0.5
    run.optimizer.step()


def a_pass_without_sync(run: Run) -> None:
    with run.ddp.no_sync():
        run.case.loss(run.ddp, 4).backward()
    run.optimizer.step()


def change_an_option(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5
    run.optimizer.step()


def uneven_inputs(run: Run) -> None:
    with Join([run.ddp, run.zero], model=run.ddp):
        pass


CHANGED = r"gradient of parameter .* was changed.*reduce_scatter_hook"

REFUSED: list[tuple[Callable[[Run], None], str, bool]] = [
    (a_closure, r"a closure cannot.*reduce_scatter_hook", True),
    (a_scaler, r"a GradScaler cannot.*reduce_scatter_hook", True),
    (a_scaler_that_unscales, r"a GradScaler cannot.*reduce_scatter_hook", False),
    (clip_with_torch, CHANGED, False),
    (clip_with_ours, CHANGED, False),
    (replace_a_gradient, CHANGED, False),
    (a_pass_without_sync, CHANGED, False),
    (change_an_option, r"changed .* between backward\(\) and step\(\)", False),
    (uneven_inputs, "equally many inputs on all ranks", True),
]


@HOOKS
@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["copies", "views"])
@pytest.mark.parametrize(("use", "text", "from_the_start"), REFUSED, ids=[use.__name__ for use, *_ in REFUSED])
@distributed(2)
def test_what_needs_an_update_after_backward_is_refused(
    world_size: int,
    use: Callable[[Run], None],
    text: str,
    from_the_start: bool,
    ddp: dict[str, Any],
    make_hook: MakeHook,
) -> None:
    for iterations in (0, 3) if from_the_start else (3,):
        ours = overlapped_run(Case(ddp=ddp, buckets=1), make_hook)
        for step in range(iterations):
            ours.iterate(step)
        ours.backward(iterations)
        with pytest.raises(RuntimeError, match=text):
            use(ours)


@HOOKS
@distributed(2)
def test_a_scaler_that_is_switched_off_works(world_size: int, make_hook: MakeHook) -> None:
    ours, reference = overlapped_run(Case(), make_hook), plain_run(Case())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(4):
        for run in (ours, reference):
            run.optimizer.zero_grad()
            scaler.scale(run.case.loss(run.ddp, step)).backward()
            scaler.step(run.optimizer)
            scaler.update()
        assert_same_values(ours, reference, f"iteration {step}")


# Failures


class Fragile(torch.optim.SGD):
    """Raises when told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if Fragile.broken:
            raise KeyError("it broke here")
        return super().step(closure)


def broken_hook(state: dict[str, bool], bucket: Any) -> Any:
    def check(future: Any) -> Tensor:
        if state["broken"] and bucket.index() == 0:
            raise ValueError("it broke here")
        reduced: Tensor = future.value()
        return reduced

    return reduced_mean(bucket).then(check)


@HOOKS
@pytest.mark.parametrize("culprit", ["the update", "the communication hook"])
@distributed(2, 3)
def test_a_failure_is_an_error_on_every_rank_that_names_the_one_that_failed(
    world_size: int, culprit: str, make_hook: MakeHook
) -> None:
    state = {"broken": False}
    ours = overlapped_run(Case(optimizer=Fragile), make_hook, broken_hook, state)
    for step in range(3):
        ours.iterate(step)
    breaks = dist.get_rank() == 1
    Fragile.broken, state["broken"] = breaks and culprit == "the update", breaks and culprit != "the update"
    start = time.monotonic()
    try:
        with pytest.raises(Exception, match="it broke here") as caught:
            ours.iterate(3)
    finally:
        Fragile.broken = False
    assert time.monotonic() - start < 10
    if not breaks:
        assert "failed on rank 1" in str(caught.value)


# Saved state, and groups and parameters that come later


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4], ids=["at once", "before updates move", "after updates moved"])
@distributed(2, 3)
def test_a_saved_run_goes_on_as_if_it_had_never_stopped(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    case = Case(optimizer=torch.optim.AdamW, options={"lr": 1e-2})
    first, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(first, reference, range(iterations))
    saved: list[Any] = [None]
    first.zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = [first.zero.state_dict()]
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
    first.optimizer.load_state_dict(saved[0])  # an older one, while updates happen in backward
    reference.optimizer.load_state_dict(saved[0])
    train_both(first, reference, range(3))
    assert first.updated_in_backward[-1]


def first_layer(model: nn.Module) -> Iterable[Any]:
    return model.get_submodule("0").parameters()


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4])
@distributed(2, 3)
def test_a_group_can_be_added_after_registration(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    case = Case(params=first_layer)
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
    for step in range(1, 6):
        for run in (ours, reference):
            extra = run.ddp.module.get_parameter("extra").requires_grad_(trainable)
            run.backward(step)
            extra.grad = torch.full_like(extra, 0.1 * step)
            run.optimizer.step()
        assert_same_values(ours, reference, f"iteration {step}")
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


@HOOKS
@pytest.mark.parametrize("change", ["an option", "a gradient"])
@distributed(2, 3)
def test_a_change_on_one_rank_before_a_step_that_communicates_is_an_error_on_all(
    world_size: int, change: str, make_hook: MakeHook
) -> None:
    ours = overlapped_run(Case(model=WithExtra, params=nn.Module.named_parameters), make_hook)
    extra = ours.ddp.module.get_parameter("extra")
    for step in range(4):
        ours.backward(step)
        extra.grad = torch.ones_like(extra)
        if step < 3:
            ours.optimizer.step()
    if dist.get_rank() == 1:
        gradient = ours.params[-1].grad
        assert gradient is not None
        gradient.mul_(0.5 if change == "a gradient" else 1.0)
        ours.optimizer.param_groups[0]["lr"] *= 0.5 if change == "an option" else 1.0
    expect_failure_of([1], ours.zero.step, RuntimeError, "was changed|options in param_groups were changed")


# Setups and lifetime


@HOOKS
@distributed(2)
def test_parameters_as_bucket_views_are_ignored_and_that_is_logged(world_size: int, make_hook: MakeHook) -> None:
    with logged(logging.WARNING) as messages:
        case = Case(ours={"parameters_as_bucket_view": True})
        ours = overlapped_run(case, make_hook)
    assert len(messages) == 1
    assert "parameters_as_bucket_view=True is ignored" in messages[0]
    pointers = [param.data_ptr() for param in ours.params]
    assert_parity(case, ours, plain_run(case))
    assert [param.data_ptr() for param in ours.params] == pointers


@HOOKS
@pytest.mark.parametrize("case", [Case(), Case(**UNEVEN)], ids=["cut", "unused parameters"])
@distributed(4)
def test_a_subgroup_whose_ranks_are_numbered_otherwise_equals_plain_ddp(
    world_size: int, case: Case, make_hook: MakeHook
) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    ours = overlapped_run(case, make_hook, allreduce_hook, group, process_group=group)
    reference = plain_run(case, process_group=group)
    for step in range(5):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}")
    assert ours.updated_in_backward == [False, False, True, True, True]
    ours.zero.consolidate_state_dict(to=1)
    if ours.zero.rank == 1:
        assert_same_tree(ours.zero.state_dict(), reference.optimizer.state_dict(), "state")


@HOOKS
@distributed(2)
def test_two_overlapping_optimizers_on_one_group_do_not_mix(world_size: int, make_hook: MakeHook) -> None:
    case = Case(ours=ELEMENT)
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


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4])
@distributed(2)
def test_a_deleted_model_and_optimizer_are_freed_by_reference_counting(
    world_size: int, iterations: int, make_hook: MakeHook
) -> None:
    threads = threading.enumerate()
    ours, other = overlapped_run(Case(), make_hook), overlapped_run(Case(), make_hook)
    for step in range(iterations):
        ours.iterate(step)
        other.iterate(step)
    assert threading.enumerate() == threads
    remains: list[Any] = [weakref.ref(ours.ddp), weakref.ref(ours.optimizer), weakref.ref(ours.params[0])]
    gc.collect()
    gc.disable()
    try:
        del ours
        assert [reference() for reference in remains] == [None, None, None]
    finally:
        gc.enable()
    newer, reference = overlapped_run(Case(), make_hook), plain_run(Case())
    train_both(newer, reference, range(4))
