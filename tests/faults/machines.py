"""A link between two machines, each a network namespace, that is cut; see ``benchmarks/namespaces.py``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.faults.rows import Row
from tests.support.paths import ROOT

FAULT = "two machines, the link is cut or one is lost"
RUN = re.compile(r"^([^:|]+, [^:|]+): (.*)$", re.MULTILINE)
"""The line that tells of a run: its level and its disturbance, and the result."""


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield one row: with a count of 100 every level; otherwise one of them."""
    probe = ["unshare", "--net", "--map-root-user", "true"]
    if shutil.which(probe[0]) is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        yield Row(FAULT, 0, 0, 0.0, "skipped: this machine does not allow network namespaces")
        return
    command = [sys.executable, "benchmarks/namespaces.py", *([] if count >= 100 else ["--levels", "1"])]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    found = RUN.findall(done.stdout)
    problems = [f"{name}: {result}" for name, result in found if result != "ok"]
    if (done.returncode and not problems) or not found:
        problems.append(f"it has ended with the code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    tried = max(len(found), len(problems))
    yield Row(FAULT, tried, tried - len(problems), time.monotonic() - begun, "the time is that of all runs", problems)
