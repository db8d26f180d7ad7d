"""Measure the time of saving and loading with onecopy, torch's class, torch.distributed.checkpoint and DeepSpeed.

The optimizer is AdamW, with a copy of the model on each of two gloo processes. In each round every contender is
constructed, saves, loads and is freed, one after the other. The limit is a plain write of the same bytes, half of them
by each rank, with one fsync, and a plain read of them. All contenders read their new files from the system's cache.

Their guarantees differ: onecopy and torch.distributed.checkpoint flush to the disk, torch.save does not. Only onecopy
has checksums, which it verifies when it loads.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from variants import Sizes

from onecopy import ZeroRedundancyOptimizer, checkpoint

with warnings.catch_warnings():
    # Importing torch's class compiles TorchScript, which warns that TorchScript is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

SIZES = {"25M": Sizes(), "200M": Sizes(width=1024, depth=13)}


class Timer:
    """Measures the seconds of each part on the slowest rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a block that all ranks run."""
        dist.barrier()
        start = time.perf_counter()
        yield
        dist.barrier()
        self.seconds[name] = time.perf_counter() - start


def model_with_gradients(size: str) -> nn.Module:
    """Return a model that is the same on all ranks, with a gradient for every parameter."""
    model = SIZES[size].make()
    for param in model.parameters():
        param.grad = param.detach() * 0.01
    return model


def stepped(optimizer: Any) -> Any:
    """Make one step, which creates the state of every parameter, and return the optimizer."""
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def run_onecopy(size: str, folder: Path, timer: Timer) -> None:
    model = model_with_gradients(size)
    optimizer = stepped(ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3))
    with timer.part("save"):
        checkpoint.save(folder, 1, model=model, optimizer=optimizer)
    with timer.part("load"):
        checkpoint.load(folder, model=model, optimizer=optimizer)


def run_background(size: str, folder: Path, timer: Timer) -> None:
    model = model_with_gradients(size)
    optimizer = stepped(ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3))
    with timer.part("stall"):
        checkpoint.save(folder, 1, model=model, optimizer=optimizer, blocking=False)
    with timer.part("rest"):
        checkpoint.wait()
    timer.seconds["save"] = timer.seconds.pop("rest") + timer.seconds["stall"]


def run_torch(size: str, folder: Path, timer: Timer) -> None:
    model = model_with_gradients(size)
    optimizer = stepped(TorchZero(model.parameters(), AdamW, lr=1e-3))
    with timer.part("save"):
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "all.pt")
    with timer.part("load"):
        saved = torch.load(folder / "all.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])


def run_dcp_plain(size: str, folder: Path, timer: Timer) -> None:
    model = DistributedDataParallel(model_with_gradients(size))
    optimizer = stepped(AdamW(model.parameters(), lr=1e-3))

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}

    with timer.part("save"):
        dcp_save(state(), checkpoint_id=folder / "dcp")
    with timer.part("load"):
        found = state()
        dcp_load(found, checkpoint_id=folder / "dcp")
        set_optimizer_state_dict(model, optimizer, found["optimizer"])


def run_dcp_onecopy(size: str, folder: Path, timer: Timer) -> None:
    model = model_with_gradients(size)
    optimizer = stepped(ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3))

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": checkpoint.get_optimizer_state_dict(model, optimizer),
        }

    with timer.part("save"):
        dcp_save(state(), checkpoint_id=folder / "dcp")
    with timer.part("load"):
        found = state()
        dcp_load(found, checkpoint_id=folder / "dcp")
        checkpoint.set_optimizer_state_dict(model, optimizer, found["optimizer"])


def run_deepspeed(size: str, folder: Path, timer: Timer) -> None:
    import deepspeed

    model = model_with_gradients(size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 25_000_000, "allgather_bucket_size": 25_000_000},
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    engine.backward(engine(tokens).float().mean())
    engine.step()
    with timer.part("save"):
        engine.save_checkpoint(str(folder), tag="all")
    with timer.part("load"):
        engine.load_checkpoint(str(folder), tag="all")
    engine.destroy()


def run_limit(size: str, folder: Path, timer: Timer) -> None:
    model = model_with_gradients(size)
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    count = 3 * flat.numel() // dist.get_world_size()
    memory: Tensor = flat.repeat(2)[:count].contiguous()
    raw = memoryview(memory.view(torch.uint8).numpy().data)
    path = folder / f"{dist.get_rank()}.bin"
    with timer.part("save"), path.open("wb", buffering=0) as file:
        rest = raw
        while rest:
            rest = rest[file.write(rest[: 64 << 20]) :]
        os.fsync(file.fileno())
    with timer.part("load"), path.open("rb", buffering=0) as file:
        while file.readinto(raw):
            pass


RUNS: dict[str, Callable[[str, Path, Timer], None]] = {
    "write and fsync of the same bytes": run_limit,
    "onecopy": run_onecopy,
    "onecopy, in the background": run_background,
    "torch's class, consolidate and torch.save": run_torch,
    "torch.distributed.checkpoint, plain AdamW": run_dcp_plain,
    "torch.distributed.checkpoint, onecopy's shards": run_dcp_onecopy,
    "DeepSpeed ZeRO-1": run_deepspeed,
}


def bytes_in(folder: Path) -> int:
    """Return the number of bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(names: Sequence[str], size: str, rounds: int, root: Path) -> dict[str, dict[str, Any]]:
    """Measure all contenders in turns; a contender that raises is not run again, and its error is reported."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for number in range(rounds):
        for name in names:
            if "error" in found[name]:
                continue
            folder = root / f"{number}-{list(RUNS).index(name)}"
            folder.mkdir(exist_ok=True)
            timer = Timer()
            try:
                RUNS[name](size, folder, timer)
            except Exception as error:
                found[name]["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
                continue
            for part, seconds in timer.seconds.items():
                found[name].setdefault(part, []).append(seconds)
            found[name]["bytes"] = bytes_in(folder)
            gc.collect()
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
                os.sync()
            dist.barrier()
    return found


def main() -> None:
    """Print a table, and one line of JSON for each contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", default="", help="leave out contenders whose names contain this")
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    root = arguments.root / "onecopy-bench-checkpoints"
    root.mkdir(exist_ok=True)
    names = [name for name in RUNS if not arguments.without or arguments.without not in name]
    found = measure(names, arguments.size, arguments.rounds, root)
    console = Console(quiet=dist.get_rank() != 0, width=150)
    table = Table(title=f"{arguments.size} parameters, AdamW, {dist.get_world_size()} ranks, {arguments.rounds} rounds")
    for column in ("contender", "save", "load", "stall", "written", "x torch's class", "x DCP"):
        table.add_column(column, justify="left" if column == "contender" else "right")

    def median(name: str, part: str) -> float | None:
        seconds = found.get(name, {}).get(part)
        return statistics.median(seconds) if seconds else None

    others = list(RUNS)[3:5]
    for name, row in found.items():
        if "error" in row:
            table.add_row(name, row["error"])
            continue
        parts = [median(name, part) for part in ("save", "load", "stall")]
        save = parts[0]
        ratios = [f"{save / base:.2f}" if save and (base := median(other, "save")) else "" for other in others]
        cells = ["" if seconds is None else f"{seconds:.2f} s" for seconds in parts]
        table.add_row(name, *cells, f"{row['bytes'] / 1e6:.0f} MB", *ratios)
        if dist.get_rank() == 0:
            print(json.dumps({"size": arguments.size, "contender": name, **row}), flush=True)
    console.print(table)
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
