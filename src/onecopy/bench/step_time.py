"""Measure the time of training steps of variants that take turns, bytes on the wire, and communication by itself."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from onecopy.bench.launching import COUNTED, idle_seconds, loopback_bytes
from onecopy.bench.models import Sizes
from onecopy.bench.variants import VARIANTS, YARDSTICK, Trained, difference
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives

TIMED = 2
"""The number of timed steps in a turn."""

COMPARED = 10
"""The number of steps after which parameters are compared with DDP's."""


@dataclass(slots=True)
class Timed:
    """A variant and its measurements."""

    name: str
    trained: Trained | None = None
    error: str = ""
    difference: float = 0.0
    seconds: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)


def iterate(trained: Trained, sizes: Sizes, number: int) -> tuple[float, float]:
    """Run one iteration, and return the times at which its backward pass and its step ended."""
    tokens = sizes.tokens(dist.get_rank(), number)
    trained.zero()
    trained.forward_backward(tokens)
    middle = time.perf_counter()
    trained.step()
    return middle, time.perf_counter()


def turn(timed: Timed, sizes: Sizes, number: int) -> None:
    """Run a few steps in a row: all but the first are timed, and the bytes of all are counted.

    So communication that a step leaves in flight for the next one (``overlap_forward``) is inside the timed steps.
    """
    assert timed.trained is not None
    dist.barrier()
    sent, first, backward = loopback_bytes(), (1 + TIMED) * number, 0.0
    iterate(timed.trained, sizes, first)
    idle = idle_seconds()
    start = last = time.perf_counter()
    for count in range(TIMED):
        middle, end = iterate(timed.trained, sizes, first + 1 + count)
        backward += middle - last
        last = end
    timed.idle.append((idle_seconds() - idle) / (last - start) / (os.cpu_count() or 1))
    timed.seconds.append((last - start) / TIMED)
    timed.backward.append(backward / TIMED)
    timed.step.append((last - start - backward) / TIMED)
    timed.trained.finish()
    dist.barrier()
    timed.wire.append((loopback_bytes() - sent) / (1 + TIMED))


def prepare(names: Sequence[str], sizes: Sizes, warm_up: int) -> list[Timed]:
    """Construct all variants from the same weights, train each for ``warm_up`` steps, and compare it with DDP."""
    origin = sizes.make()
    found = []
    reference: list[torch.Tensor] = []
    for name in sorted(names, key=lambda name: name != YARDSTICK):
        timed = Timed(name)
        found.append(timed)
        try:
            timed.trained = VARIANTS[name](copy.deepcopy(origin))
            for number in range(warm_up):
                iterate(timed.trained, sizes, number)
            timed.trained.finish()
            values = timed.trained.parameters()
            reference = reference or [value.detach().clone() for value in values]
            timed.difference = difference(values, reference)
        except Exception as error:
            timed.trained = None
            timed.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return sorted(found, key=lambda timed: list(VARIANTS).index(timed.name))


def measure(names: Sequence[str], sizes: Sizes, rounds: int, warm_up: int = COMPARED) -> list[dict[str, Any]]:
    """Measure all variants in turns, and return the rows of this rank."""
    prepared = prepare(names, sizes, warm_up)
    running = [timed for timed in prepared if timed.trained is not None]
    before = primitives(sizes)
    for number in range(rounds):
        for position in _random_order(len(running)):
            turn(running[position], sizes, 10 + number)
    after = primitives(sizes)
    counted = bool(os.environ.get(COUNTED))
    rows = [
        {
            "kind": "time",
            "variant": timed.name,
            "error": timed.error,
            "difference": timed.difference,
            "seconds": timed.seconds,
            "backward": timed.backward,
            "step": timed.step,
            "idle": timed.idle,
            "wire": timed.wire if counted else [],
        }
        for timed in prepared
    ]
    rows += [
        {
            "kind": "primitive",
            "name": name,
            "seconds": [seconds for seconds, _ in (*found, *after[name])],
            "worked": [worked for _, worked in (*found, *after[name])],
        }
        for name, found in before.items()
    ]
    return rows


def _random_order(count: int) -> list[int]:
    """Return a random order that is the same on all ranks, so that no variant always follows the same other one."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(time.time_ns()))
    dist.broadcast(order, 0)
    return order.tolist()


def primitives(sizes: Sizes, repeats: int = 5) -> dict[str, list[tuple[float, float]]]:
    """Measure communication by itself: an all-reduce, a reduce-scatter and a sharing of the model's bytes.

    Returns:
        For each of them pairs of seconds and of processor time of all threads of this rank.
    """
    collectives = Collectives()
    ranks = collectives.world_size
    count = sum(param.numel() for param in sizes.make().parameters()) // ranks * ranks
    flat = torch.zeros(count)
    parts = list(flat.view(ranks, -1))
    mine, pool, tag = torch.empty_like(parts[0]), BufferPool(), collectives.reserve_tags()

    def share() -> None:
        works = [collectives.broadcast(part, owner) for owner, part in enumerate(parts)]
        for work in works:
            work.wait()

    def reduce() -> None:
        collectives.reduce_scatter([[part] for part in parts], [mine], flat, 1 / ranks, pool, tag).wait()

    actions: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(flat),
        "reduce to owners": reduce,
        "share": share,
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for name, action in actions.items():
        for _ in range(1 + repeats):
            dist.barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            action()
            found.setdefault(name, []).append((time.perf_counter() - start, time.process_time() - processor_start))
        del found[name][0]
    return found
