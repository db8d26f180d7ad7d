"""Run examples/elastic.py with torchrun, kill it at random moments, and compare the result with an undisturbed run.

Each of COUNT rounds runs the three ways in which a training is disturbed:

- ``killed ranks``: a random rank is killed with SIGKILL at a random moment, twice. torchrun restarts both ranks.
- ``2, 3, 1, 2 ranks``: one torchrun after the other, each with another number of ranks. A random rank of each but the
  last is killed at a random moment after a save, which ends that torchrun.
- ``machine lost and back``: ``--nnodes 1:2`` with two torchruns. One of them is killed with all its processes. The
  other one goes on alone and saves. Then the first one comes back.

Each sample must be used once in each epoch. The parameters at the end must be those of the undisturbed run: bit by bit
for killed ranks, because two ranks always add in the same order, and else within rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machines import Local, Run
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from onecopy import checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples/elastic.py"
EPOCHS, LAST_STEP = 3, 25
LIMIT = 400.0
"""The seconds after which a run counts as hanging."""


def kill_a_rank(run: Run, randomly: random.Random, starts: int, seconds: float) -> None:
    """Kill a random rank of a run at a random moment, and wait until all processes of that start have ended.

    Args:
        run: the training.
        randomly: chooses the rank and the moment. One kill of four is at a moment while the ranks start.
        starts: the number of starts of the ranks after which the kill happens.
        seconds: the seconds that a training lasts, without its start.
    """
    is_early = randomly.random() < 0.25
    if not is_early:
        run.wait_for(lambda: len(run.attempts) >= starts, f"start {starts}")
    run.wait_for(lambda: len(run.processes()) >= run.ranks, "the start of the processes")
    time.sleep(randomly.uniform(0.0, 0.7 * seconds))
    processes = run.processes()
    if not processes:
        raise RuntimeError("the training had ended before a rank was killed")
    with contextlib.suppress(ProcessLookupError):
        os.kill(randomly.choice(processes), signal.SIGKILL)
    run.wait_for(lambda: not set(processes) & set(run.processes()), "the end of the processes")


def killed_ranks(run: Run, randomly: random.Random, seconds: float) -> None:
    """Kill two ranks, one after the other."""
    run.start()
    for starts in (1, 2):
        kill_a_rank(run, randomly, starts, seconds)


def changing_ranks(run: Run, randomly: random.Random, seconds: float) -> None:
    """Train on 2, 3 and 1 ranks, each until one is killed, and then on 2."""
    for starts, ranks in enumerate((2, 3, 1), start=1):
        run.ranks = ranks
        run.start()
        run.wait_for(lambda starts=starts: run.saved >= 5 * starts, "a checkpoint")  # type: ignore[misc]
        kill_a_rank(run, randomly, starts, seconds / 5)
        run.wait_for(lambda: not run.is_running, "the end of torchrun")
    run.ranks = 2
    run.start()


def lost_machine(run: Run, randomly: random.Random, seconds: float) -> None:
    """Kill the second machine, let the first one go on alone, and start the second one again."""
    run.start(0)
    run.start(1)
    run.wait_for(lambda: bool(run.attempts) and run.attempts[-1].ranks == 2, "a start on both machines")
    time.sleep(randomly.uniform(0.0, 0.4 * seconds))
    run.kill(1)
    run.wait_for(lambda: run.attempts[-1].ranks == 1, "a start of the first machine alone")
    run.wait_for(lambda: run.saved > run.attempts[-1].step, "a checkpoint of the first machine alone")
    run.start(1)
    run.wait_for(lambda: run.attempts[-1].ranks == 2, "a start on both machines again")


Disturbance = Callable[[Run, random.Random, float], None]

DISTURBANCES: dict[str, tuple[Disturbance, str, int, int]] = {
    "killed ranks": (killed_ranks, "1", 2, 5),
    "2, 3, 1, 2 ranks": (changing_ranks, "1", 2, 0),
    "machine lost and back": (lost_machine, "1:2", 1, 5),
}
"""Each disturbance with the numbers of machines, the ranks of each machine and the allowed restarts."""


def result_in(root: Path) -> Tensor:
    """Return the parameters at the end; raise if a sample was left out or used twice in an epoch."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    loaded = checkpoint.load(root, model=model)
    if loaded.step != LAST_STEP:
        raise RuntimeError(f"the last checkpoint is of step {loaded.step} and not {LAST_STEP}")
    counts = loaded.extra["counts"]
    if counts.tolist() != [EPOCHS] * len(counts):
        raise RuntimeError(f"samples were used {counts.min():.0f} to {counts.max():.0f} times and not {EPOCHS} times")
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def undisturbed(root: Path) -> tuple[Tensor, float]:
    """Run the example on two ranks, and return the parameters and the seconds from torchrun to the first step."""
    run = Run(Local(), root, [str(EXAMPLE), "--root", str(root)], nodes="1", ranks=2, restarts=0, limit=LIMIT)
    begin = time.monotonic()
    try:
        run.start()
        run.wait_for(lambda: bool(run.attempts), "the start")
        start = time.monotonic() - begin
        run.finish()
        return result_in(root), start
    finally:
        run.close()


def disturbed(name: str, root: Path, seed: str, expected: Tensor, start: float) -> tuple[Run, str, str]:
    """Run the example with a disturbance; return the run, the difference from the undisturbed one, and the result."""
    disturb, nodes, ranks, restarts = DISTURBANCES[name]
    # Enough time for a kill, and for a second machine that joins while the first one trains.
    seconds = 3.0 * start if nodes == "1:2" else 4.0
    worker = [str(EXAMPLE), "--root", str(root), "--pause", f"{seconds / LAST_STEP:.3f}"]
    run = Run(Local(), root, worker, nodes=nodes, ranks=ranks, restarts=restarts, limit=LIMIT)
    difference = ""
    try:
        disturb(run, random.Random(seed), seconds)
        run.finish()
        found = result_in(root)
        difference = f"{(found - expected).abs().max():.1e}"
        if name == "killed ranks":
            torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    except (RuntimeError, TimeoutError, AssertionError, OSError) as error:
        return run, difference, str(error)
    else:
        return run, difference, ""
    finally:
        run.close()


def main() -> int:
    """Return 1 if a run was not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=3, help="rounds, each with every disturbance")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the moments and the ranks that are killed")
    parser.add_argument("--only", default="", help="run disturbances whose name contains this text")
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.count} rounds of examples/elastic.py with torchrun (seed {arguments.seed})")
    for column in ("round", "run", "starts", "difference", "result"):
        table.add_column(column)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        expected, start = undisturbed(Path(folder) / "undisturbed")
        for number in range(arguments.count):
            for name in (name for name in DISTURBANCES if arguments.only in name):
                root = Path(folder) / f"{number}-{name.replace(', ', '-').replace(' ', '-')}"
                run, difference, problem = disturbed(name, root, f"{arguments.seed} {number} {name}", expected, start)
                starts = "\n".join(str(attempt) for attempt in run.attempts)
                table.add_row(str(number), name, starts, difference, escape(problem) or "[green]ok")
                print(f"round {number}, {name}: {problem or 'ok'}", flush=True)
                if problem:
                    failures += 1
                    print(run.log[-4000:], file=sys.stderr)
    Console(width=120).print(table)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
