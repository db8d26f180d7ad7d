"""Gradients that are not finite, on an accelerator: all ranks raise one step later, and the host waits for no more."""

from __future__ import annotations

from typing import Any

import pytest

from onecopy import NonfiniteError
from tests.accelerator import device, programs
from tests.accelerator.comparing import on_device
from tests.accelerator.harness import simulated
from tests.accelerator.training import Case, Training, adamw, level_1, level_2, small_sizes


@pytest.mark.parametrize("setup", [level_1, level_2])
@simulated(2)
def test_all_ranks_raise_one_step_later_without_another_wait(world_size: int, setup: Any) -> None:
    waits = []
    with small_sizes(), device.simulate(seed=3, host_ahead="far") as run:
        training = Training(Case("guarded", setup, parts=adamw(nonfinite="raise")), on_device())
        for step in range(3):
            with run.step() as iteration:
                programs.spoiled(training, step)
            waits.append([wait for wait in iteration.synchronizations if wait.site.startswith("onecopy/")])
        with pytest.raises(NonfiniteError, match=r"in the previous step\(\) the gradient of parameter 'group0\[0\]'"):
            programs.spoiled(training, 3)
    assert run.reports == []
    for wait in (wait for step in waits[2:] for wait in step):
        assert wait.site.startswith("onecopy/comm/status_flags.py"), wait
        assert wait.age >= 1, wait
