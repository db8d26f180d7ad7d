"""Start ranks with torchrun, in their own network namespace if the machine allows it, and describe the machine.

In such a namespace the loopback's counters count only this run, and ``tc`` can limit its rate like that of a real link.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onecopy.bench.bf16_probe import ending

COUNTED = "ONECOPY_BENCH_COUNTED"
"""The environment variable that tells the ranks that they are in their own network namespace."""

KILLED = re.compile(r"rank +: (\d+) .*\n.*exitcode.*\n.*\n.*Signal \d+ \((SIG\w+)\) received")
"""Matches the part of torchrun's summary about a rank that a signal has killed."""


@functools.cache
def has_namespaces() -> bool:
    """Return whether this machine allows us to create a network namespace."""
    probe = ["unshare", "--net", "--map-root-user", "sh", "-c", "ip link set lo up"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0  # noqa: S603 - our own command
    except FileNotFoundError:
        return False


def run(ranks: int, arguments: Sequence[str], link: str | None = None) -> tuple[list[dict[str, Any]], str]:
    """Run the worker on a number of ranks and return the rows that they wrote, and a line about a failure."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        worker = [f"--nproc-per-node={ranks}", "-m", "onecopy.bench.worker", *arguments, "--folder", folder]
        command = [*torchrun, *worker]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if has_namespaces():
            environment[COUNTED] = "1"
            inside = f"{_prepare(link)} && exec {shlex.join(command)}"
            command = ["unshare", "--net", "--map-root-user", "sh", "-c", inside]
        elif link:
            return [], f"a link of {link} needs a network namespace, which this machine does not allow"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        rows = [
            json.loads(line) for file in sorted(Path(folder).glob("*.jsonl")) for line in file.read_text().splitlines()
        ]
        return rows, failure(done.stderr, done.returncode)


def failure(text: str, code: int) -> str:
    """Return one line about a failure, from the output and the exit code of torchrun.

    Ranks that were killed by signals come first, because the errors of the other ranks follow from them. SIGTERM is
    ignored, because torchrun itself sends it.
    """
    killed = sorted((int(rank), name) for rank, name in KILLED.findall(text) if name != "SIGTERM")
    deaths = [f"rank {rank} was killed by {name}" for rank, name in killed]
    if code < 0:
        deaths.append(f"torchrun {ending(code)}")
    errors = [line.partition("]: ")[2] or line for line in text.splitlines() if "Error" in line]
    if deaths:
        return "; ".join([*deaths, *(error for error in errors[:1] if "ChildFailedError" not in error)])
    return (errors or text.splitlines() or [""])[0 if errors else -1]


def _prepare(link: str | None) -> str:
    """Return the shell command that sets up the loopback of a new network namespace."""
    if not link:
        return "ip link set lo up"
    shape = f"tc qdisc add dev lo root tbf rate {shlex.quote(link)} burst 256kb latency 100ms"
    return f"ip link set lo up mtu 1500 && {shape}"


def loopback_bytes() -> int:
    """Return the number of bytes sent over the loopback of this network namespace so far, headers included."""
    return sent_bytes("lo")


def sent_bytes(interface: str) -> int:
    """Return the number of bytes sent over an interface of this network namespace so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def idle_seconds() -> float:
    """Return the idle time of all cores of this machine so far, added up."""
    idle, waiting_for_disks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[4:6]
    return (int(idle) + int(waiting_for_disks)) / os.sysconf("SC_CLK_TCK")


def free_bytes() -> int:
    """Return the bytes of memory that are available to processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30


def machine() -> str:
    """Return a description of this machine in one line."""
    memory = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory = int(line.split()[1]) // 1_000_000
    cpu = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores ({cpu}), {memory} GB, no GPU, Linux {platform.release()}, torch {torch.__version__}"
