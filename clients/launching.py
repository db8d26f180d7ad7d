"""Starts the two ranks of a client with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANKS = 2
LIMIT = 240.0
"""Seconds after which a run counts as a hang."""


def environment() -> dict[str, str]:
    """The environment of a run: nothing is downloaded, and each rank has one thread."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def with_torchrun(script: Path, arguments: list[str], log: Path) -> bool:
    """Run a client with torchrun; return whether it ended within the limit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with log.open("w") as file:
        process = subprocess.Popen([*command, str(script), *arguments], stdout=file, stderr=file, env=environment())
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
            process.wait()
            return False
    return True
