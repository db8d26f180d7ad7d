"""Train for a long time in every mode, and check that memory, threads and open descriptors do not grow.

Each mode trains a small model on 2 gloo ranks. The run consists of ten generations. Each of them makes a new model,
wrapper and optimizer. Then parameters are frozen and unfrozen, a parameter group is added, rank 0 alone calls
``state_dict()``, and checkpoints are saved and loaded, many times. Plain DDP with ``torch.save`` is the reference.

At a sample, which is taken between two steps after a garbage collection, each rank notes its resident memory and counts
its threads and its open descriptors. After the first generation they must not grow:

- threads and descriptors: the last sample has at most as many as the last sample of the first generation;
- memory: the mean of the last generation is at most ``ALLOWED_MB`` above the mean of the second one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import onecopy
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint

RANKS = 2
GENERATIONS = 10
SAMPLES = 10
"""Samples of each generation."""

ALLOWED_MB = 4.0
"""The growth of resident memory that is allowed, in MB. A checkpoint of the model has 1 MB, and many are made."""

WIDTH, LAYERS, BATCH = 128, 5, 4
FREEZE_EVERY, STATE_DICT_EVERY, SAVE_EVERY = 10, 25, 50

MODES = {
    "ddp": "plain DDP",
    "1": "level 1",
    "2": "level 2",
    "overlap": "overlap hook",
    "3": "level 3",
}
PICTURE = Path(__file__).parents[1] / "docs/flat.svg"

Sample = dict[str, float]


# One rank


@dataclass(frozen=True, slots=True)
class Training:
    """What one generation trains with: the module, its wrapper, and the optimizer."""

    module: nn.Sequential
    model: nn.Module
    optimizer: Optimizer


def make(mode: str) -> Training:
    """Return a new model and optimizer. The last layer is in no group yet, except at level 3."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    groups: list[dict[str, Any]] = [
        {"params": list(module[0].parameters()), "lr": 1e-3},
        {"params": list(module[1:-1].parameters())},
    ]
    if mode == "ddp":
        model = DistributedDataParallel(module, find_unused_parameters=True)
        return Training(module, model, AdamW(groups, lr=1e-3))
    optimizer = ZeroRedundancyOptimizer(
        groups,
        AdamW,
        lr=1e-3,
        overlap_with_ddp=mode == "overlap",
    )
    if mode == "3":  # after the wrapper is made, no group may be added
        add_group(module, optimizer)
        return Training(module, ShardedDataParallel(module, optimizer), optimizer)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    if mode == "2":
        model.register_comm_hook(optimizer, onecopy.reduce_scatter_hook)
    if mode == "overlap":
        hook = onecopy.hook_with_zero_step(allreduce_hook, model, optimizer)
        model.register_comm_hook(None, hook)
    return Training(module, model, optimizer)


def add_group(module: nn.Sequential, optimizer: Optimizer) -> None:
    """Add the last layer as a new group."""
    optimizer.add_param_group({"params": list(module[-1].parameters()), "lr": 2e-3})


def save_and_load(mode: str, training: Training, root: Path, step: int) -> None:
    """Save a checkpoint and load it."""
    model, optimizer = training.model, training.optimizer
    if mode != "ddp":
        checkpoint.save(root, step, model=model, optimizer=optimizer, keep=2)
        checkpoint.load(root, model=model, optimizer=optimizer)
        return
    file = root / "plain.pt"
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    dist.barrier()
    loaded = torch.load(file)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    dist.barrier()


