"""The examples train on real ranks: the levels to the losses of plain DDP, others to a lower loss than at first."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from onecopy import ZeroRedundancyOptimizer
from tests.support import check_gpu
from tests.support.examples import EXAMPLES, example
from tests.support.harness import EVERYTHING, distributed, takes_long

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

demo = example("compare_levels")


def plain_losses(scheduled: bool, clipped: bool) -> list[float]:
    """Train the model of the examples with DDP and AdamW."""
    shared = example("shared_parts")
    model = DistributedDataParallel(shared.make_model(CPU))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = shared.loss_of(model, step, CPU)
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    assert using == {*EQUAL_TO_DDP, *LEARNING, "zero_in_100_lines"}


@pytest.mark.parametrize("name", (*EQUAL_TO_DDP, *LEARNING) if EVERYTHING else ["level_1"])
def test_an_example_starts_with_torchrun(name: str) -> None:
    done = check_gpu.start([str(EXAMPLES / f"{name}.py")], ranks=4 if name == "several_machines" else 2)
    assert done.returncode == 0, done.stderr
    assert "at first" in done.stdout


# zero_in_100_lines.py: it and onecopy train to the same bits

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (AdamW, {"lr": 0.01}),
    "fused": (AdamW, {"lr": 0.01, "fused": True}),
}


class Model(nn.Module):
    """Layers of uneven sizes, a scalar, an unused parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(7, 129), nn.Linear(129, 3)
        self.scale, self.unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(5))
        self.first.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(inputs).tanh()) * self.scale
        return result


def trained(kind: Any, name: str) -> list[Tensor]:
    """The parameters after some steps, of an optimizer with two groups and a scheduler; None as kind is plain DDP."""
    module = Model()
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer_class, options = OPTIMIZERS[name]
    groups = [
        {"params": [*module.first.parameters(), module.unused], "weight_decay": 0.1},
        {"params": [*module.last.parameters(), module.scale], "lr": 0.03},
    ]
    optimizer = optimizer_class(groups, **options) if kind is None else kind(groups, optimizer_class, **options)
    scheduler = StepLR(optimizer, 2, 0.5)
    for step in range(6):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        model(torch.randn(4, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(1, 2, 3)
def test_zero_in_100_lines_trains_to_the_bits_of_onecopy_and_of_ddp(world_size: int, name: str) -> None:
    simple = trained(example("zero_in_100_lines").SimpleZeRO, name)
    for kind in (None, ZeroRedundancyOptimizer):
        assert all(map(torch.equal, simple, trained(kind, name)))


@distributed(2)
def test_zero_in_100_lines_has_the_state_of_its_range_only(world_size: int) -> None:
    module = Model()
    optimizer = example("zero_in_100_lines").SimpleZeRO(module.parameters(), AdamW, lr=0.01)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = sum(state["exp_avg"].numel() for state in optimizer.inner.state.values())
    assert held <= len(optimizer.own) <= 0.5 * sum(param.numel() for param in module.parameters()) + 5 * 64
    assert len((EXAMPLES / "zero_in_100_lines.py").read_text().splitlines()) <= 100


# compare_levels.py, the demo


def test_the_demo_shows_the_losses_of_ddp_and_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    small = ("--steps", "6", "--width", "64", "--depth", "2", "--plot", str(tmp_path / "compare.png"))
    done = check_gpu.start([str(EXAMPLES / "compare_levels.py"), *small])
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ (DDP|level \d) +(.*?) *$", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == list(demo.LEVELS)
    cells = [row.split() for _, row in rows]
    assert {row[-1] for row in cells} == {"0"}, "the largest difference of a loss from DDP's"
    totals = [float(row[3]) for row in cells]
    assert totals[3] < 0.65 * totals[0] < totals[1] < 0.77 * totals[0]
    assert re.search(r'The model writes: "\S', done.stdout)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_live_display_has_a_row_and_a_bar_for_each_level() -> None:
    class Training:
        level, losses, milliseconds, total = "level 1", [8.0, 4.0, 1.0], 5.0, 3e6
        memory = dict.fromkeys(demo.KINDS, 1e6)

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(demo.Display(console, "tiny", 10).frame([Training(), Training()]))
    text = console.export_text()
    assert text.count("█" * demo.BAR_COLUMNS) == 2, text
    assert "█▄▁" in text
    assert len(demo.sparkline([float(step) for step in range(500)])) == 60


# check_gpu.py, here on the CPU


def report_of(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.partition("--- paste this into a report:\n")[2]


@takes_long
@pytest.mark.timeout(300)  # it compares 26 configurations and times 14
def test_all_checks_of_a_gpu_pass_on_the_cpu_and_the_report_has_all_rows() -> None:
    done = check_gpu.start([str(check_gpu.EXAMPLE)], "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(done)
    assert len(re.findall(r"^\| .+ \| ok \| \d", report, re.MULTILINE)) == 26
    times = re.findall(r"^\| (.+) \| [\d.]+ \| \d+ \| [\d.]+ \| - \| - \| - \|$", report, re.MULTILINE)
    assert {"DDP", "FSDP2", "torch's ZeroRedundancyOptimizer", "level 1", "ShardedDataParallel"} <= set(times)
    assert len(times) == 14
    assert "**All checks passed.**" in report


@takes_long
def test_a_wrong_result_and_an_error_are_told_and_an_error_on_one_rank_ends_the_run() -> None:
    done = check_gpu.start(["-m", "tests.support.check_gpu"], "--device", "cpu", "--quick", "--timeout", "2")
    assert done.returncode == 1
    report = report_of(done)
    assert re.search(r"^\| 0 level_1 \| ok \| 0", report, re.MULTILINE)
    assert re.search(r"^\| 1 other_options \| \*\*FAILED\*\*  \| \d", report, re.MULTILINE)
    assert "| 2 raises | **FAILED** ValueError: on all ranks | nan |" in report
    assert "**Stopped**, because the ranks are out of step" in report
    assert "4 level_1" not in report
    assert "**Some checks failed.**" in report


def test_without_torchrun_the_checks_say_how_to_start_them() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, str(check_gpu.EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.endswith("torchrun --nproc-per-node 2 examples/check_gpu.py\n")
