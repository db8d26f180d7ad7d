"""onecopy can be imported where modules of POSIX systems are missing, and a feature that needs them says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from onecopy.checkpoint import save
from tests.support.paths import ROOT

SCRIPT = """
import importlib, os, pathlib, pkgutil, sys, tempfile
import torch, torch.distributed.checkpoint  # torch has ways of its own without these modules

POSIX = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "curses", "posix_ipc")
for name in POSIX:
    sys.modules[name] = None  # an import of it raises ImportError
del os.preadv
import onecopy

EXTRAS = ("onecopy.cli", "onecopy.integrations.")  # they need packages that may be missing
names = [found.name for found in pkgutil.walk_packages(onecopy.__path__, "onecopy.")]
names = [name for name in names if not name.startswith(EXTRAS)]
assert len(names) > 60, names
for name in names:
    importlib.import_module(name)
from onecopy import checkpoint

with tempfile.TemporaryDirectory() as folder:
    for call in (
        lambda: checkpoint.save(folder, 1, extra={}),
        lambda: checkpoint.load(sys.argv[1]),
        lambda: checkpoint.verify(sys.argv[1]),
    ):
        try:
            call()
        except (OSError, onecopy.CheckpointError) as error:
            assert "needs Linux or macOS" in str(error), error
        else:
            raise AssertionError("it was not refused")
    assert not list(pathlib.Path(folder).iterdir())
print("imported")
"""


def test_every_module_imports_without_posix_modules_and_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, extra={"a": 1})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(saved)], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.strip() == "imported", done.stderr
