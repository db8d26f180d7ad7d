"""Programs in which a process ends, or makes its process group anew."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.process_ends import free_port

LIMIT = 180.0

BEGIN = """
import gc, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from onecopy import ZeroRedundancyOptimizer, checkpoint

def begin():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW)

def step(ddp, zero):
    ddp(torch.ones(2, 8)).sum().backward()
    zero.step()
"""

AGAIN = """
def train(number):
    ddp, zero = begin()
    step(ddp, zero)
    checkpoint.save(sys.argv[1], number, model=ddp, optimizer=zero)
    zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert len(zero.state_dict()["state"]) == 2

for number in range(3):
    train(number)
    gc.collect()
    dist.destroy_process_group()
"""

EXIT = """
ddp, zero = begin()
step(ddp, zero)
if dist.get_rank() == 1:
    sys.exit(1)  # as a command line library does after an exception
step(ddp, zero)
"""


def run(program: str, *arguments: object) -> list[tuple[int, float, str]]:
    """Run a program on two ranks; return for each the exit code, the seconds and the error output."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command, begun = [sys.executable, "-c", BEGIN + program, *map(str, arguments)], time.monotonic()
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = []
    for rank in ranks:
        _, errors = rank.communicate(timeout=LIMIT)
        ends.append((rank.returncode, time.monotonic() - begun, errors))
    return ends


def test_a_process_group_is_made_again_at_the_same_address(tmp_path: Path) -> None:
    ends = run(AGAIN, tmp_path)
    assert [code for code, _, _ in ends] == [0, 0], ends


def test_a_rank_that_exits_with_an_error_does_not_let_the_others_wait() -> None:
    (code, seconds, errors), (exit_code, _, _) = run(EXIT)
    assert (code, exit_code) == (1, 1)
    assert "Connection closed by peer" in errors
    assert seconds < 30


def test_processes_end_in_the_commonest_ways_without_a_hang_or_an_abort() -> None:
    """``make faults`` tries every way."""
    command = [sys.executable, "-m", "tests.support.process_ends", "2", "--few"]
    ended = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "processes ended, 0 of them badly" in ended.stdout
