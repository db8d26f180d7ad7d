"""Training loops inside ``fail_together`` that fail on one rank, each in a group of processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import onecopy
from onecopy import ReduceScatter, ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint, fail_together
from onecopy.comm import loop_watch
from tests.support.harness import COLLECTIVE_LIMIT, Pool
from tests.support.serving import LR, Served, Weighted, allreduce

LIMIT = 60.0

STEPS, FAILING_STEP = 6, 2

SECONDS = 10.0
"""No error may take longer, except for a process that is stopped."""

TIMEOUT = 5.0
"""The timeout of the process group if a process is stopped. Nothing tells a stopped process from a slow one before."""

SECONDS_AFTER_TIMEOUT = 5.0
"""How long after the timeout the error of a stopped process may come: three of them are a wait for other ranks."""

KINDS = ["parameter", "reduce-scatter", "overlap", "sharded data parallel"]

SAVING = "save"
"""A kind of training that saves a checkpoint in every step."""

EXCEPTIONS = [
    "exception before the forward pass",
    "exception in the forward pass",
    "exception in the backward pass",
    "exception in the closure",
    "exception in the scheduler",
    "exception in the data loader",
    "exception after the step",
    "wrong argument",
    "Ctrl-C",
]

BLOCKED = ["skipped step", "skipped iteration", "left early", "load on one rank"]

DIFFERENT = [
    "different arguments of the constructor",
    "different arguments of a hook or wrapper",
    "different options",
    "different arguments of save",
    "different arguments of load",
]

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

CASES = [*EXCEPTIONS, *BLOCKED, *DIFFERENT, *SIGNALS]
"""The ways in which a loop fails."""

SLOW = ["evaluation", "long computation"]
"""The ways in which a rank is only slow."""


@dataclass(frozen=True)
class Outcome:
    """How a rank's loop has ended: after how many seconds in the failing step, and with which exception."""

    seconds: float
    error: str
    text: str
    steps: int


def kinds_of(case: str) -> list[str]:
    """The kinds of training in which a loop can fail in one way."""
    if case in SIGNALS:
        return [*KINDS, SAVING]
    if case == "different arguments of a hook or wrapper":
        return KINDS[1:]
    # An overlapped step takes no closure. It is a part of backward(), and so cannot be left out alone.
    return [kind for kind in KINDS if kind != "overlap" or case not in ("exception in the closure", *BLOCKED)]


def seconds_allowed(case: str) -> float:
    """The seconds that an error may take."""
    return TIMEOUT + SECONDS_AFTER_TIMEOUT if case == "SIGSTOP" else SECONDS


def problem_of(case: str, failing_rank: int, found: list[Outcome | None]) -> str:
    """The first rank that did not end as it should, as text; empty if there is none."""
    for rank, outcome in enumerate(found):
        is_failing = rank == failing_rank
        if outcome is None:
            right = is_failing and case in SIGNALS
        elif case in SLOW or (is_failing and case in ("left early", "skipped iteration")):
            right = outcome.error == "NoneType"  # it makes all its calls
        elif is_failing and case in EXCEPTIONS:
            right = outcome.error == ("KeyboardInterrupt" if case == "Ctrl-C" else "ValueError")
        else:
            right = outcome.error in ("PeerFailedError", "RanksDisagreeError")
            right = right and outcome.seconds < seconds_allowed(case)
            right = right and all(words in outcome.text for words in _expected(case, failing_rank))
        if not right:
            return f"rank {rank}: {outcome}"
    return ""


def _expected(case: str, failing_rank: int) -> tuple[str, ...]:
    """Words of the errors of the other ranks, and of all ranks that wait for each other."""
    if case in EXCEPTIONS:
        return (f"rank {failing_rank}: {'KeyboardInterrupt' if case == 'Ctrl-C' else 'ValueError: '}",)
    if case in SIGNALS:
        return (f"rank {failing_rank} ended without an exception",)
    if case in DIFFERENT:
        return ("First difference", f"rank {failing_rank}: ")
    words = {"skipped step": ("step()", "backward()"), "load on one rank": ("load_state_dict()",)}
    return words.get(case, (f"rank {failing_rank}", "has left the training loop"))


