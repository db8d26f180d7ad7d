"""Ranks that die, or whose disk fails, at a chosen point of a save; and what must hold afterwards.

``python -m tests.support.faults_worker WORLD_SIZE`` is a process that imports torch once and forks the ranks of every
experiment. It reads requests from its standard input and answers on its standard output, one line of JSON each.
``Zygote`` is its other end, ``sweep`` spreads many kills over some of them.

One experiment: a directory with the checkpoints of steps 2 and 4 and with what dead saves have left. The ranks load
the newest, train to step 6 and save; one of them kills itself with SIGKILL at one of its points. The others must end
by themselves. Then fresh ranks check every checkpoint, load the newest, compare it bit by bit with what an undisturbed
run had at that step, train on and save again, which must also clear the leftovers.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onecopy
from onecopy import checkpoint
from onecopy.common.torch_private import register_as_torch_zero
from tests.support.bf16_probe import ending
from tests.support.faults import AFTER, BEFORE, CHANGES, COLLECTIVE_LIMIT, LIMIT, Injector, Kill, Outcome, Run, die


@dataclass(slots=True)
class Ended:
    """How one rank ended: its record, and whether by a signal or only after the limit."""

    told: dict[str, Any]
    signal: int
    hung: bool


Body = Callable[[dict[str, Any]], None]


class Nursery:
    """The process from which ranks are forked; it has no threads and no process group."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.world_size = world_size
        self._folder = folder
        self._runs = 0
        self._template = folder / "template"
        self._expected: dict[int, list[str]] = {}
        self._points: dict[bool, list[list[str]]] = {}

    def count(self, blocking: bool) -> list[list[str]]:
        """The points of a save, by rank."""
        if blocking not in self._points:
            root = self._fresh_root()
            ended = self._run(lambda told: _load_and_save(told, root, blocking, Injector()))
            self._points[blocking] = [each.told["points"] for each in ended]
            shutil.rmtree(root)
        return self._points[blocking]

    def kill(self, kill: Kill) -> Outcome:
        """One experiment."""
        start = time.monotonic()
        points = self.count(kill.blocking)[kill.rank]
        outcome = Outcome(kill, points[kill.call])
        root = self._fresh_root()

        def body(told: dict[str, Any]) -> None:
            rank, delays = dist.get_rank(), f"{kill.seed} {dist.get_rank()}"
            call = kill.call if rank == kill.rank else None
            _load_and_save(told, root, kill.blocking, Injector(call, kill.moment, die, delays))

        ended = self._run(body)
        outcome.committed = (root / f"step-{AFTER:08d}").exists()
        outcome.hangs = sum(each.hung for each in ended)
        self._judge_end(outcome, ended)
        self._judge_commit(outcome, ended, points)
        self._judge_rest(outcome, root)
        outcome.seconds = time.monotonic() - start
        shutil.rmtree(root)
        return outcome

    def _judge_end(self, outcome: Outcome, ended: Sequence[Ended]) -> None:
        for rank, each in enumerate(ended):
            if each.hung:
                outcome.problems.append(f"rank {rank} has not ended within {LIMIT:.0f} s")
            elif rank == outcome.kill.rank and each.signal != signal.SIGKILL:
                outcome.problems.append(f"rank {rank} did not die: {each.told}")
            elif rank != outcome.kill.rank and each.signal:
                outcome.problems.append(f"rank {rank} survived, but then {ending(-each.signal)}: {each.told}")
            elif rank != outcome.kill.rank and not each.told.get("saved") and not each.told.get("error"):
                outcome.problems.append(f"rank {rank} neither saved nor raised: {each.told}")

    def _judge_commit(self, outcome: Outcome, ended: Sequence[Ended], points: list[str]) -> None:
        """Where it is certain, the checkpoint of the save must exist, or must not."""
        kill, committed = outcome.kill, outcome.committed
        if any(each.told.get("saved") for each in ended) and not committed:
            outcome.problems.append("a rank returned from its save, but there is no checkpoint")
        if kill.rank == 0:
            commit = points.index("rename")
            if committed != (kill.call > commit or (kill.call == commit and kill.moment == "after")):
                outcome.problems.append(f"committed is {committed} after a kill {kill.moment} {outcome.point}")
        elif committed and kill.call <= max(number for number, name in enumerate(points) if name in CHANGES):
            outcome.problems.append("there is a checkpoint although a rank died before its file was complete")

    def _judge_rest(self, outcome: Outcome, root: Path) -> None:
        """Fresh ranks must find what was there before or what was saved, whole, and be able to go on."""
        step = AFTER if outcome.committed else BEFORE
        for rank, each in enumerate(self._run(lambda told: _check_and_go_on(told, root))):
            told = each.told
            if each.hung or each.signal or told.get("error"):
                how = f" but {ending(-each.signal)}" if each.signal else ""
                outcome.problems.append(f"after it, rank {rank} could not go on{how}: {told}")
                continue
            if told["loaded"] != f"step-{step:08d}" or told["digest"] != self._expected[step][rank]:
                outcome.partial_loads += 1
                outcome.problems.append(f"rank {rank} loaded {told['loaded']} with other values than those of {step}")
            if told["next"] != self._expected[step + 2][rank]:
                outcome.problems.append(f"rank {rank} went on to other values than those of step {step + 2}")
        names = sorted(path.name for path in root.iterdir())
        whole = [name for name in names if not name.startswith(".")]  # what died just now stays for a day
        outcome.cleared = whole == [f"step-{step:08d}", f"step-{step + 2:08d}"] and not any(
            "badf00d" in n for n in names
        )
        if not outcome.cleared:
            outcome.problems.append(f"after the next save there is {names}")

    def _fresh_root(self) -> Path:
        """A directory as a run would find it that has died before."""
        if not self._expected:
            ended = self._run(lambda told: _make_template(told, self._template))
            problems = [each.told["error"] for each in ended if "error" in each.told]
            if problems:
                raise RuntimeError(problems[0])
            for step in (2, 4, 6, 8):
                self._expected[step] = [each.told["digests"][str(step)] for each in ended]
            for name in (".step-00000006.0badf00d.tmp", ".pruned.0badf00d.tmp"):
                (self._template / name).mkdir()
                (self._template / name / "rank-00000.safetensors").write_bytes(b"a beginning")
                for path in (self._template / name / "rank-00000.safetensors", self._template / name):
                    os.utime(path, (0, 0))
        self._runs += 1
        root = self._folder / f"root-{self._runs}"
        shutil.copytree(self._template, root)
        return root

    def _run(self, body: Body) -> list[Ended]:
        """Fork all ranks, and wait until each has ended or the time is over."""
        place = Path(tempfile.mkdtemp(dir=self._folder))
        ranks = {_fork(rank, self.world_size, place, body): rank for rank in range(self.world_size)}
        statuses = _wait(set(ranks))
        ended = []
        for pid, rank in ranks.items():
            told = place / f"told-{rank}.json"
            status, hung = statuses[pid]
            content = json.loads(told.read_text()) if told.exists() else {}
            ended.append(Ended(content, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, hung))
        shutil.rmtree(place)
        return ended


