"""Calls that must fail: on which ranks, how soon, and with which error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from onecopy import PeerFailedError, RanksDisagreeError, ZeroRedundancyOptimizer

Arguments = dict[str, Any]

SECONDS = 5.0
"""No error may take longer."""

NO_MEMORY = "no memory is left"


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter whose values are all different."""
    numel = int(torch.tensor(shape).prod())
    return nn.Parameter(torch.linspace(-1, 1, numel).reshape(shape).to(dtype))


def named(*members: Any) -> list[tuple[str, Any]]:
    """Name members ``one``, ``two`` ..."""
    return list(zip(("one", "two", "three"), members, strict=False))


def good() -> Arguments:
    """Arguments with which construction works."""
    return {"params": named(parameter(4, 3), parameter(3)), "optimizer_class": SGD, "lr": 0.1}


def failure_of(call: Callable[[], object]) -> Exception:
    """Return the error of a call on this rank, which must come soon; all ranks meet once more before it is checked."""
    dist.barrier()  # so that nobody waits for a rank that is still importing
    start, caught = time.monotonic(), None
    try:
        call()
    except Exception as error:
        caught = error
    seconds = time.monotonic() - start
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert int(total) == sum(range(dist.get_world_size()))
    assert caught is not None, "nothing was raised"
    assert seconds < SECONDS
    return caught


def expect(error: Exception, kind: type[Exception], text: str) -> None:
    """Exactly this class, with this in its message."""
    assert type(error) is kind, repr(error)
    assert re.search(text, str(error), re.DOTALL), str(error)


def expect_failure_of(culprits: Sequence[int], call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """The culprits raise their own error; all others say that the first of them failed, and how."""
    error = failure_of(call)
    if dist.get_rank() in culprits:
        expect(error, kind, text)
    else:
        which = ("rank " if len(culprits) == 1 else "ranks ") + ", ".join(map(str, culprits))
        expect(error, PeerFailedError, rf"rank {dist.get_rank()}: .*failed on {which}: {kind.__name__}: .*{text}")


def expect_no_memory(culprit: int, call: Callable[[], object]) -> None:
    """All ranks raise that memory has run out on one of them."""
    expect_failure_of([culprit], call, MemoryError, NO_MEMORY)


@contextmanager
def failing(place: Any, name: str, group_rank: int, calls: int = 0) -> Iterator[None]:
    """Let a function fail on one rank, after it has been called some times."""
    original = getattr(place, name)
    left = calls

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError(NO_MEMORY)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == group_rank:
            patch.setattr(place, name, fail)
        yield


def expect_disagreement(odd: int, call: Callable[[], object], text: str, odd_text: str) -> None:
    """All ranks raise the same error, which names the ranks and the value of each side."""
    error = failure_of(call)
    others = [rank for rank in range(dist.get_world_size()) if rank != odd]
    which = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
    expect(error, RanksDisagreeError, rf"First difference: .*\b{which}: {text}")
    expect(error, RanksDisagreeError, rf"First difference: .*\brank {odd}: {odd_text}")


def check_pool() -> None:
    """The ranks still work together: a good optimizer and a step."""
    arguments = good()
    optimizer = ZeroRedundancyOptimizer(**arguments)
    one = arguments["params"][0][1]
    expected = one.detach() - 0.1 * torch.ones(4, 3)
    one.grad = torch.ones(4, 3)
    optimizer.step()
    assert torch.equal(one, expected)
