"""``make fuzz`` itself: some of its programs, and that it finds a fault and prints a script that shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.drawing import draw
from tests.fuzz.operations import TEXTS, Train
from tests.fuzz.programs import Level, Program, allowed
from tests.fuzz.running import run, run_text, shrink
from tests.fuzz.script import script
from tests.fuzz.tables import BASE, CLASSES, PARTS, REFUSED
from tests.support.harness import takes_long
from tests.support.paths import ROOT

FAULT = """\
class Faulty(onecopy.ZeroRedundancyOptimizer):
    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2 and self.rank == 1:
            self.param_groups[0]["params"][0].data.mul_(1.01)


"""
"""An optimizer that goes wrong on one rank in its second step."""


def with_fault(text: str) -> str:
    """The script with that optimizer."""
    return text.replace("onecopy.ZeroRedundancyOptimizer(", "Faulty(").replace("def build(", f"{FAULT}def build(")


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_train_as_plain_ddp_does(seed: int) -> None:
    failure = run(draw(seed))
    assert failure is None, f"{failure.text}\n{script(draw(seed))}"


def test_a_program_is_a_function_of_its_seed() -> None:
    again = subprocess.run(
        [sys.executable, "-c", "from tests.fuzz.drawing import draw; print([draw(seed) for seed in range(50)])"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert again.stdout.strip() == str([draw(seed) for seed in range(50)])


def test_the_first_programs_have_everything_that_can_be_drawn() -> None:
    programs = [draw(seed) for seed in range(600)]
    assert {program.optimizer for program in programs} == set(CLASSES)
    assert {part for program in programs for part in program.parts} == set(PARTS)
    assert {level.kind for program in programs for level in program.levels} == set(REFUSED)
    assert {program.world_size for program in programs} == {2, 3}
    operations = {operation for program in programs for operation in program.operations}
    assert {operation.what for operation in operations} == {*TEXTS, Train.what}
    features = {name for operation in operations for name in operation.features}
    assert features >= frozenset().union(*REFUSED.values())


def test_a_refusal_is_a_failure() -> None:
    plain = replace(draw(0), parts=(BASE,), optimizer="SGD", options=(("lr", "0.1"),), groups=((),), ddp=())
    level = Level("overlap", hook="hook_with_zero_step")
    program = replace(plain, levels=(level,), operations=(Train(), Train(closure=True)))
    assert not allowed(program)
    failure = run(program)
    assert failure is not None
    assert "a closure cannot" in failure.kind


@takes_long
def test_a_fault_is_found_and_printed_as_a_script_that_shows_it(tmp_path: Path) -> None:
    def fails(program: Program) -> bool:
        failure = run_text(with_fault(script(program)), program.world_size)
        return failure is not None and failure.compared

    seed = next(seed for seed in range(5) if fails(draw(seed)))
    short = shrink(draw(seed), fails, seconds=60.0)
    steps = [operation for operation in short.operations if isinstance(operation, Train)]
    assert len(steps) == len(short.operations) == 2
    assert short.parts == (BASE,)
    assert run(short) is None
    file = tmp_path / "program.py"
    file.write_text(with_fault(script(short)))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1, ran.stderr
    assert "base.weight: Tensor-likes are not equal!" in ran.stderr
