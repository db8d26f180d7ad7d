"""Train on two machines, each a network namespace of its own, and cut the link between them.

Each level trains on 2 ranks per machine, with torchrun, its rendezvous and its restarts. The model, the samples of each
step and the checkpoints are the same in every run of a level, so a run that was disturbed must end with the parameters
of the undisturbed one.

- ``undisturbed``: also counts the bytes that the first machine sends over the link in a step.
- ``short cut``: the link is down for a few seconds. Training must go on without a restart.
- ``long cut``: it is down for longer than the timeout of the process groups. torchrun must restart the ranks.
- ``lost machine``: all processes of the second machine are killed, and it is started again later. The first machine
  must go on alone, and then with the second one.

It needs ``ip`` and ``unshare``, and root or user namespaces. The namespaces end with this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint, fail_together, reduce_scatter_hook
from onecopy.bench.launching import has_namespaces, sent_bytes

LEVELS = ("1", "2", "3", "mesh")
LINK = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RANKS = 2
"""The ranks of each machine."""

WIDTH, LAYERS = 512, 4
STEPS, BATCH, SAVE_EVERY = 40, 12, 10
CUT_AT = 12
"""The step from which on the link is cut."""

COUNTED_FROM = 5
"""The steps of an attempt before traffic is counted: DDP rebuilds its buckets in them."""

TIMEOUT = 20.0
SHORT, LONG = 8.0, 2 * TIMEOUT  # a rank counts as blocked after 5 seconds, which must not end a short cut
LIMIT = 300.0
"""The seconds after which a run counts as hanging."""


# One rank


def make(level: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """Return the wrapped model and the optimizer of a level; the values are the same on all ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    if level == "mesh":  # shards inside a machine, replicas across
        shape = (int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        group = mesh.get_group("shard")
        optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, process_group=group, lr=1e-3)
        return ShardedDataParallel(module, optimizer, mesh=mesh), optimizer
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), AdamW, shard_by="element" if level == "2" else "parameter", lr=1e-3
    )
    if level == "3":
        return ShardedDataParallel(module, optimizer), optimizer
    model = DistributedDataParallel(module)
    if level == "2":
        model.register_comm_hook(optimizer, reduce_scatter_hook)
    return model, optimizer


