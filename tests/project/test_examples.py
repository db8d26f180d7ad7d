"""The examples train on real ranks, and the levels to the losses of plain DDP."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.examples import EXAMPLES, example
from tests.support.harness import EVERYTHING, distributed

CPU = torch.device("cpu")
STEPS = 12

EQUAL_TO_DDP = {
    "level_1": (True, False),
    "level_2": (False, True),
    "level_3": (False, True),
    "overlapped_step": (False, False),
}
"""Examples that must have the losses of plain DDP, with whether they use a scheduler and whether they clip."""

LEARNING = ("mixed_precision", "muon_and_adamw", "several_machines", "uneven_inputs")
"""Examples with arithmetic of their own, which must learn."""


def plain_losses(scheduled: bool, clipped: bool) -> list[float]:
    """Train the model of the examples with DDP and AdamW."""
    shared = example("shared_parts")
    model = DistributedDataParallel(shared.make_model(CPU))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = shared.loss_of(model, step, CPU)
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduled:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", EQUAL_TO_DDP)
@distributed(2)
def test_a_level_has_the_losses_of_plain_ddp(world_size: int, name: str) -> None:
    scheduled, clipped = EQUAL_TO_DDP[name]
    losses = example(name).train(CPU, STEPS)
    # A norm is added up in another order where it is computed from shards.
    assert losses == pytest.approx(plain_losses(scheduled, clipped), rel=1e-5 if clipped else 0, abs=0)


@pytest.mark.parametrize("name", LEARNING)
@distributed(4)
def test_an_example_learns(world_size: int, name: str) -> None:
    losses = example(name).train(CPU, 30)
    assert len(losses) == 30 + (5 * dist.get_rank() if name == "uneven_inputs" else 0)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses


def test_every_example_that_uses_the_common_parts_is_tested() -> None:
    using = {file.stem for file in EXAMPLES.glob("*.py") if "from shared_parts import" in file.read_text()}
    assert using == {*EQUAL_TO_DDP, *LEARNING, "zero_in_100_lines"}  # which has a test of its own


@pytest.mark.parametrize("name", (*EQUAL_TO_DDP, *LEARNING) if EVERYTHING else ["level_1"])
def test_an_example_starts_with_torchrun(name: str) -> None:
    ranks = "4" if name == "several_machines" else "2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "at first" in done.stdout
