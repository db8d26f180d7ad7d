"""Measure the time that each variant takes to gather the optimizer's state, and to save model and optimizer."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onecopy import checkpoint
from onecopy.bench.models import Sizes
from onecopy.bench.step_time import iterate
from onecopy.bench.variants import VARIANTS, Trained
from onecopy.checkpoint.convert import write_torch
from onecopy.optimizer import ZeroRedundancyOptimizer

FOLDER = "onecopy-bench-saving"


def measure(names: Sequence[str], sizes: Sizes, rounds: int, root: Path) -> list[dict[str, Any]]:
    """Measure each variant in turn, ``rounds`` times.

    A variant is constructed anew in every round, because all variants together need too much memory.
    """
    found: dict[str, dict[str, list[float]]] = {name: {"consolidate": [], "save": []} for name in names}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for name in names:
            if name in errors:
                continue
            folder = root / FOLDER / f"{number}-{names.index(name)}"
            folder.mkdir(parents=True, exist_ok=True)
            try:
                trained = VARIANTS[name](sizes.make())
                iterate(trained, sizes, 0)
                trained.finish()
                if hasattr(trained.optimizer, "consolidate_state_dict"):
                    seconds = timed(lambda t=trained: gather(t.optimizer))  # type: ignore[misc]
                    found[name]["consolidate"].append(seconds)
                found[name]["save"].append(timed(lambda t=trained, n=name, f=folder: save(n, t, f)))  # type: ignore[misc]
                del trained
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root / FOLDER, ignore_errors=True)
    return [
        {
            "kind": "save",
            "variant": name,
            "error": errors.get(name, ""),
            **{part: statistics.median(seconds) for part, seconds in parts.items() if seconds},
        }
        for name, parts in found.items()
    ]


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have finished an action."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def gather(optimizer: Any) -> None:
    """Gather the whole state on rank 0, with any class that has ``consolidate_state_dict``."""
    if type(optimizer).__module__.startswith("fairscale"):
        optimizer.consolidate_state_dict(recipient_rank=0)
    else:
        optimizer.consolidate_state_dict(to=0)


def save(name: str, trained: Trained, folder: Path) -> None:
    """Save model and optimizer in the usual way of a variant."""
    if isinstance(trained.optimizer, ZeroRedundancyOptimizer):
        checkpoint.save(folder, 1, model=trained.model, optimizer=trained.optimizer)
    elif name.startswith("DeepSpeed"):
        trained.model.save_checkpoint(str(folder), tag="all")  # type: ignore[operator]
    elif name.startswith("FSDP2"):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        model, optimizer = get_state_dict(trained.model, trained.optimizer)
        dcp_save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")
    else:
        if hasattr(trained.optimizer, "consolidate_state_dict"):
            gather(trained.optimizer)
        if dist.get_rank() == 0:
            state = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
            write_torch(state, folder / "all.pt")
