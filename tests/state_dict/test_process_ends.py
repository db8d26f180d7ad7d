"""Processes that have a background service end in every way without a hang or an abort."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT
from tests.support.process_ends import WAYS


def test_processes_end_in_every_way() -> None:
    command = [sys.executable, "-m", "tests.support.process_ends", str(2 * len(WAYS)), "tcp"]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{2 * len(WAYS)} processes ended, 0 of them badly" in ended.stdout
