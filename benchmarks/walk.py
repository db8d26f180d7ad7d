"""How far one call of the package walks: files of ours that it enters, changes of folder, and calls.

torchrun --standalone --nproc-per-node 2 benchmarks/walk.py

``sys.setprofile`` counts on rank 0, in the third iteration: a step at level 1, a forward and backward pass and a step
at level 3, and a save, of a model of 16 tensors. VERBOSE=1 also lists the files.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint

PACKAGE = os.path.dirname(onecopy.__file__) + os.sep


def walked(call: Callable[[], Any]) -> list[str]:
    """The files of ours that a call enters, once for each call of a function, in all its threads."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return files


def report(name: str, call: Callable[[], Any]) -> None:
    """Make a call, and print a row of the table on rank 0."""
    files = walked(call)
    folders = [os.path.dirname(file) for file in files]
    changes = sum(before != after for before, after in pairwise(folders))
    if dist.get_rank() == 0:
        print(f"{name:<30}{len(set(files)):>7}{changes:>17}{len(files):>9,}", flush=True)
        if os.environ.get("VERBOSE"):
            print(*(f"    {count:>5} {file}" for file, count in Counter(files).most_common()), sep="\n")


def main() -> None:
    """Print the table."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{'':<30}{'files':>7}{'folder changes':>17}{'calls':>9}")
    modules = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))) for _ in range(2)]
    optimizers = [ZeroRedundancyOptimizer(each.parameters(), torch.optim.AdamW, lr=1e-3) for each in modules]
    models: list[nn.Module] = [DistributedDataParallel(modules[0]), ShardedDataParallel(modules[1], optimizers[1])]
    inputs = torch.randn(4, 64)
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(2):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    models[0](inputs).sum().backward()
    report("level 1, step", optimizers[0].step)
    report("level 3, forward and backward", lambda: models[1](inputs).sum().backward())
    report("level 3, step", optimizers[1].step)
    boxes = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(boxes)
    checkpoint.save(boxes[0], 1, model=models[0], optimizer=optimizers[0])
    report("checkpoint.save", lambda: checkpoint.save(boxes[0], 2, model=models[0], optimizer=optimizers[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
