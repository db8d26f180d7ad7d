"""Starts the two ranks of a client: with torchrun, or as forks of a process that has imported the framework.

Both give the ranks torchrun's environment variables. The imports of a framework take most of the time of a run, so that
forks make a table several times faster.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

RANKS = 2
LIMIT = 240.0
"""Seconds after which a run counts as a hang."""

GRACE = 5.0
"""Seconds after which the other rank of a failed one is ended, as torchrun does."""


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


def preload(script: Path) -> None:
    """Import what a client imports, and what torch imports when a model trains."""
    os.environ.update(environment())
    sys.path.insert(0, str(script.parent))
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.optim")
    runpy.run_path(str(script), run_name="preload")


def with_forks(script: Path, arguments: list[str], log: Path) -> bool:
    """Run a client in forks of this process; return whether it ended within the limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {_fork(script, arguments, log, rank, port) for rank in range(RANKS)}
    deadline = time.monotonic() + LIMIT
    has_failed = False
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.discard(child)
            if status and not has_failed:
                has_failed, deadline = True, time.monotonic() + GRACE
        elif time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return has_failed
        else:
            time.sleep(0.05)
    return True


def _fork(script: Path, arguments: list[str], log: Path, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    atexit._clear()
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            ROLE_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            LOCAL_WORLD_SIZE=str(RANKS),
            GROUP_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="clients",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
        )
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        atexit._run_exitfuncs()  # as at the end of an interpreter, but not the functions of the process it is a fork of
        sys.stdout.flush()
        os._exit(0)
    except SystemExit as ending:
        os._exit(int(ending.code or 0))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