def sample(step: int) -> Sample:
    """Return the resident memory of this process, its threads and its open descriptors."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "step": step,
        "memory": int(fields["VmRSS"].split()[0]) / 1000,
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def work(mode: str, count: int, root: Path) -> None:
    """Train one rank, and write its samples to a file."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    torch.set_num_threads(1)
    gc.freeze()  # the objects of the imports are not looked at in each collection, which saves most of its time
    length = count // GENERATIONS
    samples: list[Sample] = []
    for first in range(0, count, length):
        training = make(mode)
        generator = torch.Generator().manual_seed(first + dist.get_rank())
        for number in range(1, length + 1):
            inputs = torch.randn(BATCH, WIDTH, generator=generator)
            training.optimizer.zero_grad()
            nn.functional.mse_loss(training.model(inputs), inputs.sin()).backward()
            training.optimizer.step()
            if number % FREEZE_EVERY == 0:
                training.module[1].requires_grad_(number // FREEZE_EVERY % 2 == 0)
            if number == length // 3 and mode != "3":
                add_group(training.module, training.optimizer)
            if number % STATE_DICT_EVERY == 0:
                if isinstance(training.optimizer, ZeroRedundancyOptimizer):
                    training.optimizer.consolidate_state_dict()
                if dist.get_rank() == 0:
                    training.optimizer.state_dict()
            if number % SAVE_EVERY == 0:
                save_and_load(mode, training, root, first + number)
            if number % (length // SAMPLES) == 0:
                samples.append(sample(first + number))
        del training
        gc.collect()  # it has cycles, and would else live beside the next one for a while
    (root / f"samples-{dist.get_rank()}.json").write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


# All modes


def run(mode: str, count: int) -> tuple[list[list[Sample]], float]:
    """Run a mode with torchrun; return the samples of each rank, and the seconds."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command = [*torchrun, __file__, str(count), "--work", mode, "--root", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run(command, env=environment, check=True)
        files = [Path(folder) / f"samples-{rank}.json" for rank in range(RANKS)]
        return [json.loads(file.read_text()) for file in files], time.perf_counter() - begin


def growth(samples: list[Sample]) -> dict[str, float]:
    """Return by how much memory, threads and descriptors of a rank have grown since the first generation."""
    last_of_first, last = samples[SAMPLES - 1], samples[-1]
    found = {name: last[name] - last_of_first[name] for name in ("threads", "descriptors")}
    second, final = samples[SAMPLES : 2 * SAMPLES], samples[-SAMPLES:]
    return {"memory": mean(each["memory"] for each in final) - mean(each["memory"] for each in second), **found}


def draw(samples: dict[str, list[list[Sample]]], path: Path) -> None:
    """Draw memory, threads and descriptors of both ranks over the steps, in a column for each mode."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "onecopy", "svg.fonttype": "none"})
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    rows = {"memory": "resident memory, MB", "threads": "threads", "descriptors": "open descriptors"}
    grid = figure.subplots(len(rows), len(samples), sharex=True, sharey="row", squeeze=False)
    for column, (mode, ranks) in enumerate(samples.items()):
        for (name, label), axes in zip(rows.items(), grid[:, column], strict=True):
            for rank, (points, colour) in enumerate(zip(ranks, ("#1b6ca8", "#f2a541"), strict=True)):
                steps = [point["step"] for point in points]
                values = [point[name] for point in points]
                axes.plot(steps, values, color=colour, label=f"rank {rank}", linewidth=1.4, linestyle="-:"[rank])
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e5e5e5")
            if column == 0:
                axes.set_ylabel(label)
        grid[0, column].set_title(MODES[mode])
        grid[-1, column].set_xlabel("step")
    for axes in grid[:, 0]:  # when all lines are drawn, because the axes of a row have the same limits
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    grid[0, 0].legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Return 1 if a mode has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("count", type=int, nargs="?", default=5000, help="steps of each mode")
    parser.add_argument("--modes", default=",".join(MODES), help="modes, separated by commas")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the file for the picture (SVG or PNG)")
    parser.add_argument("--samples", type=Path, help="a file in which samples are kept, to run the modes one by one")
    parser.add_argument("--work", choices=MODES, help="train one rank: for torchrun")
    parser.add_argument("--root", type=Path)
    arguments = parser.parse_args()
    if arguments.count % (GENERATIONS * SAMPLES):
        parser.error(f"count must be a multiple of {GENERATIONS * SAMPLES}")
    if arguments.work:
        work(arguments.work, arguments.count, arguments.root)
        return 0
    samples: dict[str, list[list[Sample]]] = {}
    if arguments.samples and arguments.samples.exists():
        samples = json.loads(arguments.samples.read_text())
    has_grown = False
    for mode in filter(None, arguments.modes.split(",")):
        samples[mode], seconds = run(mode, arguments.count)
        for rank, points in enumerate(samples[mode]):
            grown = growth(points)
            is_flat = grown["memory"] <= ALLOWED_MB and grown["threads"] <= 0 and grown["descriptors"] <= 0
            has_grown |= not is_flat
            last = points[-1]
            print(
                f"{MODES[mode]}, rank {rank}, {arguments.count} steps, {seconds:.0f} s: "
                f"memory {last['memory']:.0f} MB ({grown['memory']:+.1f}), threads {last['threads']:.0f} "
                f"({grown['threads']:+.0f}), descriptors {last['descriptors']:.0f} ({grown['descriptors']:+.0f})"
                f"{'' if is_flat else ': NOT FLAT'}",
                flush=True,
            )
    if arguments.samples:
        arguments.samples.write_text(json.dumps(samples))
    draw({mode: samples[mode] for mode in MODES if mode in samples}, arguments.picture)
    return int(has_grown)


if __name__ == "__main__":
    sys.exit(main())
