"""Ranks that kill themselves at any point of a save, and what must hold afterwards.

One experiment: a directory with the checkpoints of steps 2 and 4 and with what dead saves have left. The ranks load
the newest, train to step 6 and save; one of them kills itself with SIGKILL at one of its points. The others must save
or raise. Then other ranks check every checkpoint, load the newest, compare it bit by bit with what an undisturbed run
had at that step, train on and save again, which must also clear the leftovers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onecopy import checkpoint
from tests.support.faults import AFTER, BEFORE, CHANGES, WORLD_SIZES, Injector, Kill, Outcome, Run, moments_of
from tests.support.harness import Pool, Pools, RanksFailedError

COLLECTIVE_LIMIT = 10.0
"""Seconds after which gloo gives up on a collective."""

LIMIT = 30.0
"""Seconds after which a rank that has not answered counts as one that hangs."""

# On a rank


def make_template(root: Path) -> dict[int, str]:
    """An undisturbed run: checkpoints of steps 2 and 4; return digests of these and of later steps."""
    logging.getLogger("onecopy").setLevel(logging.CRITICAL)  # every failure and every leftover would be logged
    run, digests = Run(), {}
    for _ in range(4):
        run.train(2)
        digests[run.step] = run.digest()
        if run.step <= BEFORE:
            run.save(root, blocking=True)
    return digests


def load_and_save(root: Path, blocking: bool, kill: Kill | None = None) -> tuple[str, list[str]]:
    """Do as a restarted training does: go on and save, in the background while training goes on.

    Return the error, if there was one, and the points of the save.
    """
    logging.getLogger("onecopy").setLevel(logging.CRITICAL)
    run, injector, rank = Run(), Injector(), dist.get_rank()
    if kill is not None:
        call = kill.call if rank == kill.rank else None
        injector = Injector(call, kill.moment, lambda: die(root), f"{kill.seed} {rank}")
    run.load(root)
    run.train(2)
    problem = ""
    try:
        with injector.active():
            run.save(root, blocking)
            try:
                if not blocking:
                    run.train(2)
            finally:
                checkpoint.wait()
    except Exception as error:
        problem = repr(error)
    # The pool ends a rank that may die when all others have answered, and rank 0 removes files after they have saved.
    deadline = time.monotonic() + LIMIT / 2
    while kill is not None and not died_in(root).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return problem, injector.points


def died_in(root: Path) -> Path:
    """The file that tells that the rank has died on purpose."""
    return root.with_suffix(".died")


def die(root: Path) -> None:
    """End this process at once, as a machine that fails would."""
    died_in(root).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def check_and_go_on(root: Path) -> tuple[str, str, str]:
    """Check every checkpoint and go on from the newest; return its name, its digest, and that of the next save."""
    run = Run()
    if dist.get_rank() == 0:
        for path in sorted(root.glob("step-*")):
            checkpoint.verify(path)
    dist.barrier()  # before any rank saves and prunes
    newest = checkpoint.latest(root)
    path = run.load(root)
    assert path == newest, (path, newest)
    digest = run.digest()
    run.train(2)
    saved = run.save(root, blocking=True)
    dist.barrier()  # rank 0 prunes after the others have returned
    checkpoint.verify(saved)
    return path.name, digest, run.digest()


# In the process that starts the ranks


class Experiments:
    """Kills with one number of ranks, in copies of one directory as a run would find it that has died before."""

    def __init__(self, world_size: int, folder: Path, pools: Pools) -> None:
        self.world_size, self._folder, self._pools = world_size, folder, pools
        self._template = folder / f"template-{world_size}"
        self._expected: list[dict[int, str]] = self._run("make_template", root=self._template)
        for name in (".step-00000006.0badf00d.tmp", ".pruned.0badf00d.tmp"):
            (self._template / name).mkdir()
            (self._template / name / "rank-00000.safetensors").write_bytes(b"a beginning")
            for path in (self._template / name / "rank-00000.safetensors", self._template / name):
                os.utime(path, (0, 0))
        self._points: dict[bool, list[list[str]]] = {}
        for blocking in (True, False):
            with self._copy() as root:
                found = self._run("load_and_save", root=root, blocking=blocking)
            self._points[blocking] = [points for _, points in found]

    def _run(self, name: str, **arguments: Any) -> list[Any]:
        return self._pools.run(self.world_size, __name__, name, arguments, LIMIT)

    @contextlib.contextmanager
    def _copy(self) -> Any:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            yield shutil.copytree(self._template, Path(folder, "root"))

    def every_kill(self) -> list[Kill]:
        """Every mode, rank, point and moment."""
        return [
            Kill(self.world_size, blocking, rank, call, moment)
            for blocking, ranks in self._points.items()
            for rank, points in enumerate(ranks)
            for call, name in enumerate(points)
            for moment in moments_of(name)
        ]

    def kill(self, kill: Kill) -> Outcome:
        """One experiment."""
        begun, points = time.monotonic(), self._points[kill.blocking][kill.rank]
        outcome = Outcome(kill, points[kill.call])
        with self._copy() as root:
            pool = Pool(self.world_size, COLLECTIVE_LIMIT)
            try:
                arguments = {"root": root, "blocking": kill.blocking, "kill": kill}
                found = pool.run(__name__, "load_and_save", arguments, LIMIT, {kill.rank})
            except RanksFailedError as error:
                found = []
                outcome.hangs = str(error).count("no answer")
                outcome.problems.append(str(error))
            finally:
                pool.close()
            if not died_in(root).exists():
                outcome.problems.append(f"rank {kill.rank} did not die: {found}")
            outcome.committed = (root / f"step-{AFTER:08d}").exists()
            has_saved = any(each is not None and not each[0] for each in found)
            self._judge_commit(outcome, points, has_saved)
            self._judge_rest(outcome, root)
        outcome.seconds = time.monotonic() - begun
        return outcome

    @staticmethod
    def _judge_commit(outcome: Outcome, points: Sequence[str], has_saved: bool) -> None:
        """Where it is certain, the checkpoint of the save must exist, or must not."""
        kill, committed = outcome.kill, outcome.committed
        if has_saved and not committed:
            outcome.problems.append("a rank returned from its save, but there is no checkpoint")
        if kill.rank == 0:
            commit = points.index("rename")
            if committed != (kill.call > commit or (kill.call == commit and kill.moment == "after")):
                outcome.problems.append(f"committed is {committed} after a kill {kill.moment} {outcome.point}")
        elif committed and kill.call <= max(number for number, name in enumerate(points) if name in CHANGES):
            outcome.problems.append("there is a checkpoint although a rank died before its file was complete")

    def _judge_rest(self, outcome: Outcome, root: Path) -> None:
        """Other ranks must find what was there before or what was saved, whole, and be able to go on."""
        step = AFTER if outcome.committed else BEFORE
        try:
            found = self._run("check_and_go_on", root=root)
        except RanksFailedError as error:
            outcome.problems.append(f"the ranks after it could not go on: {error}")
            return
        for rank, (name, digest, after) in enumerate(found):
            expected = self._expected[rank]
            if (name, digest) != (f"step-{step:08d}", expected[step]):
                outcome.partial_loads += 1
                outcome.problems.append(f"rank {rank} loaded {name} with other values than those of step {step}")
            if after != expected[step + 2]:
                outcome.problems.append(f"rank {rank} went on to other values than those of step {step + 2}")
        names = sorted(path.name for path in root.iterdir())
        whole = [name for name in names if not name.startswith(".")]  # what died just now stays for a day
        left = any("badf00d" in name for name in names)
        outcome.cleared = whole == [f"step-{step:08d}", f"step-{step + 2:08d}"] and not left
        if not outcome.cleared:
            outcome.problems.append(f"after the next save there is {names}")


def spread(kills: Sequence[Kill], count: int, seed: int) -> list[Kill]:
    """So many of them, evenly spread; if there are not as many, again and again with other delays."""
    chosen: list[Kill] = []
    while len(chosen) < count:
        source, part = random.Random(seed), min(count - len(chosen), len(kills))
        for number in range(part):
            place = source.randrange(number * len(kills) // part, (number + 1) * len(kills) // part)
            chosen.append(replace(kills[place], seed=seed))
        seed += 1
    return chosen


def sweep(count: int, seed: int = 0, world_sizes: Sequence[int] = WORLD_SIZES) -> tuple[int, list[Outcome]]:
    """Do so many kills; return how many different ones there are, and the outcomes."""
    pools = Pools()
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(pools):
        experiments = {size: Experiments(size, Path(folder), pools) for size in world_sizes}
        everything = [kill for each in experiments.values() for kill in each.every_kill()]
        chosen = spread(everything, count, seed)
        return len(everything), [experiments[kill.world_size].kill(kill) for kill in chosen]
