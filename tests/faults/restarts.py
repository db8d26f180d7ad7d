"""Ranks that are killed under ``torchrun --max-restarts``: the run must end with the bits of an undisturbed run.

Run as a script, this module is one rank: it trains from the newest checkpoint on. In the first attempt it kills itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onecopy import checkpoint
from tests.faults.rows import Row
from tests.support.exact_training import ExactTraining
from tests.support.paths import ROOT

STEPS, SAVE_EVERY = 30, 4
KINDS = ["parameter", "reduce-scatter", "overlap", "sharded data parallel"]

LATEST = 0.015
"""The latest time of a signal after the beginning of a step, in seconds."""

LIMIT = 300.0


def launch(root: Path, kind: str, failing_rank: int = -1, step: int = 0, delay: float = 0.0) -> str:
    """Run a training; return what is wrong with its end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "tests.faults.restarts", str(root), kind, str(failing_rank), str(step), str(delay)]
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*torchrun, "--max-restarts", "3", *worker]
    environment: Any = {"cwd": ROOT, "env": {**os.environ, **settings}}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT, **environment)
    except subprocess.TimeoutExpired:
        return f"it has not ended within {LIMIT:.0f} s"
    return done.stderr[-2000:] if done.returncode else ""


def work(root: Path, kind: str, failing_rank: int, failing_step: int, delay: float) -> None:
    """Train one rank from the newest checkpoint on; leave the time of the kill, of the restart, and a digest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training, rank = ExactTraining(kind), dist.get_rank()
    loaded = checkpoint.load(root, model=training.model, optimizer=training.zero, missing_ok=True)
    training.passes = 0 if loaded is None else loaded.step  # each pass has its own inputs
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt and rank == 0:
        (root / "restarted").write_text(str(time.monotonic()))
    for step in range(training.passes + 1, STEPS + 1):
        is_killed = (attempt, rank, step) == (0, failing_rank, failing_step)
        if is_killed:
            (root / "killed").write_text(str(time.monotonic()))
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            timer.start()
        training.step()
        if step % SAVE_EVERY == 0:
            checkpoint.save(root, step, model=training.model, optimizer=training.zero, keep=2)
        if is_killed:
            timer.join()  # at the latest now
    content = b"".join(param.detach().numpy().tobytes() for param in training.model.parameters())
    (root / f"digest-{rank}").write_text(hashlib.sha256(content).hexdigest())
    dist.destroy_process_group()


def restart(root: Path, plain: Path, kind: str, source: random.Random) -> tuple[float, str]:
    """Run a training in which a rank is killed; return the seconds until it trained again, and what was wrong."""
    failing_rank, step, delay = source.randrange(2), source.randrange(1, STEPS + 1), source.uniform(0, LATEST)
    what = f"{kind}, rank {failing_rank} in step {step} after {delay:.4f} s"
    problem = launch(root, kind, failing_rank, step, delay)
    if problem:
        return 0.0, f"{what}: {problem}"
    if not (root / "restarted").exists():
        return 0.0, f"{what}: it was not restarted"
    digests = [path.read_text() for folder in (root, plain) for path in folder.glob("digest-*")]
    if len(digests) != 4 or len(set(digests)) != 1:
        return 0.0, f"{what}: it has ended with other parameters"
    return float((root / "restarted").read_text()) - float((root / "killed").read_text()), ""


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield one row; each start takes seconds, so that there are only a tenth as many kills as the count says."""
    source, slowest, problems = random.Random(seed), 0.0, list[str]()
    number = math.ceil(count / 10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS[:number]:
            (folder / kind).mkdir()
            problem = launch(folder / kind, kind)
            problems += [f"undisturbed, {kind}: {problem}"] if problem else []
        for position in range(number):
            kind, root = KINDS[position % len(KINDS)], folder / str(position)
            root.mkdir()
            seconds, problem = restart(root, folder / kind, kind, source)
            slowest, problems = max(slowest, seconds), [*problems, *([problem] if problem else [])]
    survived = max(0, number - len(problems))
    yield Row("SIGKILL, restarted by torchrun", number, survived, slowest, "until it trained again", problems)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
