"""Train on two machines, each a network namespace of its own, and cut the link between them.

Each level trains on 2 ranks per machine, with torchrun, its rendezvous and its restarts. The model, the samples of each
step and the checkpoints are the same in every run of a level, so a run that was disturbed must end with the parameters
of the undisturbed one.

- ``undisturbed``: also counts the bytes that the first machine sends over the link in a step.
- ``short cuts``: the link is down for a few seconds, at three random moments. Training must go on without a restart.
- ``long cut``: it is down for longer than the timeout of the process groups. The ranks must raise soon after the
  timeout, and torchrun must restart them when the link is back.
- ``lost machine``: all processes of the second machine are killed, and it is started again later. The first machine
  must go on alone, and then with the second one.

It needs ``ip`` and ``unshare``, and root or user namespaces. The namespaces end with this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from machines import Namespaces, Run, has_namespaces, sent_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint, reduce_scatter_hook

LEVELS = {
    "ddp": "plain DDP",
    "1": "level 1",
    "2": "level 2",
    "3": "level 3",
    "mesh": "level 3, sharded inside a machine",
}
RANKS = 2
"""The ranks of each machine."""

WIDTH, LAYERS = 512, 4
STEPS, BATCH, SAVE_EVERY = 40, 12, 10

COUNTED_FROM = 5
"""The steps of an attempt before traffic is counted: DDP rebuilds its buckets in them."""

TIMEOUT = 20.0
SHORT, LONG = 8.0, 2 * TIMEOUT
CUTS = 3
"""The number of short cuts in a run."""

NOTICED = TIMEOUT + 10.0
"""The seconds after a cut by which all ranks that are not ended by torchrun must have raised."""

LIMIT = 400.0
"""The seconds after which a run counts as hanging."""


# One rank


def make(level: str) -> tuple[nn.Module, Optimizer]:
    """Return the wrapped model and the optimizer of a level; the values are the same on all ranks."""
    torch.manual_seed(0)
    module = make_module()
    if level == "ddp":
        return DistributedDataParallel(module), AdamW(module.parameters(), lr=1e-3)
    if level == "mesh":  # shards inside a machine, replicas across
        shape = (int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=TIMEOUT)  # else it is 30 minutes, whatever init_process_group was given
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, options))
        group = mesh.get_group("shard")
        optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, process_group=group, lr=1e-3)
        return ShardedDataParallel(module, optimizer, mesh=mesh), optimizer
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=1e-3)
    if level == "3":
        return ShardedDataParallel(module, optimizer), optimizer
    model = DistributedDataParallel(module)
    if level == "2":
        model.register_comm_hook(optimizer, reduce_scatter_hook)
    return model, optimizer


def make_module() -> nn.Module:
    """Return the module that all levels train."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def work(level: str, root: Path, pause: float) -> None:
    """Train one rank from the newest checkpoint on. If it raises, note the time."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    try:
        train(level, root, pause)
    except Exception:
        note = {"machine": int(os.environ["GROUP_RANK"]), "time": time.time()}
        (root / f"error-{time.time_ns()}-{dist.get_rank()}.json").write_text(json.dumps(note))
        raise
    dist.destroy_process_group()


def train(level: str, root: Path, pause: float) -> None:
    """Train, and write the bytes that this machine has sent in a step to a file."""
    world_size, is_first = dist.get_world_size(), dist.get_rank() == 0
    data = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    sampler = checkpoint.ResumableSampler(len(data), BATCH)
    model, optimizer = make(level)
    loaded = checkpoint.load(root, model=model, optimizer=optimizer, missing_ok=True)
    if loaded is not None:
        checkpoint.restore(loaded.extra, sampler=sampler)
    begin, sent = sampler.position // BATCH, 0
    if is_first:
        print(f"from step {begin} on {world_size} ranks", flush=True)
    for (inputs,) in DataLoader(TensorDataset(data), batch_sampler=sampler):
        optimizer.zero_grad()
        losses = nn.functional.mse_loss(model(inputs), inputs.sin(), reduction="sum")
        (losses * world_size / (BATCH * WIDTH)).backward()
        optimizer.step()
        sampler.advance()
        time.sleep(pause)
        step = sampler.position // BATCH
        if step - begin == COUNTED_FROM:
            dist.barrier()
            sent = sent_bytes(Namespaces.link)
        if step == STEPS:  # before the last save, which is not part of a step
            dist.barrier()
            if is_first:
                per_step = (sent_bytes(Namespaces.link) - sent) / (STEPS - begin - COUNTED_FROM)
                (root / "traffic").write_text(json.dumps(per_step))
        if step % SAVE_EVERY == 0:
            extra = checkpoint.capture(sampler=sampler)
            checkpoint.save(root, step, model=model, optimizer=optimizer, extra=extra)


# The disturbances


class LinkedRun(Run):
    """A training on two machines whose link can be cut.

    Attributes:
        cut_at: the time at which the link was cut last.
    """

    machines: Namespaces
    cut_at = 0.0

    def cut(self, seconds: float) -> None:
        """Cut the link for a while, at a random moment from now on."""
        time.sleep(random.uniform(0.0, 1.0))
        self.cut_at = time.time()
        self.machines.connect(False)
        time.sleep(seconds)
        self.machines.connect(True)

    def seconds_to_errors(self) -> dict[int, float]:
        """Return the seconds from the cut to the first error of each machine, by machine."""
        notes = [json.loads(file.read_text()) for file in self.root.glob("error-*.json")]
        machines = sorted({note["machine"] for note in notes})
        return {each: min(note["time"] for note in notes if note["machine"] == each) - self.cut_at for each in machines}


def undisturbed(run: LinkedRun) -> None:
    """Start both machines."""
    run.start(0)
    run.start(1)


def short_cuts(run: LinkedRun) -> None:
    """Cut the link a few times, each time until training goes on again."""
    undisturbed(run)
    for number in range(CUTS):
        run.wait_for(lambda number=number: run.saved >= SAVE_EVERY * (number + 1), "a save")  # type: ignore[misc]
        run.cut(SHORT)


def long_cut(run: LinkedRun) -> None:
    """Cut the link for longer than the timeout, and check that both machines notice it in time."""
    undisturbed(run)
    run.wait_for(lambda: run.saved >= SAVE_EVERY, "a save")
    run.cut(LONG)
    run.wait_for(lambda: len(run.attempts) > 1, "a restart")
    seconds = run.seconds_to_errors()
    if len(seconds) < 2 or max(seconds.values()) > NOTICED:
        raise RuntimeError(f"by machine, the seconds from the cut to an error: {seconds}, allowed is {NOTICED:.0f}")


def lose(run: LinkedRun) -> None:
    """Kill the second machine, let the first one go on alone, and start the second one again."""
    undisturbed(run)
    run.wait_for(lambda: run.saved >= SAVE_EVERY, "a save")
    run.kill(1)
    run.wait_for(lambda: run.attempts[-1].ranks == RANKS, "a start of the first machine alone")
    run.wait_for(lambda: run.saved > run.attempts[-1].step, "a checkpoint of the first machine alone")
    run.start(1)
    run.wait_for(lambda: run.attempts[-1].ranks == 2 * RANKS, "a start of both machines")


DISTURBANCES: dict[str, tuple[Callable[[LinkedRun], None], str, float]] = {
    "undisturbed": (undisturbed, "2", 0.1),
    "short cuts": (short_cuts, "2", 0.1),
    "long cut": (long_cut, "2", 0.1),
    "lost machine": (lose, "1:2", 1.5),
}
"""Each disturbance with the number of machines, and the seconds between steps."""

RESTARTED = ("long cut", "lost machine")


def parameters_in(root: Path) -> Tensor:
    """Return all parameters of the last checkpoint."""
    module = make_module()
    loaded = checkpoint.load(root, model=module)
    if loaded.step != STEPS:
        raise RuntimeError(f"the last checkpoint is of step {loaded.step} and not {STEPS}")
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def run_one(machines: Namespaces, level: str, name: str, folder: Path) -> tuple[list[str], bool]:
    """Run one training, and return a row of the table and whether it was right."""
    disturb, nodes, pause = DISTURBANCES[name]
    root = folder / f"{level}-{name.replace(' ', '-')}"
    worker = [__file__, "--work", level, "--root", str(root), "--pause", str(pause)]
    run = LinkedRun(machines, root, worker, nodes=nodes, ranks=RANKS, restarts=5, limit=LIMIT)
    cells, problem = ["", "", ""], ""
    try:
        disturb(run)
        run.finish()
        params, plain = parameters_in(root), parameters_in(folder / f"{level}-undisturbed")
        difference = (params - plain).abs().max().item()
        cells[0] = f"{difference:.0e}" if difference else "0"
        torch.testing.assert_close(params, plain, rtol=1e-4, atol=1e-5)
        if (len(run.attempts) > 1) != (name in RESTARTED):
            raise RuntimeError("it was not restarted" if name in RESTARTED else "it was restarted")
        if name == "undisturbed":
            per_step = json.loads((root / "traffic").read_text())
            cells[1] = f"{per_step / 1e6:.1f} MB = {per_step / (4 * plain.numel()):.2f} times the parameters"
        if name == "long cut":
            cells[2] = " and ".join(f"{seconds:.0f} s" for seconds in run.seconds_to_errors().values())
    except (RuntimeError, TimeoutError, AssertionError, OSError) as error:
        problem = str(error).replace("\n", " ")
        print(run.log[-4000:], file=sys.stderr)
    finally:
        run.close()
        machines.connect(True)
    print(f"{LEVELS[level]}, {name}: {problem or 'ok'}", flush=True)
    starts = ", then ".join(str(attempt) for attempt in run.attempts)
    return [LEVELS[level], name, starts, *cells, problem or "ok"], not problem


def drive(levels: list[str], names: list[str], folder: Path) -> tuple[str, bool]:
    """Run every disturbance at every level; return a table and whether all runs were right."""
    columns = ["level", "run", "starts", "difference", "sent over the link in a step", "error after", "result"]
    rows, right = [columns, ["---"] * len(columns)], True
    machines = Namespaces()
    try:
        for level in levels:
            for name in names:
                row, is_right = run_one(machines, level, name, folder)
                rows.append(row)
                right &= is_right
    finally:
        machines.close()
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), right


def main() -> int:
    """Return 1 if a run was not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--levels", default=",".join(LEVELS), help="levels, separated by commas")
    parser.add_argument("--runs", default=",".join(DISTURBANCES), help="further runs beside 'undisturbed'")
    parser.add_argument("--work", choices=LEVELS, help="train one rank: for torchrun")
    parser.add_argument("--inside", action="store_true", help="this process is in a new network namespace")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--pause", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.root, arguments.pause)
        return 0
    if not arguments.inside:
        if not has_namespaces():
            print("skipped: this machine does not allow network namespaces (unshare --net --map-root-user)")
            return 0
        os.execvp("unshare", ["unshare", "--net", "--map-root-user", sys.executable, *sys.argv, "--inside"])
    names = [name for name in DISTURBANCES if name == "undisturbed" or name in arguments.runs.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        text, is_right = drive(arguments.levels.split(","), names, Path(folder))
    print(text)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
