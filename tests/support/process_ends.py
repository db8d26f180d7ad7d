"""Ends processes in every way and after every kind of training, and checks that none of them hangs or aborts.

Run as ``python -m tests.support.process_ends COUNT [--few]``: at least COUNT processes are ended, two in each group.
With ``--trainings``, at least COUNT processes are ended after each kind of training, several groups at once. The parent
has imported everything, and each rank is a fork of it that ends as any Python program does.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, reduce_scatter_hook

LIMIT = 300.0
"""Seconds after which a process counts as hanging; on a machine with much other work, an end takes a minute."""

BAD_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault", "Aborted", "core dumped")


def fail(rank: int) -> NoReturn:
    raise ValueError(f"rank {rank} fails")


def leave(rank: int) -> NoReturn:
    sys.exit(3)


def interrupt(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def terminate(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


def kill(who: int, rank: int) -> None:
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)


def destroy(rank: int) -> None:
    dist.destroy_process_group()


def destroy_host_first(rank: int) -> None:
    if rank == 1:
        time.sleep(0.3)
    dist.destroy_process_group()


def drop_and_destroy(rank: int) -> None:
    kept.clear()
    dist.destroy_process_group()


def end_after_other_fails(rank: int) -> None:
    if rank == 0:
        fail(rank)
    time.sleep(0.3)


def end_as_multiprocessing_does(rank: int) -> NoReturn:
    import multiprocessing.util

    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stderr.flush()
    os._exit(0)


WAYS: dict[str, tuple[Callable[[int], object], tuple[int, int]]] = {
    "normal": (lambda _: None, (0, 0)),
    "exception": (fail, (1, 1)),
    "destroy_process_group": (destroy, (0, 0)),
    "child of multiprocessing": (end_as_multiprocessing_does, (0, 0)),
    "exception on the host alone": (end_after_other_fails, (1, 0)),
    "sys.exit": (leave, (3, 3)),
    "destroy_process_group, the host first": (destroy_host_first, (0, 0)),
    "optimizer dropped, destroy_process_group": (drop_and_destroy, (0, 0)),
    "SIGINT": (interrupt, (-signal.SIGINT, -signal.SIGINT)),
    "SIGTERM": (terminate, (-signal.SIGTERM, -signal.SIGTERM)),
    "the host killed": (partial(kill, 0), (-signal.SIGKILL, 0)),
    "the other killed": (partial(kill, 1), (0, -signal.SIGKILL)),
}
"""What each rank does last, called with its number, and the exit statuses of both; a negative number is a signal."""

FEW = 4
"""How many of the ways, the commonest, the test suite tries."""

kept: list[Any] = []
"""The model and the optimizer of this process, which live until the interpreter ends."""


def train_and_gather() -> None:
    """Train one step, and gather the state on one rank."""
    param = nn.Parameter(torch.ones(2000))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.Adam, shard_by="element")
    kept.append(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert optimizer.state_dict()["state"][0]["exp_avg"].numel() == 2000


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def slow_gloo_down() -> None:
    """Let gloo's worker threads get the processor and the interpreter's lock late, as on a busy machine."""
    sys.setswitchinterval(1.0)
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("pt_gloo"):
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make a few steps; the overlap hooks update from the third one on."""
    for step in range(5):
        if step == 4:
            slow_gloo_down()
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    kept.extend((model, optimizer))


def train_at(level: str) -> None:
    """Train in one of the ways of ``TRAININGS``."""
    module = network()
    if level == "ShardedDataParallel":
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam)
        return train(ShardedDataParallel(module, optimizer), optimizer)
    model = DistributedDataParallel(module)
    params = model.parameters()
    if level == "plain DDP":
        return train(model, torch.optim.Adam(params))
    if level == "torch's ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

        return train(model, TorchZero(params, torch.optim.Adam))
    overlap = getattr(onecopy, level) if level in OVERLAP_HOOKS else None
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, overlap_with_ddp=overlap is not None)
    if level == "reduce_scatter_hook":
        model.register_comm_hook(optimizer, reduce_scatter_hook)
    elif overlap is not None:
        model.register_comm_hook(None, overlap(allreduce_hook, model, optimizer))
    return train(model, optimizer)


