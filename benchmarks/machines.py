"""Machines for trainings with torchrun: this computer, or two network namespaces of it with a link between them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onecopy import checkpoint

ATTEMPT = re.compile(r"from step (\d+) on (\d+) ranks")
"""The line that rank 0 of a training prints when it has loaded the newest checkpoint."""


@functools.cache
def has_namespaces() -> bool:
    """Return whether this machine allows us to create a network namespace."""
    probe = ["unshare", "--net", "--map-root-user", "sh", "-c", "ip link set lo up"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def sent_bytes(interface: str) -> int:
    """Return the number of bytes sent over an interface of this network namespace so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


class Local:
    """Two machines that are both this computer.

    Attributes:
        addresses: the address of each machine.
        port: a free port of the first machine.
    """

    def __init__(self) -> None:
        self.addresses = ("127.0.0.1", "127.0.0.1")
        with socket.socket() as free:
            free.bind((self.addresses[0], 0))
            self.port: int = free.getsockname()[1]

    def command(self, machine: int, command: list[str]) -> list[str]:  # noqa: ARG002 - both are the same machine
        """Return the command that runs another one on a machine."""
        return command


class Namespaces(Local):
    """Two network namespaces with a link between them. This process is in the first one.

    Attributes:
        link: the name of the link's interface on both machines.
    """

    link = "link0"

    def __init__(self) -> None:
        self.addresses = ("10.77.0.1", "10.77.0.2")
        self.port = 29500
        self._second = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        while self._namespace(self._second.pid) == self._namespace("self"):
            time.sleep(0.01)
        self._call(0, f"link add {self.link} type veth peer name {self.link} netns {self._second.pid}")
        for machine, address in enumerate(self.addresses):
            self._call(machine, f"addr add {address}/24 dev {self.link}")
            self._call(machine, f"link set {self.link} up")
            self._call(machine, "link set lo up")

    def command(self, machine: int, command: list[str]) -> list[str]:
        """Return the command that runs another one on a machine."""
        return command if machine == 0 else ["nsenter", f"--net=/proc/{self._second.pid}/ns/net", *command]

    def connect(self, is_connected: bool) -> None:
        """Cut the link, or restore it."""
        self._call(1, f"link set {self.link} {'up' if is_connected else 'down'}")

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


def descendants(process: int) -> list[int]:
    """Return all processes that a process has started, directly or not."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for each in found:  # it grows meanwhile
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks: the step of the checkpoint that they loaded, and the number of ranks."""

    step: int
    ranks: int

    def __str__(self) -> str:
        """Return a few words for a table."""
        return f"step {self.step} on {self.ranks} ranks"


class Run:
    """One training with torchrun, on one machine or on two.

    Attributes:
        machines: the machines.
        root: the directory for checkpoints and the log.
        ranks: the ranks of each machine, for machines that are started from now on.
        limit: the seconds after which the run counts as hanging.
    """

    def __init__(
        self, machines: Local, root: Path, worker: list[str], nodes: str, ranks: int, restarts: int, limit: float
    ) -> None:
        self.machines = machines
        self.root = root
        self.ranks = ranks
        self.limit = limit
        self._worker, self._nodes, self._restarts = worker, nodes, restarts
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._begun = time.monotonic()
        root.mkdir()

    def start(self, machine: int = 0) -> None:
        """Start torchrun on a machine."""
        first, port, own = self.machines.addresses[0], self.machines.port, self.machines.addresses[machine]
        settings = f"is_host={1 - machine},last_call_timeout=3,read_timeout={self.limit:.0f}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self._nodes]
        torchrun += ["--nproc-per-node", str(self.ranks), "--max-restarts", str(self._restarts), "--local-addr", own]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}", "--rdzv-conf", settings]
        torchrun += ["--rdzv-id", self.root.name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if isinstance(self.machines, Namespaces):
            environment["GLOO_SOCKET_IFNAME"] = self.machines.link
        with (self.root / "log").open("ab") as log:
            command = self.machines.command(machine, [*torchrun, *self._worker])
            self._agents[machine] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        """The output of all processes, without the warnings about names that a namespace cannot look up."""
        path = self.root / "log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(line for line in lines if "hostname of the client socket" not in line)

    @property
    def attempts(self) -> list[Attempt]:
        """All starts of the ranks so far."""
        return [Attempt(int(step), int(ranks)) for step, ranks in ATTEMPT.findall(self.log)]

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint."""
        found = checkpoint.latest(self.root)
        return int(str(found).rpartition("-")[2]) if found else 0

    def wait_for(self, condition: Callable[[], bool], description: str) -> None:
        """Wait until a condition holds; raise if it takes too long or the training has ended."""
        while not condition():
            if not self.is_running and not condition():
                raise RuntimeError(f"the training has ended before {description}")
            if time.monotonic() > self._begun + self.limit:
                raise TimeoutError(f"{description} did not happen in {self.limit:.0f} s")
            time.sleep(0.05)

    @property
    def is_running(self) -> bool:
        """Whether torchrun runs on a machine."""
        return any(agent.poll() is None for agent in self._agents.values())

    def finish(self) -> float:
        """Wait for the end on all machines, and return the seconds since the start of the first one."""
        self.wait_for(lambda: not self.is_running, "the end")
        codes = {machine: agent.returncode for machine, agent in self._agents.items()}
        if any(codes.values()):
            raise RuntimeError(f"torchrun has ended with the codes {codes}")
        return time.monotonic() - self._begun

    def processes(self, machine: int = 0) -> list[int]:
        """Return the processes that torchrun has started on a machine."""
        return descendants(self._agents[machine].pid)

    def kill(self, machine: int = 0) -> None:
        """Kill torchrun on a machine, and all processes that it has started."""
        agent = self._agents[machine]
        for process in [agent.pid, *self.processes(machine)] if agent.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        """End all processes of the training."""
        for machine in self._agents:
            self.kill(machine)
