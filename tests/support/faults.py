"""Ranks that die at a chosen point of a save: the points, the training, and the record of what happened."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

COLLECTIVE_LIMIT = 10.0
"""Seconds after which gloo gives up on a collective."""

LIMIT = 30.0
"""Seconds after which a rank that has not ended counts as one that hangs."""

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


class Injector:
    """Counts the points of a save: each change to the file system, each exchange of the ranks. At one of them it acts.

    Args:
        call: the number of the point, or None to only count.
        moment: "before", "after" or, for what can be half done, "during" it.
        act: what happens there, such as the death of the process.
        delays: a seed for short pauses at every point, or None.
    """

    def __init__(
        self,
        call: int | None = None,
        moment: str = "before",
        act: Callable[[], object] = lambda: None,
        delays: str | None = None,
    ) -> None:
        self.points: list[str] = []
        self._call = call
        self._moment = moment
        self._act = act
        self._random = None if delays is None else random.Random(delays)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take the place of the real functions for a while."""
        places = [*((storage, name) for name in CHANGES), *EXCHANGES]
        real = [getattr(place, name) for place, name in places]
        for (place, name), function in zip(places, real, strict=True):
            setattr(place, name, self._around(name, function))
        try:
            yield
        finally:
            for (place, name), function in zip(places, real, strict=True):
                setattr(place, name, function)

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **options: Any) -> Any:
            here = len(self.points) == self._call
            self.points.append(name)
            if self._random is not None:
                time.sleep(self._random.uniform(0.0, LONGEST_DELAY))
            if here and self._moment == "before":
                self._act()
            if here and self._moment == "during":
                _half(name, function, arguments)
                self._act()
            result = function(*arguments, **options)
            if here and self._moment == "after":
                self._act()
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


def die() -> None:
    """End this process at once, as a machine that fails would."""
    os.kill(os.getpid(), signal.SIGKILL)


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
        return checkpoint.save(
            root,
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            extra=extra,
            keep=keep,
            blocking=blocking,
        )

    def load(self, root: Path) -> Path:
        """Go on from the newest checkpoint; return which one it was."""
        loaded = checkpoint.load(root, model=self.model, optimizer=self.optimizer)
        self.step = loaded.step
        assert checkpoint.restore(loaded.extra, scheduler=self.scheduler) == loaded.step
        return loaded.path

    def digest(self) -> str:
        """Of every bit that training goes on from: weights, this rank's optimizer state, options, random numbers."""
        text = hashlib.sha256(repr((self.step, self.scheduler.state_dict())).encode())
        for tensor in self._tensors():
            text.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return text.hexdigest()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.model.state_dict().values()
        inner = self.optimizer.optim
        for group in inner.param_groups:
            for param in group["params"]:
                yield from (value for _, value in sorted(inner.state[param].items()))
        yield torch.get_rng_state()


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class Outcome:
    """The result of a kill; ``problems`` lists everything that is wrong."""

    kill: Kill
    point: str = ""
    committed: bool = False
    hangs: int = 0
    partial_loads: int = 0
    cleared: bool = False
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
