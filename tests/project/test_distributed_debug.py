"""Runs under TORCH_DISTRIBUTED_DEBUG, where torch checks every collective of every rank against the others'."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.harness import takes_long
from tests.support.paths import ROOT

# DDP itself crashes under DETAIL with gloo in torch 2.13 (its constructor does, with nothing of ours involved), so what
# needs DDP runs under INFO.
RUNS = {
    "DETAIL": [
        "tests/state_dict/test_gather.py::test_a_consolidated_dict_is_the_plain_optimizers",
        "tests/step/test_parameter_storage.py",
        "tests/step/test_unusual_tensors.py",
        "-k",
        "consolidated or strides",
    ],
    "INFO": ["tests/step/test_join.py", "-k", "uneven_inputs and 2-"],
}


@takes_long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", RUNS)
def test_the_suite_passes_under(level: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *RUNS[level]],
        cwd=ROOT,
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": level},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
