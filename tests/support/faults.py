"""Ranks that die, or whose disk fails, at a chosen point of a save: the points, and the training."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import onecopy
from onecopy import checkpoint
from onecopy.checkpoint import storage
from onecopy.checkpoint.ranks import Ranks
from onecopy.comm.agreement import FailTogether

LONGEST_DELAY = 0.002
"""Seconds that a rank may sleep at each of its points, so that the same kill meets the others at different places."""

CHANGES = ("make_directory", "create", "write", "flush", "flush_directory", "rename", "remove")
EXCHANGES = ((Ranks, "together"), (FailTogether, "__exit__"), (Ranks, "gather_json"))
"""The beginning and the end of a block that fails on all ranks together, and a gathering of data."""

DIVISIBLE = ("write", "remove")
"""What can be half done when a process dies."""

WORLD_SIZES = (2, 3, 4)
KEEP = 2
BEFORE, AFTER = 4, 6
"""The newest step before the save in which a rank dies, and the step of that save."""


@dataclass
class Injector:
    """Counts the points of a save: each change to the file system, each exchange of the ranks. At one of them it acts.

    Attributes:
        call: the number of the point, or None to only count.
        moment: "before", "after" or, for what can be half done, "during" it.
        act: what happens there, such as the death of the process.
        delays: a seed for short pauses at every point, or None.
        points: the names of the points so far.
    """

    call: int | None = None
    moment: str = "before"
    act: Callable[[], object] = lambda: None
    delays: str | None = None
    points: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take the place of the real functions for a while."""
        source = random.Random(self.delays)
        with pytest.MonkeyPatch.context() as patch:
            for place, name in (*((storage, name) for name in CHANGES), *EXCHANGES):
                patch.setattr(place, name, self._around(name, getattr(place, name), source))
            yield

    def _around(self, name: str, function: Callable[..., Any], source: random.Random) -> Callable[..., Any]:
        def replacement(*arguments: Any, **options: Any) -> Any:
            moment = self.moment if len(self.points) == self.call else None
            self.points.append(name)
            if self.delays is not None:
                time.sleep(source.uniform(0.0, LONGEST_DELAY))
            if moment == "during":
                _half(name, function, arguments)
            if moment in ("before", "during"):
                self.act()
            result = function(*arguments, **options)
            if moment == "after":
                self.act()
            return result

        return replacement


def _half(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Do a part of something and no more."""
    if name == "write":
        descriptor, content = arguments
        function(descriptor, memoryview(content)[: len(content) // 2])
    else:
        for path in sorted(Path(arguments[0]).iterdir())[:1]:
            path.unlink()


def moments_of(name: str) -> tuple[str, ...]:
    """When something can happen, relative to a point."""
    return ("before", "during", "after") if name in DIVISIBLE else ("before", "after")


class Run:
    """A tiny training: dropout and random batches, so that the random numbers of every rank matter."""

    def __init__(self) -> None:
        torch.manual_seed(17)
        self.model = nn.Sequential(nn.Linear(6, 24), nn.Dropout(0.2), nn.Linear(24, 5))
        self.optimizer = onecopy.ZeroRedundancyOptimizer(self.model.parameters(), AdamW, lr=0.01)
        self.scheduler = StepLR(self.optimizer, 3, 0.5)
        self.step = 0
        torch.manual_seed(100 + dist.get_rank())

    def train(self, count: int) -> None:
        """Go on for some steps."""
        for _ in range(count):
            self.optimizer.zero_grad()
            loss: Tensor = self.model(torch.randn(4, 6)).square().mean()
            loss.backward()
            for param in self.model.parameters():
                dist.all_reduce(param.grad)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1

    def save(self, root: Path, blocking: bool, keep: int | None = KEEP) -> Path:
        """Save under the current step."""
        extra = checkpoint.capture(position=self.step, scheduler=self.scheduler)
        what: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "extra": extra}
        return checkpoint.save(root, self.step, **what, keep=keep, blocking=blocking)

    def load(self, root: Path) -> Path:
        """Go on from the newest checkpoint; return which one it was."""
        loaded = checkpoint.load(root, model=self.model, optimizer=self.optimizer)
        self.step = loaded.step
        assert checkpoint.restore(loaded.extra, scheduler=self.scheduler) == loaded.step
        return loaded.path

    def digest(self) -> str:
        """Of every bit that training goes on from: weights, this rank's optimizer state, options, random numbers."""
        text = hashlib.sha256(repr((self.step, self.scheduler.state_dict())).encode())
        inner = self.optimizer.optim
        stepped = [param for group in inner.param_groups for param in group["params"]]
        state = [value for param in stepped for _, value in sorted(inner.state[param].items())]
        for tensor in (*self.model.state_dict().values(), *state, torch.get_rng_state()):
            text.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return text.hexdigest()


@dataclass(frozen=True)
class Kill:
    """Which rank dies where: at the point of its save with the number ``call``."""

    world_size: int
    blocking: bool
    rank: int
    call: int
    moment: str
    seed: int = 0

    def __str__(self) -> str:
        mode = "blocking" if self.blocking else "background"
        return f"{self.world_size} ranks, {mode}: rank {self.rank} dies {self.moment} point {self.call}"


@dataclass
class Outcome:
    """The result of a kill; ``problems`` lists everything that is wrong."""

    kill: Kill
    point: str
    committed: bool = False
    hangs: int = 0
    partial_loads: int = 0
    cleared: bool = False
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