def _fork(rank: int, world_size: int, place: Path, body: Body) -> int:
    assert threading.active_count() == 1
    pid = os.fork()
    if pid == 0:
        try:
            _live(rank, world_size, place, body)
        finally:
            os._exit(0)
    return pid


def _live(rank: int, world_size: int, place: Path, body: Body) -> None:
    """Run one rank; it leaves a file with its record."""
    log = os.open(place / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("error")
    told: dict[str, Any] = {}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_LIMIT),
        )
        body(told)
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    unfinished = place / f"told-{rank}.tmp"
    unfinished.write_text(json.dumps(told))
    unfinished.rename(place / f"told-{rank}.json")


def _wait(pids: set[int]) -> dict[int, tuple[int, bool]]:
    """Each process's status, and whether it had to be ended."""
    statuses: dict[int, tuple[int, bool]] = {}
    deadline = time.monotonic() + LIMIT
    while pids - set(statuses):
        for pid in pids - set(statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = (status, False)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                statuses[pid] = (os.waitpid(pid, 0)[1], True)
        time.sleep(0.002)
    return statuses


def _make_template(told: dict[str, Any], root: Path) -> None:
    """An undisturbed run: checkpoints of steps 2 and 4, digests of these and of what comes later."""
    run, digests = Run(), {}
    for _ in range(4):
        run.train(2)
        digests[str(run.step)] = run.digest()
        if run.step <= BEFORE:
            run.save(root, blocking=True)
    told["digests"] = digests


def _load_and_save(told: dict[str, Any], root: Path, blocking: bool, injector: Injector) -> None:
    """Do as a restarted training does: go on and save, in the background while training goes on."""
    run = Run()
    run.load(root)
    run.train(2)
    with injector.active():
        run.save(root, blocking)
        try:
            if not blocking:
                run.train(2)
        finally:
            checkpoint.wait()
    told["saved"] = True
    told["points"] = injector.points


def _check_and_go_on(told: dict[str, Any], root: Path) -> None:
    run = Run()
    if dist.get_rank() == 0:
        for path in sorted(root.glob("step-*")):
            checkpoint.verify(path)
    dist.barrier()  # before any rank saves and prunes
    newest = checkpoint.latest(root)
    path = run.load(root)
    assert path == newest, (path, newest)
    told.update(loaded=path.name, digest=run.digest())
    run.train(2)
    saved = run.save(root, blocking=True)
    told.update(saved=saved.name, next=run.digest())
    dist.barrier()  # rank 0 prunes after the others have returned
    checkpoint.verify(saved)


def main() -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # the first optimizer would import it, in every rank anew
    register_as_torch_zero(onecopy.ZeroRedundancyOptimizer)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not an answer
    with tempfile.TemporaryDirectory() as folder:
        nursery = Nursery(int(sys.argv[1]), Path(folder))
        for line in sys.stdin:
            what, arguments = json.loads(line)
            answer: Any = nursery.count(**arguments) if what == "count" else asdict(nursery.kill(Kill(**arguments)))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
