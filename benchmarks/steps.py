"""Step time and bytes on the wire of every mode, interleaved in one run.

``python benchmarks/steps.py --ranks 2 --link 4gbit`` starts itself in a network namespace of its own (so that the
loopback counters count only this run, and the link can be shaped), launches the ranks with torchrun, and lets all
variants take turns step by step. Needs Linux with ``unshare``, ``ip`` and, for ``--link``, ``tc``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT, batch, loss_of
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import onecopy

with warnings.catch_warnings():
    # Importing torch's class compiles TorchScript, which warns that TorchScript is deprecated. Nothing of ours.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

LR = 3e-4
TIMED = 2
"""Steps that are timed in a turn."""

YARDSTICK = "DDP fused, bucket-view gradients"
THEIRS = "torch's class, bucket views, fused"
Made = tuple[nn.Module, Optimizer]


@dataclass
class Variant:
    """A way to train, and what was measured of it."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    seconds: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)

    def turn(self, number: int) -> None:
        """A few steps in a row, with the clock around all but the first and the byte counter around all.

        What a step leaves under way for the next one (``overlap_forward``) is thus paid for inside the timed steps.
        """
        dist.barrier()
        sent, start = loopback_bytes(), 0.0
        for count in range(1 + TIMED):
            tokens = batch(dist.get_rank(), (1 + TIMED) * number + count)
            self.optimizer.zero_grad()
            loss_of(self.model, tokens).backward()
            self.optimizer.step()
            start = start or time.perf_counter()
        self.seconds.append((time.perf_counter() - start) / TIMED)
        if isinstance(self.model, onecopy.ShardedDataParallel):
            self.model.wait()
        dist.barrier()
        self.wire.append((loopback_bytes() - sent) / (1 + TIMED))


