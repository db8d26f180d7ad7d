"""Processes end without a hang or an abort; ``make faults`` tries every way."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT


def test_processes_end_in_the_commonest_ways() -> None:
    command = [sys.executable, "-m", "tests.support.process_ends", "2", "--few"]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "processes ended, 0 of them badly" in ended.stdout
