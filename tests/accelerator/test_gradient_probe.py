"""Gradients that nothing averages, noticed on an accelerator: the host waits for no more than in any other step."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

from onecopy import GradientsNotReducedWarning
from tests.accelerator import device
from tests.accelerator.comparing import on_device
from tests.accelerator.counters import Step
from tests.accelerator.harness import HYBRID, simulated
from tests.accelerator.training import Case, Training, level_1, one_pass, small_sizes

STEPS = 7


def without_ddp(training: Training) -> None:
    training.model = training.module
    training.add_optimizers()


def counted_steps(setup: Any) -> tuple[list[int], list[Step], list[Any]]:
    """Train, and return the numbers of the steps that warned, the counts of every step, and races."""
    warned, counts = [], []
    with small_sizes(), device.simulate(seed=3, host_ahead="far") as run:
        training = Training(Case("probed", setup), on_device())
        for step in range(STEPS):
            with warnings.catch_warnings(record=True) as caught, run.step() as iteration:
                warnings.simplefilter("always")
                one_pass(training, step)
            warned += [step for each in caught if each.category is GradientsNotReducedWarning]
            counts.append(iteration)
        training.results()
    return warned, counts, list(run.reports)


def launches(step: Step) -> int:
    """Number of kernels that the probe has launched."""
    return sum(count for (_, where), count in step.kernels.items() if where.startswith("onecopy/step/checks"))


def check_waits(counts: list[Step]) -> None:
    """The probe makes the host wait in no step, and from the second step on it waits for older flags only."""
    ours = [[wait for wait in step.synchronizations if wait.site.startswith("onecopy/")] for step in counts]
    assert not any(wait.site.startswith("onecopy/step/checks") for waits in ours for wait in waits)
    for wait in chain.from_iterable(ours[1:]):
        assert wait.site.startswith("onecopy/comm/status_flags.py"), wait
        assert wait.age >= 1, wait


@simulated(2)
def test_without_ddp_all_ranks_warn_when_the_flags_of_the_third_step_are_read(world_size: int) -> None:
    warned, counts, races = counted_steps(without_ddp)
    assert warned == [3]
    assert races == []
    check_waits(counts)
    assert [bool(launches(step)) for step in counts] == [True, True, True, True, False, False, False]


@simulated(2, backend=HYBRID)
def test_with_ddp_nothing_is_launched_from_the_third_step_on(world_size: int) -> None:
    warned, counts, races = counted_steps(level_1)
    assert warned == []
    assert races == []
    check_waits(counts)
    assert [bool(launches(step)) for step in counts] == [True, True, False, False, False, False, False]