def work(level: str, root: Path, pause: float) -> None:
    """Train one rank from the newest checkpoint on. Rank 0 writes its progress to files."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    world_size, is_first = dist.get_world_size(), dist.get_rank() == 0
    data = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    sampler = checkpoint.ResumableSampler(len(data), BATCH)
    model, optimizer = make(level)
    loaded = checkpoint.load(root, model=model, optimizer=optimizer, missing_ok=True)
    if loaded is not None:
        checkpoint.restore(loaded.extra, sampler=sampler)
    begin, sent = sampler.position // BATCH, 0
    if is_first:
        with (root / "attempts").open("a") as file:
            file.write(f"{begin} {world_size}\n")
    with fail_together():
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
                sent = sent_bytes(LINK)
            if is_first:
                (root / "progress").write_text(f"{step} {world_size}")
            if step % SAVE_EVERY == 0:
                extra = checkpoint.capture(sampler=sampler)
                checkpoint.save(root, step, model=model, optimizer=optimizer, extra=extra)
        dist.barrier()
        if is_first and STEPS - begin > COUNTED_FROM:
            per_step = (sent_bytes(LINK) - sent) / (STEPS - begin - COUNTED_FROM)
            (root / "traffic").write_text(json.dumps(per_step))
    dist.destroy_process_group()


# The machines


class Machines:
    """Two network namespaces with a link between them. This process is in the first one."""

    def __init__(self) -> None:
        self._second = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        while self._namespace(self._second.pid) == self._namespace("self"):
            time.sleep(0.01)
        self._call(0, f"link add {LINK} type veth peer name {LINK} netns {self._second.pid}")
        for machine, address in enumerate(ADDRESSES):
            self._call(machine, f"addr add {address}/24 dev {LINK}")
            self._call(machine, f"link set {LINK} up")
            self._call(machine, "link set lo up")

    def command(self, machine: int, command: list[str]) -> list[str]:
        """Return the command that runs another one on a machine."""
        return command if machine == 0 else ["nsenter", f"--net=/proc/{self._second.pid}/ns/net", *command]

    def connect(self, is_connected: bool) -> None:
        """Cut the link, or restore it."""
        self._call(1, f"link set {LINK} {'up' if is_connected else 'down'}")

    def close(self) -> None:
        """End the second machine."""
        self._second.kill()
        self._second.wait()

    def _call(self, machine: int, arguments: str) -> None:
        subprocess.run(self.command(machine, ["ip", *arguments.split()]), check=True)

    @staticmethod
    def _namespace(process: int | str) -> str:
        try:
            return os.readlink(f"/proc/{process}/ns/net")
        except OSError:
            return ""  # it has ended


def tree(process: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for each in found:  # it grows meanwhile
        found += [child for child, parent in parents.items() if parent == each]
    return found


class Run:
    """One training on both machines.

    Attributes:
        machines: the machines.
        root: the directory for checkpoints and progress.
    """

    def __init__(self, machines: Machines, level: str, root: Path, nodes: str = "2", pause: float = 0.1) -> None:
        self.machines = machines
        self.root = root
        self._level, self._nodes, self._pause = level, nodes, pause
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._begun = time.monotonic()
        root.mkdir()

    def start(self, machine: int) -> None:
        """Start torchrun on a machine."""
        settings = f"is_host={1 - machine},last_call_timeout=3,read_timeout={int(LIMIT)}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self._nodes]
        torchrun += ["--nproc-per-node", str(RANKS), "--max-restarts", "5", "--local-addr", ADDRESSES[machine]]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-conf", settings]
        torchrun += ["--rdzv-id", self.root.name]
        worker = [__file__, "--work", self._level, "--root", str(self.root), "--pause", str(self._pause)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.root / f"machine-{machine}.log").open("ab") as log:
            command = self.machines.command(machine, [*torchrun, *worker])
            self._agents[machine] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def progress(self) -> tuple[int, int]:
        """The last step, and the number of ranks that made it."""
        try:
            step, world_size = (self.root / "progress").read_text().split()
        except (FileNotFoundError, ValueError):  # not yet, or it is being written
            return 0, 0
        return int(step), int(world_size)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something holds; raise if it takes too long or the training has ended."""
        while not condition():
            if all(agent.poll() is not None for agent in self._agents.values()):
                raise RuntimeError(f"the training has ended before {what}")
            if time.monotonic() > self._begun + LIMIT:
                raise TimeoutError(f"{what} did not happen in {LIMIT:.0f} s")
            time.sleep(0.05)

    def finish(self) -> float:
        """Wait for the end on both machines, and return the seconds since the start."""
        self.wait_for(lambda: all(agent.poll() is not None for agent in self._agents.values()), "the end")
        codes = {machine: agent.returncode for machine, agent in self._agents.items()}
        if any(codes.values()):
            raise RuntimeError(f"torchrun has ended with the codes {codes}")
        return time.monotonic() - self._begun

    def kill(self, machine: int) -> None:
        """Kill torchrun on a machine, and all processes that it has started."""
        agent = self._agents[machine]
        for process in tree(agent.pid) if agent.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        """End all processes of the training."""
        for machine in self._agents:
            self.kill(machine)
        self.machines.connect(True)

    def attempts(self) -> list[str]:
        """Where each attempt has begun, and on how many ranks."""
        lines = (self.root / "attempts").read_text().splitlines() if (self.root / "attempts").exists() else []
        return ["step {} on {} ranks".format(*line.split()) for line in lines]


