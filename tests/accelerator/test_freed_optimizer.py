"""An optimizer that is freed after its last step leaves nothing behind that still uses its memory."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.cases import BY_NAME
from tests.accelerator.harness import simulated
from tests.accelerator.training import Place, Training, one_pass, small_sizes


@pytest.mark.parametrize("level", ["level 1", "level 2", "interleaved", "level 3", "level 3 overlap"])
@simulated(2)
def test_the_memory_of_unread_flags_is_not_reused_too_early(world_size: int, level: str) -> None:
    place = Place(torch.device("sim", torch.accelerator.current_device_index()), None)
    with small_sizes(), device.simulate(seed=1, host_ahead=50) as simulation:
        for _ in range(3):
            training = Training(BY_NAME[level], place)
            for step in range(4):
                one_pass(training, step)
            del training
            gc.collect()
            reused = [torch.zeros(10, dtype=torch.int64, device=place.device) for _ in range(20)]
            for tensor in reused:
                tensor += 1
    assert simulation.reports == [], "\n".join(map(str, simulation.reports[:5]))
