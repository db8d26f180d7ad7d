"""The harness itself: failing ranks fail their test and no other, few cases cover a table, torch checks collectives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering
from tests.support.harness import RanksFailedError, pools, takes_long
from tests.support.paths import ROOT


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


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_few_cases_are_picked_in_which_every_value_occurs_equally_often_up_to_one(sides: list[int]) -> None:
    table = [{f"side {side}": value for side, value in enumerate(row)} for row in product(*map(range, sides))]
    picked = covering(table)
    assert len(picked) == max(sides)
    counts = Counter(item for position in picked for item in table[position].items())
    assert counts.keys() == {item for case in table for item in case.items()}
    for side in range(len(sides)):
        occurrences = [count for (name, _), count in counts.items() if name == f"side {side}"]
        assert max(occurrences) - min(occurrences) <= 1


# DDP itself crashes under DETAIL with gloo in torch 2.13 (its constructor does, with nothing of ours involved), so what
# needs DDP runs under INFO.
RUNS = {
    "DETAIL": [
        "tests/state_dict/test_gather.py::test_a_consolidated_dict_is_the_plain_optimizers",
        "tests/step/test_parameter_storage.py",
        "tests/step/test_unusual_tensors.py",
        "-k",
        "consolidated or strides",
    ],
    "INFO": ["tests/step/test_join.py", "-k", "uneven_inputs and 2-"],
}


@takes_long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", RUNS)
def test_the_suite_passes_under_the_debug_level_of_torch(level: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *RUNS[level]],
        cwd=ROOT,
        env={**os.environ, "TORCH_DISTRIBUTED_DEBUG": level},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
