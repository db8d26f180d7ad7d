"""The script with which a person checks their accelerators, here on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.check_gpu import EXAMPLE, start
from tests.support.harness import takes_long


@takes_long
@pytest.mark.timeout(300)  # it compares 26 configurations and times 14
def test_all_checks_pass_on_the_cpu_and_the_report_has_all_rows() -> None:
    done = start([str(EXAMPLE)], "--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    report = done.stdout.partition("--- paste this into a report:\n")[2]
    assert len(re.findall(r"^\| .+ \| ok \| \d", report, re.MULTILINE)) == 26
    times = re.findall(r"^\| (.+) \| [\d.]+ \| \d+ \| [\d.]+ \| - \| - \| - \|$", report, re.MULTILINE)
    assert {"DDP", "FSDP2", "torch's ZeroRedundancyOptimizer", "level 1", "ShardedDataParallel"} <= set(times)
    assert len(times) == 14
    assert "**All checks passed.**" in report


@takes_long
def test_a_wrong_result_and_an_error_are_told_and_an_error_on_one_rank_ends_the_run() -> None:
    done = start(["-m", "tests.support.check_gpu"], "--device", "cpu", "--quick", "--timeout", "2")
    assert done.returncode == 1
    report = done.stdout.partition("--- paste this into a report:\n")[2]
    assert re.search(r"^\| 0 level_1 \| ok \| 0", report, re.MULTILINE)
    assert re.search(r"^\| 1 other_options \| \*\*FAILED\*\*  \| \d", report, re.MULTILINE)
    assert "| 2 raises | **FAILED** ValueError: on all ranks | nan |" in report
    assert "**Stopped**, because the ranks are out of step" in report
    assert "4 level_1" not in report
    assert "**Some checks failed.**" in report


def test_without_torchrun_it_says_how_to_start_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.endswith("torchrun --nproc-per-node 2 examples/check_gpu.py\n")
