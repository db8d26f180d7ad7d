"""Training on the simulated accelerator gives the numbers of the CPU, without a race, at every level.

``make test`` runs each case once, with a number of ranks, a seed, a distance of the host and a kind of process group
that change from case to case. ``make accelerator`` runs every combination.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.cases import BY_NAME, CASES, HALF_ROUNDING
from tests.accelerator.harness import HYBRID, SIMCCL, run
from tests.accelerator.training import ROUNDING, Case, Place
from tests.support.harness import EVERYTHING

AHEAD: list[int | str] = ["far", 6, 0]
"""How far the host runs ahead."""

BACKENDS = {"pure": SIMCCL, "hybrid": HYBRID}
SEEDS = range(int(os.environ.get("ONECOPY_SEED", "0")), int(os.environ.get("ONECOPY_SEED", "0")) + 3)
Setting = tuple[int, int | str]


def _table() -> list[Any]:
    """The parameters of all tests: a case, its number of ranks, the kind of group and the settings of the device."""
    rows = []
    for position, case in enumerate(CASES):
        every: list[Setting] = [(seed, ahead) for ahead in AHEAD for seed in SEEDS]
        for number, world_size in enumerate(case.worlds):
            for kind, group in enumerate(BACKENDS):
                settings = every if EVERYTHING else [every[(position + position // 9) % len(every)]]
                chosen = number == position % len(case.worlds) and kind == position // 2 % len(BACKENDS)
                if EVERYTHING or chosen:
                    rows.append(
                        pytest.param(case.name, world_size, group, settings, id=f"{case.name}-{world_size}-{group}")
                    )
    return rows


@pytest.mark.parametrize(("name", "world_size", "group", "settings"), _table())
def test_the_numbers_of_the_cpu_without_a_report(
    name: str, world_size: int, group: str, settings: list[Setting]
) -> None:
    run(check, world_size, {"name": name, "settings": settings}, BACKENDS[group])


def check(name: str, settings: list[Setting]) -> None:
    """In a worker: train on the CPU, then on the device under each setting, and compare."""
    case = BY_NAME[name]
    expected = on_cpu(name)
    for seed, ahead in settings:
        what = f"{name}, seed {seed}, host ahead {ahead}"
        with warnings.catch_warnings(), device.simulate(seed=seed, host_ahead=ahead) as simulation:
            # Of torch itself: the model was made on another stream than it is trained on.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            actual = case.run(Place(torch.device("sim", torch.accelerator.current_device_index()), None))
        assert simulation.reports == [], f"{what}:\n" + "\n".join(map(str, simulation.reports[:10]))
        compare(case, actual, expected, what)


@functools.cache
def on_cpu(name: str) -> list[Tensor]:
    """The results of a program on the CPU, with gloo."""
    return BY_NAME[name].run(Place(torch.device("cpu"), dist.new_group(backend="gloo")))


def compare(case: Case, actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Bit by bit with two ranks, else within rounding."""
    half = any(tensor.dtype is torch.bfloat16 for tensor in expected)
    tolerance = case.tolerance
    if dist.get_world_size() > 2:
        tolerance = max(tolerance, HALF_ROUNDING if half else ROUNDING)
    assert len(actual) == len(expected), what
    for position, (left, right) in enumerate(zip(actual, expected, strict=True)):
        if tolerance == 0.0:
            difference = "" if left.shape != right.shape else (left.double() - right.double()).abs().max().item()
            assert torch.equal(left, right), f"{what}: tensor {position} of {list(right.shape)} differs by {difference}"
        else:
            torch.testing.assert_close(
                left, right, rtol=tolerance, atol=tolerance, msg=lambda text, at=position: f"{what}: {at}: {text}"
            )
