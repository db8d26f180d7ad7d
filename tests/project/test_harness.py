"""The harness itself: a failing or hanging rank fails its test, and the next test is not affected."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import RanksFailedError, distributed, pools


def fail(rank: int, way: str) -> None:
    if dist.get_rank() == rank:
        if way == "raise":
            raise KeyError("only here")
        if way == "hang":
            time.sleep(600)
        if way == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGILL)
    if way == "signal":
        time.sleep(0.1)  # what the others say of its death is of no interest


def total() -> int:
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number)
    return int(number)


@pytest.mark.parametrize(
    ("rank", "way", "message"),
    [
        (1, "raise", r"(?s)rank 1 of 2.*in fail.*only here"),
        (1, "hang", r"rank 1 of 2\nno answer within the limit of 2 s"),
        (0, "exit", r"rank 0 of 2\nthe process exited with code 3"),
        (1, "signal", r"^--- rank 1 of 2\nthe process was killed by SIGILL$"),
    ],
)
def test_a_failure_is_shown_with_its_rank_and_does_not_poison_the_next_test(rank: int, way: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=message):
        pools.run(2, __name__, "fail", {"rank": rank, "way": way}, limit=2 if way == "hang" else 60)
    assert way != "hang" or time.monotonic() - start < 10
    assert pools.run(2, __name__, "total", {}) == [3, 3]


@distributed(1, 2)
def test_processes_are_reused(world_size: int) -> None:
    assert dist.get_world_size() == world_size
    assert total() == world_size * (world_size + 1) // 2
