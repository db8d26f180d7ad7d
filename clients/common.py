"""What every client shares: its arguments, the line that makes the optimizer, and how a run ends."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy

OPTIMIZERS = ("plain", "torch", "onecopy")
MODES = ("straight", "first-half", "resume")
FEATURES = 16
SAMPLES = 32
BATCH = 4
EPOCHS = 2
HANG = 60.0
"""Seconds from the end of the imports after which a run counts as a hang; a run takes a few."""


class Run:
    """One run of a client: its arguments, and the files that it leaves for the comparison."""

    def __init__(self, *options: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
        parser.add_argument("--mode", choices=MODES, required=True)
        parser.add_argument("--out", type=Path, required=True, help="the directory of checkpoints and results")
        parser.add_argument("--variant", choices=options or ("",), default=(options or ("",))[0])
        arguments = parser.parse_args()
        self.optimizer: str = arguments.optimizer
        self.mode: str = arguments.mode
        self.out: Path = arguments.out
        self.variant: str = arguments.variant
        self.checkpoints = self.out / ("whole" if self.mode == "straight" else "halves")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.is_first_half = self.mode == "first-half"
        self.is_resumed = self.mode == "resume"
        sys.excepthook = self._write_error
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        torch.set_num_threads(1)
        # Every process starts with other random numbers, so that a client which forgets them is noticed.
        seed = {"straight": 0, "first-half": 0, "resume": 1000}[self.mode] + int(os.environ["RANK"])
        torch.manual_seed(seed)
        random.seed(seed)

    def path(self, kind: str) -> Path:
        """The file of this rank for a kind of result."""
        return self.out / f"{self.mode}-{kind}-{os.environ['RANK']}.json"

    def make_optimizer(self, params: Any, base: Any = torch.optim.AdamW, **options: Any) -> Any:
        """The one line that differs."""
        if self.optimizer == "plain":
            return base(params, **options)
        return self.sharding_class()(params, base, **options)

    def sharding_class(self) -> Any:
        """The class that shards the state."""
        if self.optimizer == "torch":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer
        return onecopy.ZeroRedundancyOptimizer

    def die(self) -> None:
        """End this process as a power cut does, once all ranks are here."""
        dist.barrier()
        self.path("saved").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)

    def finish(self, model: nn.Module) -> None:
        """Write a digest of the parameters and buffers of this rank."""
        text = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            text.update(name.removeprefix("module.").encode())
            text.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.path("result").write_text(json.dumps({"digest": text.hexdigest()}))

    def _write_error(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        traceback.print_exception(kind, error, where)
        lines = str(error).strip().splitlines() or [""]
        functions = [frame.name for frame in traceback.extract_tb(where)]
        sentence = lines[0].partition(". ")[0]
        what = {"error": f"{kind.__name__}: {sentence}", "when": "saving" if saving(functions) else "training"}
        self.path("error").write_text(json.dumps(what))
        sys.stderr.flush()
        os._exit(1)  # the other rank may wait for this one: torchrun ends it

    def _watch(self, thread: int) -> None:
        """End a run that hangs, and write in which function."""
        time.sleep(HANG)
        stack = traceback.extract_stack(sys._current_frames()[thread])
        functions = [frame.name for frame in stack]
        where = (saving(functions) or functions)[-1]
        what = {"error": f"hangs in {where}()", "when": "saving" if saving(functions) else "training"}
        self.path("hang").write_text(json.dumps(what))
        sys.stderr.write("".join(stack.format()))
        sys.stderr.flush()
        time.sleep(HANG / 6)  # the other rank writes too, before it is ended because this one has
        os._exit(1)


def saving(functions: list[str]) -> list[str]:
    """The functions of a stack that save, the outermost first."""
    return [name for name in functions if "save" in name or name in ("state_dict", "consolidate_state_dict")]


def make_model(width: int = 32, features: int = FEATURES) -> nn.Sequential:
    """The same small model on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, features), nn.Linear(features, 1))


def make_samples(features: int = FEATURES) -> Any:
    """The samples of all ranks together, pairs of tensors."""
    inputs = torch.randn(SAMPLES, features, generator=torch.Generator().manual_seed(1))
    return [(row, row.sin().sum().reshape(1)) for row in inputs]


def batches_of(epoch: int, features: int = FEATURES) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches of an epoch, for scripts without a loader."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    samples = make_samples(features)
    mine = [samples[index] for index in order[dist.get_rank() :: dist.get_world_size()]]
    chunks = [mine[start : start + BATCH] for start in range(0, len(mine), BATCH)]
    return [(torch.stack([x for x, _ in chunk]), torch.stack([y for _, y in chunk])) for chunk in chunks]


def train_epoch(model: Callable[[Tensor], Tensor], optimizer: Any, epoch: int, features: int = FEATURES) -> None:
    """An epoch of an ordinary loop."""
    for inputs, targets in batches_of(epoch, features):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
