"""``state_dict()`` on an accelerator, where the host is ahead of the state in memory."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.accelerator import device
from tests.accelerator.comparing import on_device
from tests.accelerator.harness import HYBRID, SIMCCL, simulated
from tests.accelerator.training import Case, Training, level_1, one_pass, small_sizes


@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@simulated(2)
def test_state_dict_without_consolidation_is_refused_by_name(world_size: int, backend: str) -> None:
    with small_sizes(), device.simulate(seed=1, host_ahead="far") as simulation:
        training = Training(Case("state dict", level_1), on_device())
        for step in range(3):
            one_pass(training, step)
        zero = training.optimizers[0]
        with pytest.raises(RuntimeError, match=r"consolidate_state_dict.* onecopy.checkpoint.save"):
            zero.state_dict()
        zero.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            assert all(state["step"] == 3 for state in zero.state_dict()["state"].values())
        zero.consolidate_state_dict(to=0)
        state_dict = zero.state_dict()  # on all ranks, as Accelerate calls it
        if dist.get_rank() == 0:
            assert all(state["step"] == 3 for state in state_dict["state"].values())
    assert simulation.reports == []
