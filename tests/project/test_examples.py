"""The examples train on real ranks, and the levels to the losses of plain DDP."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import checkpoint
from tests.support.harness import EVERYTHING, distributed
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
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


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


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
    assert using == {*EQUAL_TO_DDP, *LEARNING}


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


# examples/elastic.py

EPOCHS, LAST_STEP, SAVE_EVERY = 3, 25, 5
"""The defaults of the example: 25 batches of 12 are 3 epochs of 100 samples."""


def elastic(root: Path, ranks: int, *options: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the example as one of up to two machines."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", str(ranks)]
    torchrun += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    torchrun += ["--rdzv-conf", "last_call_timeout=1", "--local-addr", "127.0.0.1"]
    return subprocess.run(
        [*torchrun, str(EXAMPLES / "elastic.py"), "--root", str(root), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def begun(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Where each attempt has begun."""
    return [line for line in done.stdout.splitlines() if line.startswith("from step")]


def saved_before(step: int) -> int:
    """The newest checkpoint of a run that was killed at a step, before it could save."""
    return SAVE_EVERY * ((step - 1) // SAVE_EVERY)


def result_in(root: Path) -> tuple[Tensor, list[float]]:
    """The parameters at the end, and how often each sample was used."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    loaded = checkpoint.load(root, model=model)
    assert loaded.step == LAST_STEP
    return torch.cat([param.detach().flatten() for param in model.parameters()]), loaded.extra["counts"].tolist()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The parameters of a run on two ranks that nothing has disturbed."""
    root = tmp_path_factory.mktemp("undisturbed")
    done = elastic(root, 2)
    assert done.returncode == 0, done.stderr
    params, counts = result_in(root)
    assert set(counts) == {EPOCHS}
    return params


def test_a_run_whose_worker_is_killed_ends_as_an_undisturbed_one(undisturbed: Tensor, tmp_path: Path) -> None:
    step = random.Random(5).randrange(SAVE_EVERY + 1, LAST_STEP)
    done = elastic(tmp_path, 2, "--crash-at", str(step), restarts=3)
    assert done.returncode == 0, done.stderr
    assert begun(done) == ["from step 0 on 2 ranks", f"from step {saved_before(step)} on 2 ranks"]
    params, counts = result_in(tmp_path)
    assert set(counts) == {EPOCHS}
    assert torch.equal(params, undisturbed)


def test_a_run_on_changing_numbers_of_ranks_uses_every_sample_once_per_epoch(
    undisturbed: Tensor, tmp_path: Path
) -> None:
    kills = [(2, 7), (3, 13), (1, 18)]  # the number of ranks, and the step in which one of them is killed
    begin = 0
    for ranks, step in kills:
        done = elastic(tmp_path, ranks, "--crash-at", str(step))
        assert done.returncode != 0
        assert begun(done) == [f"from step {begin} on {ranks} ranks"], done.stderr
        begin = saved_before(step)
    done = elastic(tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert begun(done) == [f"from step {begin} on 2 ranks"]
    params, counts = result_in(tmp_path)
    assert set(counts) == {EPOCHS}
    # The samples of a step are the same, so only sums over ranks are rounded differently.
    torch.testing.assert_close(params, undisturbed, rtol=1e-4, atol=1e-5)
