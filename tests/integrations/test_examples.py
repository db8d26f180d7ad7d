"""The examples for frameworks run and resume, where the framework is installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.check_gpu import start
from tests.support.harness import takes_long
from tests.support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples/frameworks").glob("*.py"))


def missing(example: Path) -> list[str]:
    """The packages that an example imports and that are not installed here."""
    names = set(re.findall(r"^(?:import|from) (\w+)", example.read_text(), re.MULTILINE))
    if "transformers" in names:
        names.add("accelerate")  # Trainer imports it later
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@takes_long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs_and_resumes(example: Path, tmp_path: Path) -> None:
    if absent := missing(example):
        pytest.skip(f"not installed: {', '.join(absent)}; make clients runs it")
    for _ in range(2):
        done = start([str(example), str(tmp_path)])
        assert done.returncode == 0, done.stderr
