"""Processes that end in every way: none of them may hang or abort."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.faults.rows import Row
from tests.support.paths import ROOT

END = re.compile(r"^(.+): (good|BAD), ([0-9.]+) s$", re.MULTILINE)
"""The line that tells of a group of two processes."""


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for the ways to end, each of which occurs at least twice, and one for ends after each training."""
    yield row_of("a process ends", [str(2 * count)], "ways")
    yield row_of("a process ends after a training, under load", [str(2 * count), "--trainings"], "kinds of training")


def row_of(fault: str, arguments: Sequence[str], cases: str) -> Row:
    """End processes, and count those that hang or abort."""
    command = [sys.executable, "-m", "tests.support.process_ends", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    found = END.findall(done.stdout)
    bad = [f"{name} has ended badly" for name, result, _ in found if result == "BAD"]
    if bad or done.returncode or not found:
        bad.append(f"the code is {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    survived = sum(result == "good" for _, result, _ in found)
    seconds = max((float(seconds) for _, _, seconds in found), default=0.0)
    return Row(fault, 2 * len(found), 2 * survived, seconds, f"{len({name for name, _, _ in found})} {cases}", bad)
