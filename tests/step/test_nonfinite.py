"""Gradients that are not finite: with ``nonfinite`` all ranks raise or skip the step, and nothing has changed."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from onecopy import NonfiniteError, ZeroRedundancyOptimizer
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.failures import check_pool, expect, expect_failure_of, failure_of
from tests.support.guards import NAME, OURS, Spoiled, Training
from tests.support.harness import distributed
from tests.support.logs import logged
from tests.support.models import assert_same_tree

LEVELS = [level for level in OURS if level != "overlap hook"]
MODES = ["raise", "skip"]


def found_on(global_rank: int) -> str:
    """What the error or the log says."""
    return f"the gradient of parameter {NAME!r} (owned by global rank {global_rank}) has an infinity or a NaN"


def spoil_a_step(training: Training, mode: str, value: float, global_rank: int) -> None:
    """Make a step with a gradient that is not finite; all ranks raise or skip it, and nothing has changed."""
    with Spoiled(training, value):
        training.backward(2)
        before = training.snapshot()
        with logged(logging.WARNING) as messages:
            if mode == "raise":
                error = failure_of(lambda: training.step(2))
                expect(error, NonfiniteError, re.escape(f"{found_on(global_rank)}. step() has changed nothing"))
            else:
                loss = training.step(2)
                assert loss is None or math.isfinite(loss)
                told = [f"step() is skipped on all ranks: {found_on(global_rank)}"]
                assert messages == (told if training.zero.rank == 0 else [])
    assert_same_tree(training.snapshot(), before, "after the step")


def compare_with_unguarded(training: Training, level: str, mesh: Any = None) -> None:
    """Go on after the spoiled step; the result is that of a training which never made it."""
    training.iterate(3, 4)
    plain = Training(level, mesh)
    plain.iterate(0, 1, 3, 4)
    assert_same_tree(training.values(), plain.values(), "in the end")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@distributed(1, 2, 3)
def test_nothing_changes_and_training_goes_on(world_size: int, level: str, mode: str) -> None:
    training = Training(level, nonfinite=mode)
    training.iterate(0, 1)
    spoil_a_step(training, mode, math.nan if mode == "raise" else -math.inf, training.owner)
    compare_with_unguarded(training, level)


@pytest.mark.parametrize("mode", MODES)
@distributed(4)
def test_all_replicas_of_a_mesh_do_the_same(world_size: int, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = Training("level 3", mesh, nonfinite=mode)
    training.iterate(0, 1)
    spoil_a_step(training, mode, math.inf, training.owner)  # of the first replica
    compare_with_unguarded(training, "level 3", mesh)


ACCELERATED = ["level 1", "level 1 by element", "level 2", "level 3", "level 3 overlap"]


@pytest.mark.parametrize("level", ACCELERATED)
@distributed(2)
def test_on_an_accelerator_a_step_is_skipped_at_once(world_size: int, level: str) -> None:
    with as_on_accelerators():
        training = Training(level, nonfinite="skip")
        training.iterate(0, 1)
        spoil_a_step(training, "skip", math.nan, training.owner)
        compare_with_unguarded(training, level)


@pytest.mark.parametrize("level", ACCELERATED)
@distributed(2)
def test_on_an_accelerator_all_ranks_raise_one_step_later(world_size: int, level: str) -> None:
    with as_on_accelerators():
        training = Training(level, nonfinite="raise")
        training.iterate(0, 1)
        with Spoiled(training, math.nan):
            training.iterate(2)
        training.backward(3)
        error = failure_of(lambda: training.step(3))
        expect(error, NonfiniteError, re.escape(f"in the previous step() {found_on(training.owner)}"))
    check_pool()


@pytest.mark.parametrize("level", ["level 1", "level 3"])
@distributed(2, 3)
def test_a_rank_that_fails_in_the_update_is_an_error_on_all(world_size: int, level: str) -> None:
    training = Training(level, nonfinite="raise")
    training.iterate(0)
    training.backward(1)

    def fail(*_: Any) -> None:
        raise ArithmeticError("the tank is empty")

    if dist.get_rank() == 1:
        training.zero.optim.register_step_pre_hook(fail)
    expect_failure_of([1], training.zero.step, ArithmeticError, "the tank is empty")
    check_pool()


@pytest.mark.parametrize("level", ["level 1", "level 2", "level 3"])
@distributed(2)
def test_a_gradscaler_skips_before_the_guard_looks(world_size: int, level: str) -> None:
    ends: list[Any] = []
    settings: list[dict[str, Any]] = [{}, {"nonfinite": "raise"}]
    for guards in settings:
        training = Training(level, **guards)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            training.zero.zero_grad()
            spoiled: Any = Spoiled(training, math.inf) if step == 2 else contextlib.nullcontext()
            with spoiled:
                scaler.scale(training.loss(step)).backward()
            scaler.step(training.zero)
            scaler.update()
        ends.append([training.values(), scaler.get_scale()])
    assert_same_tree(ends[1], ends[0], "in the end")
    assert ends[1][1] == 512.0


@distributed(2)
def test_a_sparse_gradient(world_size: int) -> None:
    words = nn.Embedding(64, 32, sparse=True)
    zero = ZeroRedundancyOptimizer(words.named_parameters(), SGD, lr=0.1, elementwise=False, nonfinite="raise")
    before = words.weight.detach().clone()
    (words(torch.tensor([1, 2, 2])).sum() * math.nan).backward()
    expect(failure_of(zero.step), NonfiniteError, r"parameter 'weight' \(owned by global rank 0\) has an infinity")
    assert torch.equal(words.weight, before)
    words.weight.grad = None
    words(torch.tensor([1, 2, 2])).sum().backward()
    zero.step()
    torch.testing.assert_close(words.weight[2], before[2] - 0.2)


@distributed(2)
def test_a_large_complex_gradient_is_finite(world_size: int) -> None:
    wave = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    zero = ZeroRedundancyOptimizer([wave], SGD, lr=1.0, nonfinite="raise")
    wave.grad = torch.full((4,), complex(3e38, 3e38), dtype=torch.complex64)
    zero.step()
    assert wave[0].item() == complex(-wave.grad[0].real, -wave.grad[0].imag)
    wave.grad = torch.full((4,), complex(1.0, math.nan), dtype=torch.complex64)
    expect(failure_of(zero.step), NonfiniteError, "has an infinity or a NaN")


class Twice(SGD):
    """Evaluates its closure two times."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@distributed(2)
def test_a_class_that_evaluates_the_closure_several_times_is_refused_by_name(world_size: int) -> None:
    layer = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(layer.named_parameters(), Twice, lr=0.1, nonfinite="skip")

    def closure() -> float:
        layer.zero_grad()
        loss: Tensor = layer(torch.ones(1, 3)).sum()
        loss.backward()
        return loss.item()

    error = failure_of(lambda: zero.step(closure))
    expect(error, RuntimeError, r"Twice\.step\(\) evaluates the closure several times")
    check_pool()


@distributed(2)
def test_a_join_context_is_refused(world_size: int) -> None:
    training = Training("level 1", nonfinite="skip")
    with pytest.raises(ValueError, match="nonfinite cannot be combined with Join"):
        Join([training.model, training.zero])
