"""The harness itself: a failing or hanging rank fails its test, and the next test is not affected."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import RanksFailedError, distributed, pools


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def die() -> None:
    if dist.get_rank() == 0:
        os._exit(3)


def die_of_an_illegal_instruction() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGILL)
    time.sleep(0.1)  # what the others say of its death is of no interest


def total() -> int:
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number)
    return int(number)


def test_an_exception_is_shown_with_its_rank_and_traceback() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 of 2.*raise_on_rank_one.*only here"):
        pools.run(2, __name__, "raise_on_rank_one", {})
    assert pools.run(2, __name__, "total", {}) == [3, 3]


def test_a_hang_fails_within_its_limit_and_does_not_poison_the_next_test() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 of 2\nno answer within the limit of 2 s"):
        pools.run(2, __name__, "hang", {}, limit=2)
    assert time.monotonic() - start < 10
    assert pools.run(2, __name__, "total", {}) == [3, 3]


def test_a_dead_process_is_reported() -> None:
    with pytest.raises(RanksFailedError, match="rank 0 of 2\nthe process exited with code 3"):
        pools.run(2, __name__, "die", {})
    assert pools.run(2, __name__, "total", {}) == [3, 3]


def test_a_process_that_a_signal_killed_is_reported_with_the_name_of_the_signal() -> None:
    with pytest.raises(RanksFailedError, match=r"^--- rank 1 of 2\nthe process was killed by SIGILL$"):
        pools.run(2, __name__, "die_of_an_illegal_instruction", {})
    assert pools.run(2, __name__, "total", {}) == [3, 3]


@distributed(1, 2)
def test_processes_are_reused(world_size: int) -> None:
    assert dist.get_world_size() == world_size
    assert total() == world_size * (world_size + 1) // 2
