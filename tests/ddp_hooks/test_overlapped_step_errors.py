"""Updates inside the backward pass that fail, hooks that go away, and wrong use."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ddp_training import assert_same_values
from tests.support.harness import distributed
from tests.support.overlapped_step import HOOKS, Case, MakeHook, overlapped_run, plain_run, reduced_mean

pytestmark = pytest.mark.usefixtures("fresh_processes")


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
@pytest.mark.parametrize("iterations", [0, 1, 4])
@distributed(2)
def test_a_deleted_model_and_optimizer_are_freed_by_reference_counting(
    world_size: int, iterations: int, make_hook: MakeHook
) -> None:
    threads = threading.enumerate()
    ours = overlapped_run(Case(), make_hook)
    for step in range(iterations):
        ours.iterate(step)
    assert threading.enumerate() == threads
    remains: list[Any] = [weakref.ref(ours.ddp), weakref.ref(ours.optimizer), weakref.ref(ours.params[0])]
    gc.collect()
    gc.disable()
    try:
        del ours
        assert [reference() for reference in remains] == [None, None, None]
    finally:
        gc.enable()


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