def outcomes(world_size: int, **arguments: Any) -> list[Outcome | None]:
    """Run :func:`loop` on fresh processes, because process groups are aborted; None for a process that has ended."""
    case = arguments["case"]
    pool = Pool(world_size, TIMEOUT if case == "SIGSTOP" else COLLECTIVE_LIMIT, hosts_store=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            may_end = {arguments["failing_rank"]} if case in SIGNALS else set()
            return pool.run(__name__, "loop", {**arguments, "folder": folder}, LIMIT, may_end)
        finally:
            pool.close()


def loop(
    kind: str,
    case: str,
    failing_rank: int,
    folder: str,
    blocked_seconds: float = loop_watch.SECONDS,
    delay: float = 0.005,
    slow_seconds: float = 4.0,
) -> Outcome:
    """Train, and do the wrong thing of a case on one rank; ``delay`` is the time of a signal in the failing step."""
    loop_watch.SECONDS = blocked_seconds
    served, root = Served("parameter" if kind == SAVING else kind), Path(folder)
    is_failing = dist.get_rank() == failing_rank
    mistake = Mistake(case, served, is_failing, root, delay, slow_seconds)
    step, begun = 0, 0.0
    error: BaseException | None = None
    try:
        with fail_together():
            for step in range(STEPS):
                begun = time.monotonic()
                with mistake.made() if step == FAILING_STEP else contextlib.nullcontext(True) as goes_on:
                    if goes_on:
                        served.step()
                    elif goes_on is None:
                        break
                    if kind == SAVING:
                        checkpoint.save(root, step, model=served.model, optimizer=served.zero, keep=2)
    except BaseException as caught:
        error = caught
    return Outcome(time.monotonic() - begun, type(error).__name__, str(error), step)


@dataclass
class Mistake:
    """A step in which a rank does something wrong.

    Attributes:
        case: the mistake.
        served: the training.
        is_failing: whether this rank makes the mistake.
        root: a directory for checkpoints.
        delay: when a signal comes in the step, in seconds.
        slow_seconds: how long a slow rank takes.
    """

    case: str
    served: Served
    is_failing: bool
    root: Path
    delay: float
    slow_seconds: float

    @contextlib.contextmanager
    def made(self) -> Iterator[bool | None]:
        """Make the mistake. It yields whether to make the step too, or None to leave the loop."""
        if self.case in DIFFERENT or self.case == "wrong argument":
            self._call_differently()
            yield True
        elif self.case == "exception in the scheduler":  # all ranks have one, because it adds an option
            scheduler = LambdaLR(self.served.zero, lambda epoch: fail() if epoch and self.is_failing else 1.0)
            yield True
            scheduler.step()
        elif not self.is_failing:
            yield True
        elif self.case in BLOCKED:
            yield from self._block()
        elif self.case in SLOW:
            self._be_slow()
            yield True
        elif self.case in (*SIGNALS, "Ctrl-C"):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
            with sent_to_this_process(SIGNALS.get(self.case, signal.SIGINT), self.delay):
                yield True
        else:
            yield from self._raise()

    def _raise(self) -> Iterator[bool]:
        served, module = self.served, self.served.model.module
        if self.case == "exception before the forward pass":
            fail()
        elif self.case == "exception in the forward pass":
            with module.register_forward_pre_hook(fail):
                yield True
        elif self.case == "exception in the backward pass":
            weight: Tensor = module.weights[1]
            with weight.register_hook(fail):
                yield True
        elif self.case == "exception in the closure":
            served._pass()
            served.zero.step(fail)
        elif self.case == "exception in the data loader":
            next(iter(DataLoader(Unreadable())))
        elif self.case == "exception after the step":
            yield True
            fail()
        raise AssertionError(self.case)

    def _block(self) -> Iterator[bool | None]:
        if self.case == "skipped step":
            self.served._pass()
            self.served.zero.zero_grad()
        elif self.case == "load on one rank":  # the other ranks go on to their next backward pass
            options = self.served.plain.state_dict()["param_groups"]
            self.served.zero.load_state_dict({"state": {}, "param_groups": options})
        yield None if self.case == "left early" else self.case == "load on one rank"

    def _be_slow(self) -> None:
        if self.case == "evaluation":
            time.sleep(self.slow_seconds)
        until = time.monotonic() + self.slow_seconds
        while self.case == "long computation" and time.monotonic() < until:
            torch.ones(100, 100).sum()

    def _call_differently(self) -> None:
        """Make a call on all ranks, on one of them with another argument."""
        served, odd = self.served, self.is_failing
        if self.case == "wrong argument":
            ZeroRedundancyOptimizer(Weighted().parameters(), AdamW, lr=-1.0 if odd else LR)
        elif self.case == "different arguments of the constructor":
            ZeroRedundancyOptimizer(Weighted().parameters(), AdamW, lr=2 * LR if odd else LR)
        elif self.case == "different arguments of a hook or wrapper":
            wrap_differently(served.kind, odd)
        elif self.case == "different options":
            served.zero.param_groups[0]["lr"] *= 2 if odd else 1
        else:
            save: Callable[..., object] = lambda step: checkpoint.save(self.root, step, optimizer=served.zero)  # noqa: E731
            if self.case == "different arguments of save":
                save(2 if odd else 1)
            save(1)
            checkpoint.load(self.root, optimizer=served.zero, strict=not odd)


def wrap_differently(kind: str, odd: bool) -> None:
    """Wrap a module, or register a hook and run a backward pass, with another argument on one rank."""
    module = Weighted()
    zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=LR, overlap_with_ddp=kind == "overlap")
    if kind == "sharded data parallel":
        ShardedDataParallel(module, zero, bucket_bytes=1 << (16 if odd else 20))
        return
    model = torch.nn.parallel.DistributedDataParallel(module)
    if kind == "overlap":
        make = onecopy.hook_with_zero_step_interleaved if odd else onecopy.hook_with_zero_step
        model.register_comm_hook(None, make(allreduce, model, zero))
    else:
        state = ReduceScatter(zero, torch.bfloat16 if odd else None)
        model.register_comm_hook(state, onecopy.reduce_scatter_hook)
    model(torch.tensor(1.0)).backward()


@contextlib.contextmanager
def sent_to_this_process(number: signal.Signals, delay: float) -> Iterator[None]:
    """Send a signal to this process after a while, at the latest at the end of the block."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.start()
    yield
    timer.join()


class Unreadable(torch.utils.data.Dataset[Tensor]):
    """A data set whose samples cannot be read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        raise ValueError("no data")


def fail(*_: Any) -> Any:
    """Raise as a user's code does."""
    raise ValueError("no data")