def loopback_bytes() -> int:
    """What has been sent over this namespace's loopback so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def ddp(model: nn.Module, view: bool) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=view)


def plain(view: bool, fused: bool) -> Callable[[nn.Module], Made]:
    def make(model: nn.Module) -> Made:
        wrapped = ddp(model, view)
        return wrapped, AdamW(wrapped.parameters(), lr=LR, fused=fused)

    return make


def torch_zero(model: nn.Module) -> Made:
    wrapped = ddp(model, view=True)
    return wrapped, TorchZero(wrapped.parameters(), AdamW, parameters_as_bucket_view=True, lr=LR, fused=True)


def level_one(views: bool) -> Callable[[nn.Module], Made]:
    def make(model: nn.Module) -> Made:
        wrapped = ddp(model, view=True)
        zero = onecopy.ZeroRedundancyOptimizer(
            wrapped.parameters(), AdamW, parameters_as_bucket_view=views, lr=LR, fused=True
        )
        return wrapped, zero

    return make


def reduce_scatter(model: nn.Module) -> Made:
    wrapped = ddp(model, view=True)
    zero = onecopy.ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, shard_by="element", lr=LR, fused=True)
    wrapped.register_comm_hook(zero, onecopy.reduce_scatter_hook)
    return wrapped, zero


def overlapped(
    make_hook: Callable[..., Callable[..., torch.futures.Future[torch.Tensor]]],
) -> Callable[[nn.Module], Made]:
    def make(model: nn.Module) -> Made:
        wrapped = ddp(model, view=True)
        zero = onecopy.ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, overlap_with_ddp=True, lr=LR, fused=True)
        wrapped.register_comm_hook(None, make_hook(allreduce_hook, wrapped, zero))
        return wrapped, zero

    return make


def sharded(overlap_forward: bool) -> Callable[[nn.Module], Made]:
    def make(model: nn.Module) -> Made:
        zero = onecopy.ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LR, fused=True)
        return onecopy.ShardedDataParallel(model, zero, overlap_forward=overlap_forward), zero

    return make


VARIANTS: dict[str, Callable[[nn.Module], Made]] = {
    "DDP": plain(view=False, fused=False),
    "DDP fused": plain(view=False, fused=True),
    YARDSTICK: plain(view=True, fused=True),
    THEIRS: torch_zero,
    "onecopy": level_one(views=False),
    "onecopy, bucket views": level_one(views=True),
    "onecopy, reduce-scatter hook": reduce_scatter,
    "onecopy, hook_with_zero_step": overlapped(onecopy.hook_with_zero_step),
    "onecopy, interleaved": overlapped(onecopy.hook_with_zero_step_interleaved),
    "onecopy, ShardedDataParallel": sharded(overlap_forward=False),
    "onecopy, ShardedDataParallel, overlap_forward": sharded(overlap_forward=True),
}


def measure(rounds: int, warm_up: int, names: list[str]) -> list[Variant]:
    """All variants from the same weights on the same data, in turns."""
    torch.manual_seed(0)
    origin = GPT()
    variants = [Variant(name, *VARIANTS[name](copy.deepcopy(origin))) for name in names]
    for number in range(warm_up + rounds):
        # Every round begins with another variant, so that no one always follows the same neighbour.
        for position in range(len(variants)):
            variants[(position + number) % len(variants)].turn(number)
    for variant in variants:
        del variant.seconds[:warm_up], variant.wire[:warm_up]
    return variants


def largest_difference(variant: Variant, reference: Variant) -> float:
    pairs = zip(variant.model.parameters(), reference.model.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def report(variants: list[Variant], link: str | None, as_json: bool) -> None:
    """A table (or JSON lines): medians and quartiles of per-round ratios, and bytes in units of the model."""
    by_name = {variant.name: variant for variant in variants}
    yardstick, theirs = by_name[YARDSTICK], by_name[THEIRS]
    unit = 4 * sum(p.numel() for p in yardstick.model.parameters()) * max(1, dist.get_world_size() - 1)
    title = f"{dist.get_world_size()} ranks, {link or 'plain loopback'}, {len(yardstick.seconds)} rounds"
    table = Table("variant", "ms", "x DDP", "quartiles", "x torch's class", "wire / Ψ(N-1)", "difference", title=title)
    for variant in variants:
        ratios = [a / b for a, b in zip(variant.seconds, yardstick.seconds, strict=True)]
        to_torch = [a / b for a, b in zip(variant.seconds, theirs.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {
            "ranks": dist.get_world_size(),
            "link": link,
            "variant": variant.name,
            "ms": 1e3 * statistics.median(variant.seconds),
            "to_ddp": middle,
            "quartiles": [low, high],
            "to_torch": statistics.median(to_torch),
            "wire": statistics.median(variant.wire) / unit,
            "difference": largest_difference(variant, yardstick),
        }
        if as_json:
            print(json.dumps(row), flush=True)
        table.add_row(
            variant.name,
            f"{row['ms']:.1f}",
            f"{row['to_ddp']:.3f}",
            f"{low:.3f}-{high:.3f}",
            f"{row['to_torch']:.3f}",
            f"{row['wire']:.3f}",
            f"{row['difference']:.1e}",
        )
    if not as_json:
        Console(width=150).print(table)


def launch(arguments: argparse.Namespace) -> int:
    """Start torchrun in a fresh network namespace, with the link shaped if asked for."""
    prepare = "ip link set lo up"
    if arguments.link:
        prepare += (
            f" mtu 1500 && tc qdisc add dev lo root tbf rate {shlex.quote(arguments.link)} burst 256kb latency 100ms"
        )
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={arguments.ranks}",
        __file__,
        *sys.argv[1:],
    ]
    command = f"{prepare} && exec {shlex.join(torchrun)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    return subprocess.call(["unshare", "--net", "--map-root-user", "sh", "-c", command], env=environment)


def main() -> int:
    """Launch, or be one of the ranks launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--warm-up", type=int, default=2, help="rounds that are not counted (updates move into backward)"
    )
    parser.add_argument("--link", help="shape the link, such as 4gbit")
    parser.add_argument("--only", help="variants whose name contains this, beside the two that all are compared with")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        return launch(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wanted = arguments.only or ""
    names = [name for name in VARIANTS if wanted in name or name in (YARDSTICK, THEIRS)]
    variants = measure(arguments.rounds, arguments.warm_up, names)
    if dist.get_rank() == 0:
        report(variants, arguments.link, arguments.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
