"""Training on the simulated accelerator gives the numbers of the CPU, without a race, at every level.

``make test`` runs a few programs, each with one number of ranks, kind of group, seed and distance of the host, which
take turns. ``make accelerator`` runs every program with every combination.
"""

from __future__ import annotations

import gc
import itertools
import os
from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.cases import BY_NAME, CASES
from tests.accelerator.comparing import Setting, check
from tests.accelerator.harness import HYBRID, SIMCCL, run, simulated
from tests.accelerator.training import Training, on_device, one_pass, small_sizes
from tests.support.harness import EVERYTHING

BACKENDS = {"pure": SIMCCL, "hybrid": HYBRID}
FIRST_SEED, NUMBER_OF_SEEDS = int(os.environ.get("ONECOPY_SEED", "0")), int(os.environ.get("ONECOPY_SEEDS", "3"))


def _table() -> list[Any]:
    """Rows of a program, a number of ranks, a kind of group and the settings of the device."""
    seeds, ahead = range(FIRST_SEED, FIRST_SEED + NUMBER_OF_SEEDS), ("far", 6, 0)
    every: list[Setting] = list(itertools.product(seeds, ahead))
    rows = []
    for position, case in enumerate(CASES):
        for number, world_size in enumerate(case.worlds):
            for kind, group in enumerate(BACKENDS):
                settings = every if EVERYTHING else [every[(position + position // 9) % len(every)]]
                chosen = number == position % len(case.worlds) and kind == position // 2 % len(BACKENDS)
                if EVERYTHING or chosen:
                    name = f"{case.name}-{world_size}-{group}"
                    rows.append(pytest.param(case.name, world_size, group, settings, id=name))
    return rows


@pytest.mark.parametrize(("name", "world_size", "group", "settings"), _table())
def test_the_numbers_of_the_cpu_without_a_report(
    name: str, world_size: int, group: str, settings: list[Setting]
) -> None:
    run(check, world_size, {"name": name, "settings": settings}, BACKENDS[group], limit=60 + 5 * len(settings))


@pytest.mark.parametrize("level", ["level 1", "level 2", "interleaved", "level 3", "level 3 overlap"])
@simulated(2)
def test_a_freed_optimizer_leaves_nothing_behind_that_still_uses_its_memory(world_size: int, level: str) -> None:
    place = on_device()
    with small_sizes(), device.simulate(seed=1, host_ahead=50) as simulation:
        for _ in range(3):
            training = Training(BY_NAME[level], place)
            for step in range(4):
                one_pass(training, step)
            del training
            gc.collect()
            for reused in [torch.zeros(10, dtype=torch.int64, device=place.device) for _ in range(20)]:
                reused += 1
    assert simulation.reports == [], "\n".join(map(str, simulation.reports[:5]))
