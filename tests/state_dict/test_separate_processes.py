"""A program that makes its process group anew."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

LIMIT = 90.0

PROGRAM = """
import gc, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from onecopy import ZeroRedundancyOptimizer, checkpoint

def train(number):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW)
    ddp(torch.ones(2, 8)).sum().backward()
    zero.step()
    checkpoint.save(sys.argv[1], number, model=ddp, optimizer=zero)
    zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert len(zero.state_dict()["state"]) == 2

for number in range(3):
    train(number)
    gc.collect()
    dist.destroy_process_group()
    gone = f"{sys.argv[1]} {number}"  # rank 1 must not find the old store, which is on rank 0
    if os.environ["RANK"] == "0":
        open(gone, "w").close()
    while not os.path.exists(gone):
        time.sleep(0.05)
"""


def test_a_process_group_is_made_again_at_the_same_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
