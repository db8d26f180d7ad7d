"""Ignite: ``torchrun --nproc-per-node 2 examples/frameworks/ignite_engine.py DIR``; run it again to resume."""

import sys
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn

from onecopy import ZeroRedundancyOptimizer


def train(local_rank: int, folder: Path) -> None:  # noqa: ARG001 - Ignite passes it
    model = idist.auto_model(nn.Linear(16, 1))
    optimizer = idist.auto_optim(ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))
    loader = idist.auto_dataloader(list(torch.randn(64, 16)), batch_size=8, shuffle=True)

    def step(engine: Engine, inputs: Any) -> None:  # noqa: ARG001 - Ignite passes it
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()

    trainer = Engine(step)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(parts, DiskSaver(str(folder), require_empty=False), n_saved=1, filename_pattern="last.pt")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    resumes = (folder / "last.pt").is_file()
    if resumes:
        Checkpoint.load_objects(parts, torch.load(folder / "last.pt"))
    trainer.run(loader, max_epochs=4 if resumes else 2)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train, Path(sys.argv[1]))