OVERLAP_HOOKS = ("hook_with_zero_step", "hook_with_zero_step_interleaved")

TRAININGS = (
    *("plain DDP", "torch's ZeroRedundancyOptimizer", "level 1", "reduce_scatter_hook"),
    *(*OVERLAP_HOOKS, "ShardedDataParallel"),
)


@dataclass(frozen=True)
class Case:
    """What two processes do, how they end, and the exit statuses that this must give."""

    name: str
    training: Callable[[], object]
    end: Callable[[int], object]
    statuses: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Group:
    """Two processes of one case that were started."""

    case: Case
    folder: str
    begun: float
    children: list[int]

    def errors(self, rank: int) -> Path:
        return Path(self.folder, str(rank))


def run_rank(rank: int, store: str, case: Case) -> None:
    """Train, and end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT / 2))
    case.training()
    case.end(rank)


def start_rank(rank: int, store: str, case: Case, errors: Path) -> int:
    """Start one rank, and return its process id."""
    child = os.fork()
    if child:
        return child
    opened = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    run_rank(rank, store, case)
    sys.exit(0)


def start(case: Case) -> Group:
    """Start the two processes of a case."""
    folder = tempfile.mkdtemp()  # not a context manager, which a forked rank would leave, too
    store = f"tcp://127.0.0.1:{free_port()}"
    group = Group(case, folder, time.monotonic(), [])
    for rank in range(2):
        group.children.append(start_rank(rank, store, case, group.errors(rank)))
    return group


def wait_for(child: int, deadline: float) -> int | None:
    """Return the exit status of a process, or None if it was still there at the deadline."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def finish(group: Group) -> list[str]:
    """Wait for the end of a group; return what was wrong."""
    case, problems = group.case, []
    for rank, child in enumerate(group.children):
        status = wait_for(child, group.begun + LIMIT)
        text = group.errors(rank).read_text(errors="replace")
        if status != case.statuses[rank] or any(word in text for word in BAD_WORDS):
            problems.append(f"{case.name}, rank {rank}: status {status}\n{text}")
    shutil.rmtree(group.folder)
    return problems


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def end_all(cases: Sequence[Case], at_once: int) -> list[str]:
    """End two processes for each case, ``at_once`` groups at a time; return the problems."""
    waiting, running = deque(cases), deque[Group]()
    ended, bad, problems = Counter[str](), Counter[str](), []
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(start(waiting.popleft()))
        group = running.popleft()
        found = finish(group)
        problems += found
        ended[group.case.name] += 2
        bad[group.case.name] += len(found)
        seconds = time.monotonic() - group.begun
        print(f"{group.case.name}: {'BAD' if found else 'good'}, {seconds:.1f} s", flush=True)
    print("\n".join(problems))
    for name, count in ended.items():
        print(f"{name}: {count} processes ended, {bad[name]} of them badly")
    print(f"{ended.total()} processes ended, {len(problems)} of them badly")
    return problems


def main() -> int:
    """Read the arguments, end the processes, and return the exit status."""
    parser = argparse.ArgumentParser(description="end processes in every way, and check that none hangs or aborts")
    parser.add_argument("count", type=int, help="end at least so many processes")
    parser.add_argument("--few", action="store_true", help="only the commonest ways")
    parser.add_argument("--trainings", action="store_true", help="end so many processes after each kind of training")
    parser.add_argument("--only", help="only kinds of training whose name contains this")
    parser.add_argument("--at-once", type=int, default=6, help="groups that train at once, so that all are slow")
    given = parser.parse_args()
    for name in ("torch._dynamo", "torch.distributed.optim"):  # each rank would import them
        importlib.import_module(name)
    gc.freeze()  # the ends of forks then take a third of the time
    if given.trainings:
        names = [name for name in TRAININGS if given.only is None or given.only in name]
        cases, repeats = [Case(name, partial(train_at, name), destroy) for name in names], -(-given.count // 2)
    else:
        cases = [Case(name, train_and_gather, *way) for name, way in list(WAYS.items())[: FEW if given.few else None]]
        repeats = -(-given.count // (2 * len(cases)))
    return 1 if end_all(cases * repeats, given.at_once if given.trainings else 1) else 0


if __name__ == "__main__":
    sys.exit(main())
