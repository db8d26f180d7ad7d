"""Train with every DDP hook for a long time, with random delays, and compare with plain DDP.

Each configuration (hook, number of ranks, bucket size) runs in its own gloo processes. Ranks sleep for up to 5 ms at
random: before they reduce a bucket, before they return the reduced bucket, before and after ``step()``. Ten iterations
run at a time, so that nothing else synchronizes the ranks. Then plain DDP with the plain optimizer runs the same ten
iterations without delays. The parameters after each iteration must be

- equal on all ranks, bit by bit;
- equal to plain DDP's, bit by bit. With the overlap hooks, DDP runs the same ``allreduce_hook``. The reduce-scatter
  hook sums in another order, so on more than two ranks a difference of ``TOLERANCE`` is allowed. One update more or
  less would change parameters by about a hundred times that.

A configuration that does not answer in time is reported as a hang, and the stacks of its threads are printed.
"""

# No `from __future__ import annotations` here: DDP reads a hook's annotations and wants the real types.

import argparse
import copy
import faulthandler
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import onecopy

TOLERANCE = 1e-4
BLOCK = 10
LONGEST_DELAY = 0.005
COLLECTIVE_LIMIT = 60.0
"""The timeout of gloo's collectives in seconds, so that most hangs end with a traceback."""

HOOKS = ("hook_with_zero_step", "hook_with_zero_step_interleaved", "reduce_scatter_hook")


@dataclass(frozen=True, slots=True)
class Buckets:
    """DDP's bucket size. DDP rebuilds its buckets after the first pass, unless it looks for unused parameters."""

    name: str
    cap_mb: float
    unused_branch: bool


BUCKETS = (Buckets("tiny", 0.001, True), Buckets("regrouped", 0.008, False), Buckets("one", 25.0, True))


@dataclass(frozen=True, slots=True)
class Configuration:
    """A hook, a number of ranks and a bucket size, and the number of iterations."""

    hook: str
    world_size: int
    buckets: Buckets
    count: int
    seed: int

    @property
    def scatters(self) -> bool:
        """Whether gradients are reduced only to their owners."""
        return self.hook == "reduce_scatter_hook"

    @property
    def tolerance(self) -> float:
        """The largest allowed difference from plain DDP's parameters."""
        return TOLERANCE if self.scatters and self.world_size > 2 else 0.0

    @property
    def limit(self) -> float:
        """The time limit in seconds."""
        return COLLECTIVE_LIMIT + 30.0 + 0.6 * self.count

    def __str__(self) -> str:
        """Return the description that ``--only`` is compared with."""
        return f"{self.hook} {self.world_size} ranks {self.buckets.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one rank."""

    buckets: int
    difference: float
    seconds: float


class Model(nn.Module):
    """A model with an embedding, a branch that a forward pass may skip, and parameters that are large enough to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.branch = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor, with_branch: bool) -> Tensor:
        """Return the logits of the next token."""
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        if with_branch:
            hidden = hidden + torch.tanh(self.branch(hidden))
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups with different options."""
        params = dict(self.named_parameters())
        embedding = [params.pop("embedding.weight")]
        return [
            {"params": embedding, "lr": 3e-2, "weight_decay": 0.0},
            {"params": [param for param in params.values() if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in params.values() if param.dim() <= 1], "weight_decay": 0.0, "lr": 2e-2},
        ]


class Delays:
    """The random delays of this rank."""

    def __init__(self, seed: int, rank: int) -> None:
        self._random = random.Random(f"delays {seed} {rank}")

    def pause(self) -> None:
        """Sleep for a random time; in half of the calls, do not sleep."""
        time.sleep(max(0.0, self._random.uniform(-LONGEST_DELAY, LONGEST_DELAY)))


class Run:
    """A model in training; ``pause`` is called before and after each step."""

    def __init__(
        self,
        configuration: Configuration,
        ddp: DistributedDataParallel,
        optimizer: Optimizer,
        pause: Callable[[], None],
    ) -> None:
        self._configuration = configuration
        self._ddp = ddp
        self._optimizer = optimizer
        self._scheduler = CosineAnnealingLR(optimizer, T_max=25, eta_min=5e-3)
        self._pause = pause

    def iterate(self, number: int) -> Tensor:
        """Train on one batch and return all parameters."""
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"batch {self._configuration.seed} {number} {dist.get_rank()}".encode())
        )
        tokens = torch.randint(0, 64, (8,), generator=generator)
        unused = self._configuration.buckets.unused_branch and torch.rand(1, generator=generator).item() < 0.6
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._ddp(tokens, not unused), (tokens * 7 + 3) % 64)
        loss.backward()
        self._pause()
        self._optimizer.step()
        self._pause()
        self._scheduler.step()
        return torch.cat([param.detach().flatten() for param in self._ddp.parameters()])


