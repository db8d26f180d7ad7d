"""Measure the time and the memory of gathering the optimizer state, with torch's class and onecopy in the same run.

The state is AdamW's for 25M parameters on two gloo processes. Each round consolidates once with torch's class and once
with onecopy, from the same values, and compares the results.

Peak extra memory is the highest resident set size, sampled every 2 ms by a thread, minus the size just before. It
includes the result itself: on rank 0, the whole state.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import AdamW

import onecopy

with warnings.catch_warnings():
    # Importing torch's class compiles TorchScript, which warns that TorchScript is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

ROUNDS = 3
REQUIRED_RATIO = 10
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Contender:
    """One of the two classes, and its measurements on this rank."""

    name: str
    optimizer: Any
    seconds: list[float] = field(default_factory=list)
    extra_bytes: list[int] = field(default_factory=list)

    def consolidate(self) -> dict[int, dict[str, Tensor]]:
        """Measure one consolidation, and return the state on rank 0."""
        release_free_memory()
        dist.barrier()
        with PeakMemory() as memory:
            start = time.perf_counter()
            self.optimizer.consolidate_state_dict(to=0)
            dist.barrier()
            self.seconds.append(time.perf_counter() - start)
        self.extra_bytes.append(memory.extra_bytes)
        return self.optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}


class PeakMemory:
    """Samples this process's resident set size in a thread while the block runs."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        """The growth of the resident set size from the start to the peak."""
        return self._peak - self._start

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._peak = max(self._peak, resident_bytes())
        self._peak = max(self._peak, resident_bytes())


def resident_bytes() -> int:
    """Return the resident set size of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


def release_free_memory() -> None:
    """Give freed memory back to the system, so that using it again counts as extra."""
    gc.collect()
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def make_params() -> list[Tensor]:
    """Return 25M parameters: an embedding, matrices as in a transformer, and vectors."""
    shapes = [(24576, 512), *[(512, 2048), (512,), (512, 512)] * 9, (512, 1024), (512, 512), (1024,)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def make_contender(name: str, optimizer_class: type) -> Contender:
    """Construct an optimizer and make one step, which creates the state of every parameter."""
    params = make_params()
    optimizer = optimizer_class(params, AdamW, lr=1e-3)
    for param in params:
        param.grad = param.detach() * 0.01
    optimizer.step()
    optimizer.zero_grad()
    return Contender(name, optimizer)


def check_equal(first: dict[int, dict[str, Tensor]], second: dict[int, dict[str, Tensor]]) -> None:
    """Raise ``AssertionError`` unless both states are equal bit by bit."""
    assert first.keys() == second.keys()
    for index, state in first.items():
        assert state.keys() == second[index].keys()
        assert all(torch.equal(value, second[index][key]) for key, value in state.items()), index


def free_result(optimizer: Any) -> None:
    """Free the gathered state, so that each round starts from the same memory."""
    optimizer.step()  # without gradients: nothing changes, but a consolidation is stale after a step
    if "_all_state_dicts" in vars(optimizer):
        optimizer._all_state_dicts.clear()  # torch's class would keep it until the next consolidation


def main() -> int:
    """Return 1 if onecopy is not fast enough."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch_zero = make_contender("torch's class", TorchZero)
    ours = make_contender("onecopy", onecopy.ZeroRedundancyOptimizer)
    for _ in range(ROUNDS):
        expected, got = torch_zero.consolidate(), ours.consolidate()
        check_equal(expected, got)
        del expected, got
        free_result(torch_zero.optimizer)
        free_result(ours.optimizer)

    console = Console(quiet=rank != 0)
    elements = sum(ours.optimizer.layout.elements_per_rank)
    table = Table(title=f"consolidate_state_dict(to=0), AdamW, {elements:,} parameters, {ROUNDS} rounds")
    for column in ("class", "rank", "median", "fastest", "slowest", "peak extra RSS"):
        table.add_column(column, justify="left" if column == "class" else "right")
    medians = []
    for contender in (torch_zero, ours):
        medians.append(statistics.median(contender.seconds))
        mine = [medians[-1], min(contender.seconds), max(contender.seconds), max(contender.extra_bytes)]
        everyone = [torch.empty(4, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.tensor(mine, dtype=torch.float64))
        for other, row in enumerate(everyone):
            *seconds, extra = row.tolist()
            cells = [f"{value:.3f} s" for value in seconds]
            table.add_row("" if other else contender.name, str(other), *cells, f"{extra / 1e6:.0f} MB")
    console.print(table)
    console.print(f"The whole state is {8 * elements / 1e6:.0f} MB. Both returned the same bits.")
    ratio = medians[0] / medians[1]
    console.print(f"onecopy is {ratio:.1f} times as fast as torch's class (required: {REQUIRED_RATIO}).")
    dist.destroy_process_group()
    return int(rank == 0 and ratio < REQUIRED_RATIO)


if __name__ == "__main__":
    sys.exit(main())
