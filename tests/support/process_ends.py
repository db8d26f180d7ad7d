"""Ends processes that have a background service in every way, and checks that none of them hangs or aborts.

Run as ``python -m tests.support.process_ends COUNT [--few]``: at least COUNT processes are ended, two in each group,
with a store that rank 0 hosts or with a file. The parent has imported everything, and each rank is a fork of it that
ends as any Python program does.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # a rank would import it in its first step
import torch.distributed as dist
import torch.distributed.optim  # and this when it makes an optimizer
from torch import nn

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm import background_service

LIMIT = 300.0
"""Seconds after which a process counts as hanging; on a machine with much other work, an end takes a minute."""

BAD_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault", "Aborted", "core dumped")


@dataclass(frozen=True)
class Way:
    """A way to end: what each rank does last, and the exit statuses that this must give.

    Attributes:
        end: called with the rank, as the last thing that the rank does.
        statuses: the exit status of ranks 0 and 1; a negative number is a signal.
    """

    end: Callable[[int], object]
    statuses: tuple[int, int] = (0, 0)


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


def kill_host(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)


def kill_other(rank: int) -> None:
    if rank == 1:
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


def end_in_order(first: int) -> Callable[[int], None]:
    def end(rank: int) -> None:
        time.sleep(0.3 if rank != first else 0)

    return end


def end_after_other_fails(rank: int) -> None:
    if rank == 0:
        fail(rank)
    time.sleep(0.3)


def end_as_multiprocessing_does(rank: int) -> NoReturn:
    import multiprocessing.util

    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stderr.flush()
    os._exit(0)


def save_after_others_end(rank: int) -> None:
    if rank == 0:
        time.sleep(0.5)
        read_state()


def fork_and_save(rank: int) -> None:
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # must end no thread of the parent, whose connections this process shares
        os._exit(
            0
        )  # as a worker of a DataLoader does: torch's own destructors wait for threads that a fork does not have
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()
    if rank == 0:
        read_state()
    dist.barrier()


WAYS: dict[str, Way] = {
    "normal": Way(lambda _: None),
    "exception": Way(fail, (1, 1)),
    "exception on the host alone": Way(end_after_other_fails, (1, 0)),
    "sys.exit": Way(leave, (3, 3)),
    "the host first": Way(end_in_order(0)),
    "the host last": Way(end_in_order(1)),
    "destroy_process_group": Way(destroy),
    "destroy_process_group, the host first": Way(destroy_host_first),
    "optimizer dropped, destroy_process_group": Way(drop_and_destroy),
    "SIGINT": Way(interrupt, (-signal.SIGINT, -signal.SIGINT)),
    "SIGTERM": Way(terminate, (-signal.SIGTERM, -signal.SIGTERM)),
    "the host killed": Way(kill_host, (-signal.SIGKILL, 0)),
    "the other killed": Way(kill_other, (0, -signal.SIGKILL)),
    "child of multiprocessing": Way(end_as_multiprocessing_does),
    "fork": Way(fork_and_save),
    "rank 0 saves when rank 1 has nothing left to do": Way(save_after_others_end),
}

COMMONEST = (
    "normal",
    "exception",
    "destroy_process_group",
    "child of multiprocessing",
    "rank 0 saves when rank 1 has nothing left to do",
)
"""Ways that the test suite tries."""

kept: list[object] = []
"""The optimizer of this process, which lives until the interpreter ends."""


def read_state() -> None:
    """Gather the state of both ranks on this one."""
    optimizer = kept[0]
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].numel() == 2000


def run_rank(rank: int, store: str, end: Callable[[int], object]) -> None:
    """Train one step, read the state dict on one rank, and end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT / 2))
    param = nn.Parameter(torch.ones(2000))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.Adam, shard_by="element")
    kept.append(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    if rank == 0:
        read_state()
    dist.barrier()
    del optimizer, param
    end(rank)


def start(rank: int, store: str, way: Way, errors: str) -> int:
    """Start one rank, and return its process id."""
    child = os.fork()
    if child:
        return child
    opened = os.open(errors, os.O_WRONLY | os.O_CREAT)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    background_service.SECONDS_FOR_RANK_0 = 3.0
    run_rank(rank, store, way.end)
    sys.exit(0)


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


def end_once(name: str, scheme: str, port: int) -> list[str]:
    """End one group of two processes; return what was wrong."""
    way, problems = WAYS[name], []
    folder = tempfile.mkdtemp()  # not a context manager, which a forked rank would leave, too
    store = f"file://{folder}/store" if scheme == "file" else f"tcp://127.0.0.1:{port}"
    errors = [f"{folder}/{rank}" for rank in range(2)]
    begun = time.monotonic()
    children = [start(rank, store, way, errors[rank]) for rank in range(2)]
    for rank, child in enumerate(children):
        status = wait_for(child, begun + LIMIT)
        text = Path(errors[rank]).read_text(errors="replace")
        if status != way.statuses[rank] or any(word in text for word in BAD_WORDS):
            problems.append(f"{scheme}, {name}, rank {rank}: status {status}\n{text}")
    shutil.rmtree(folder)
    return problems


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def end_all(count: int, cases: Sequence[tuple[str, str]]) -> list[str]:
    """End two processes in each case, a store and a way, and again until there were ``count``; return the problems."""
    ended, problems = 0, []
    while ended < count:
        for scheme, name in cases:
            begun = time.monotonic()
            found = end_once(name, scheme, free_port())
            problems += found
            ended += 2
            print(f"{scheme} {name}: {'BAD' if found else 'good'}, {time.monotonic() - begun:.1f} s", flush=True)
    print("\n".join(problems))
    print(f"{ended} processes ended, {len(problems)} of them badly")
    return problems


def main() -> int:
    """Read the arguments, end the processes, and return the exit status."""
    parser = argparse.ArgumentParser(description="end processes in every way, and check that none hangs or aborts")
    parser.add_argument("count", type=int, help="end at least so many processes")
    parser.add_argument("--few", action="store_true", help="only the commonest ways, with a store that rank 0 hosts")
    given = parser.parse_args()
    cases = [(scheme, name) for scheme in ("tcp", "file") for name in WAYS]
    problems = end_all(given.count, [("tcp", name) for name in COMMONEST] if given.few else cases)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