def make_ddp(model: nn.Module, configuration: Configuration) -> DistributedDataParallel:
    buckets = configuration.buckets
    return DistributedDataParallel(
        model,
        bucket_cap_mb=buckets.cap_mb,
        find_unused_parameters=buckets.unused_branch,
        gradient_as_bucket_view=not buckets.unused_branch,
    )


def register_hook(
    name: str, ddp: DistributedDataParallel, optimizer: Any, pause: Callable[[], None], seen: set[int]
) -> None:
    """Register a hook that pauses before and after every bucket's reduction and records the bucket's index."""

    def delayed(hook: Callable[[Any, Any], Future[Any]]) -> Callable[[Any, Any], Future[Any]]:
        def with_pauses(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
            if bucket.index() == 0:
                seen.clear()
            seen.add(bucket.index())
            pause()
            return hook(state, bucket)

        return with_pauses

    def reduced_late(state: Any, bucket: Any) -> Future[Any]:
        def return_late(future: Future[Any]) -> Any:
            pause()
            return future.value()

        return allreduce_hook(state, bucket).then(return_late)

    if name == "reduce_scatter_hook":
        ddp.register_comm_hook(optimizer, delayed(onecopy.reduce_scatter_hook))
    else:
        ddp.register_comm_hook(None, getattr(onecopy, name)(delayed(reduced_late), ddp, optimizer))


def train(configuration: Configuration) -> Outcome:
    """Train one rank with the hook and with plain DDP, and compare the parameters after each iteration."""
    torch.manual_seed(configuration.seed)
    model = Model()
    plain_model = copy.deepcopy(model)
    plain_ddp = make_ddp(plain_model, configuration)
    if not configuration.scatters:
        # It divides where DDP itself multiplies by the inverse, which is not the same on three ranks.
        plain_ddp.register_comm_hook(None, allreduce_hook)
    plain = Run(configuration, plain_ddp, AdamW(plain_model.groups(), lr=1e-2), lambda: None)

    delays = Delays(configuration.seed, dist.get_rank())
    ddp = make_ddp(model, configuration)
    optimizer = onecopy.ZeroRedundancyOptimizer(
        model.groups(),
        AdamW,
        lr=1e-2,
        overlap_with_ddp=not configuration.scatters,
    )
    buckets: set[int] = set()
    register_hook(configuration.hook, ddp, optimizer, delays.pause, buckets)
    ours = Run(configuration, ddp, optimizer, delays.pause)

    allowed, largest = configuration.tolerance, 0.0
    start = time.perf_counter()
    for first in range(0, configuration.count, BLOCK):
        numbers = range(first, min(first + BLOCK, configuration.count))
        got = torch.stack([ours.iterate(number) for number in numbers])
        expected = torch.stack([plain.iterate(number) for number in numbers])
        check_equal_everywhere(got, first)
        differences = (got - expected).abs().amax(dim=1).tolist()
        for number, difference in zip(numbers, differences, strict=True):
            if not difference <= allowed:
                raise AssertionError(f"iteration {number}: {difference:.1e} from plain DDP, allowed is {allowed:.0e}")
        largest = max(largest, *differences)
    return Outcome(len(buckets), largest, time.perf_counter() - start)


def check_equal_everywhere(rows: Tensor, first: int) -> None:
    """Raise ``AssertionError`` on all ranks if the ranks differ in a row."""
    mine = torch.tensor([zlib.crc32(row.numpy().tobytes()) for row in rows])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for number, digests in enumerate(torch.stack(everyone, dim=1).tolist(), start=first):
        if len(set(digests)) > 1:
            raise AssertionError(f"iteration {number}: ranks differ, digests of their parameters {digests}")


def serve(pipe: Connection, configuration: Configuration, rank: int, store: str) -> None:
    """Run one rank in its process, and send its outcome or a traceback to the parent process."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(configuration.limit - 5.0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=configuration.world_size,
            timeout=timedelta(seconds=COLLECTIVE_LIMIT),
        )
        answer: Outcome | str = train(configuration)
        dist.destroy_process_group()
    except Exception:
        answer = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    pipe.send(answer)


def run(configuration: Configuration) -> tuple[list[Outcome], dict[int, str]]:
    """Run a configuration and return the outcomes of all ranks, and the problems by rank."""
    context = multiprocessing.get_context("forkserver")
    # Imports that take seconds happen once, in the server process that the ranks are forked from.
    context.set_forkserver_preload(["onecopy", "rich.live", "torch.distributed.optim", "torch._dynamo"])
    pipes: dict[Any, int] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(configuration.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, configuration, rank, os.path.join(folder, "store")), daemon=True
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            return collect(pipes, processes, configuration.limit)
        finally:
            for process in processes:
                process.join(timeout=5.0)
                process.kill()
                process.join()


def collect(pipes: dict[Any, int], processes: list[Any], limit: float) -> tuple[list[Outcome], dict[int, str]]:
    """Return the answers of all ranks that arrive in time, and the problems by rank."""
    outcomes: list[Outcome] = []
    problems: dict[int, str] = {}
    waiting = dict(pipes)
    deadline = time.monotonic() + limit
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv()
            except (EOFError, ConnectionError):
                processes[rank].join(timeout=5.0)
                answer = f"the process has ended with the exit code {processes[rank].exitcode}"
            if isinstance(answer, Outcome):
                outcomes.append(answer)
            else:
                problems[rank] = answer
                # The other ranks wait for this one: give them the timeout of a collective, not more.
                deadline = min(deadline, time.monotonic() + COLLECTIVE_LIMIT + 5.0)
    for rank in waiting.values():
        problems[rank] = f"hang: no answer within {limit:.0f} s"
    return outcomes, problems


def choose(count: int, seed: int, only: str) -> list[Configuration]:
    """Return the configurations whose description contains ``only``."""
    everything = [
        Configuration(hook, world_size, buckets, count, seed)
        for hook in HOOKS
        for world_size in (2, 3, 4)
        for buckets in BUCKETS
    ]
    return [configuration for configuration in everything if only in str(configuration)]


def main() -> int:
    """Return 1 if a configuration hung, failed or differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=500, help="iterations of each configuration")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the values, the batches and the delays")
    parser.add_argument(
        "--only", default="", help="run configurations that contain this text, such as 'reduce_scatter_hook 3 ranks'"
    )
    arguments = parser.parse_args()
    configurations = choose(arguments.count, arguments.seed, arguments.only)
    if arguments.count < 1 or not configurations:
        parser.error("nothing to run")

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns whenever it finds no unused parameter
    console = Console()
    table = Table(title=f"{arguments.count} iterations at random speeds, beside plain DDP (seed {arguments.seed})")
    for column in ("hook", "ranks", "buckets", "graph", "iterations", "largest difference", "seconds", "result"):
        table.add_column(column, justify="right" if column in ("ranks", "seconds") else "left")
    failed: list[tuple[Configuration, dict[int, str]]] = []
    start = time.perf_counter()
    with Live(table, console=console, auto_refresh=False) as live:
        for configuration in configurations:
            outcomes, problems = run(configuration)
            if problems:
                failed.append((configuration, problems))
            table.add_row(*row(configuration, outcomes, problems))
            live.refresh()
    for configuration, problems in failed:
        console.rule(f"{configuration}")
        for rank, problem in sorted(problems.items()):
            console.print(f"rank {rank}: {problem}", markup=False, highlight=False)
    passed = len(configurations) - len(failed)
    console.print(
        f"\n{passed} of {len(configurations)} configurations are equal on all ranks and equal to plain DDP after every "
        f"iteration (allowed is {TOLERANCE:.0e} for reduce_scatter_hook on 3 and 4 ranks, else 0); "
        f"{time.perf_counter() - start:.0f} s"
    )
    return int(bool(failed))


def row(configuration: Configuration, outcomes: list[Outcome], problems: dict[int, str]) -> list[str]:
    """Return the row of a configuration in the table."""
    hung = any("hang:" in problem or "imed out" in problem for problem in problems.values())
    result = "[bold red]hang" if hung else "[bold red]failed" if problems else "[green]ok"
    buckets = max((outcome.buckets for outcome in outcomes), default=0)
    difference = max((outcome.difference for outcome in outcomes), default=math.nan)
    seconds = max((outcome.seconds for outcome in outcomes), default=math.nan)
    return [
        configuration.hook,
        str(configuration.world_size),
        f"{configuration.buckets.name} ({buckets or '?'})",
        "unused at random" if configuration.buckets.unused_branch else "whole, bucket views",
        str(configuration.count),
        "?" if problems else "0" if difference == 0 else f"{difference:.1e}",
        "?" if problems else f"{seconds:.1f}",
        result,
    ]


if __name__ == "__main__":
    sys.exit(main())
