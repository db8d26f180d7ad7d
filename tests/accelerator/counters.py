"""Counts what a step asks of the device, each with the source line that asked for it."""

from __future__ import annotations

import collections
import functools
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

LAUNCH_SIZE = 100
"""About how many tensors one kernel of a ``_foreach_`` or ``_fused_`` operator takes as arguments on a real device."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(torch.__file__)
_STANDARD = os.path.dirname(os.__file__)


@functools.cache
def _kind(path: str) -> int:
    """Return 2 for a file of onecopy, 1 for a user's file, 0 for torch, the standard library and the simulator."""
    name = os.path.basename(path)
    if f"{os.sep}src{os.sep}onecopy{os.sep}" in path:
        return 2
    if path.startswith((_TORCH, "<")) or (os.path.dirname(path) == _HERE and not name.startswith("test_")):
        return 0
    return 0 if path.startswith(_STANDARD) and "site-packages" not in path else 1


def site() -> str:
    """Return the nearest source line inside onecopy, else the nearest one of a user, else "autograd"."""
    frame: Any = sys._getframe(1)
    user = None
    while frame is not None:
        path = frame.f_code.co_filename
        kind = _kind(path)
        if kind == 2:
            return f"{path[path.rindex(f'{os.sep}onecopy{os.sep}') + 1 :]}:{frame.f_lineno}"
        if kind == 1 and user is None:
            user = f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return user or "autograd"


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    name: str
    size: int  # bytes of the larger side: the input of a reduce-scatter, the output of an all-gather
    operations: int  # that NCCL would run: a list with uneven parts is one per part
    site: str  # the source line
    group: int  # number of the communicator


@dataclass(frozen=True)
class Synchronization:
    """One call in which the host waits for the device."""

    kind: str  # what waited, like "item", "event", "stream", "device", "pageable copy", or an operator's name
    site: str  # the source line
    age: int = 0  # for an event, the number of steps since it was recorded


@dataclass
class Step:
    """What was counted between two marks; kernels and copies by their name and source line.

    A ``_foreach_`` or ``_fused_`` operator is one kernel per 100 tensors.
    """

    kernels: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    copies: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    collectives: list[Collective] = field(default_factory=list)  # in the order of the calls
    synchronizations: list[Synchronization] = field(default_factory=list)  # calls in which the host waited
    peak: int = 0  # most bytes allocated on the device, above the level at the start
    peak_held: int = 0  # the same, with the memory that was freed but that ``record_stream`` still holds

    def kernel(self, name: str, where: str, tensors: int = 0) -> None:
        """Count an operator."""
        batched = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.kernels[name, where] += max(1, math.ceil(tensors / LAUNCH_SIZE)) if batched else 1