# The disturbances


def undisturbed(run: Run) -> None:
    """Start both machines."""
    run.start(0)
    run.start(1)


def cut(run: Run, seconds: float) -> None:
    """Cut the link for a while."""
    undisturbed(run)
    run.wait_for(lambda: run.progress[0] >= CUT_AT, f"step {CUT_AT}")
    run.machines.connect(False)
    time.sleep(seconds)
    run.machines.connect(True)


def lose(run: Run) -> None:
    """Kill the second machine, let the first one go on alone, and start the second one again."""
    undisturbed(run)
    run.wait_for(lambda: run.progress[0] >= CUT_AT, f"step {CUT_AT}")
    run.kill(1)
    run.wait_for(lambda: run.progress[1] == RANKS, "a step of the first machine alone")
    run.start(1)
    run.wait_for(lambda: run.progress[1] == 2 * RANKS, "a step of both machines")


DISTURBANCES: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "undisturbed": (undisturbed, {}),
    "short cut": (lambda run: cut(run, SHORT), {}),
    "long cut": (lambda run: cut(run, LONG), {}),
    "lost machine": (lose, {"nodes": "1:2", "pause": 1.0}),
}


def parameters_in(root: Path) -> Tensor:
    """Return all parameters of the last checkpoint."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    loaded = checkpoint.load(root, model=module)
    if loaded.step != STEPS:
        raise RuntimeError(f"the last checkpoint is of step {loaded.step} and not {STEPS}")
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def check(name: str, attempts: list[str]) -> None:
    """Raise if a run was not restarted as often as it must."""
    has_restarted = len(attempts) > 1
    if has_restarted != (name in ("long cut", "lost machine")):
        raise RuntimeError("it was restarted" if has_restarted else "it was not restarted")


def run_one(machines: Machines, level: str, name: str, folder: Path, table: Table) -> bool:
    """Run one training, add a row for it, and return whether it was right."""
    disturb, options = DISTURBANCES[name]
    root = folder / f"{level}-{name.replace(' ', '-')}"
    run = Run(machines, level, root, **options)
    row, traffic = ["", ""], ""
    try:
        disturb(run)
        row[0] = f"{run.finish():.0f}"
        params, plain = parameters_in(root), parameters_in(folder / f"{level}-undisturbed")
        row[1] = f"{(params - plain).abs().max():.1e}"
        torch.testing.assert_close(params, plain, rtol=1e-4, atol=1e-5)
        check(name, run.attempts())
        if name == "undisturbed":
            per_step = json.loads((root / "traffic").read_text())
            traffic = f"{per_step / 1e6:.2f} MB, {per_step / (4 * plain.numel()):.2f} times the parameters"
        result = "[green]ok"
    except (RuntimeError, TimeoutError, AssertionError, OSError) as error:
        result = f"[bold red]{escape(str(error))}"
    finally:
        run.close()
    table.add_row(level, name, *row, "\n".join(run.attempts()), traffic, result)
    Console().print(f"level {level}, {name}: {result}")
    if result != "[green]ok":
        for machine in range(2):
            log = root / f"machine-{machine}.log"
            print(log.read_text()[-4000:] if log.exists() else "", file=sys.stderr)
    return result == "[green]ok"


def drive(levels: list[str], names: list[str], folder: Path) -> int:
    """Run every disturbance at every level, print a table, and return 1 if a run was not right."""
    table = Table(title=f"two machines with {RANKS} ranks each, {STEPS} steps, a checkpoint every {SAVE_EVERY}")
    for column in ("level", "run", "seconds", "difference", "attempts", "sent over the link in a step", "result"):
        table.add_column(column)
    machines = Machines()
    try:
        right = [run_one(machines, level, name, folder, table) for level in levels for name in names]
    finally:
        machines.close()
    Console().print(table)
    return int(not all(right))


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
        return drive(arguments.levels.split(","), names, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
