"""Ignite: a ``Checkpoint`` handler with the model, the optimizer and the trainer in ``to_save``."""

from __future__ import annotations

import warnings
from typing import Any

import ignite.distributed as idist
import torch
from common import BATCH, EPOCHS, Run, make_model, make_samples
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn


def train(local_rank: int, run: Run) -> None:  # noqa: ARG001 - Ignite passes it
    net = make_model()
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(run.make_optimizer(model.parameters(), lr=1e-2))
    loader = idist.auto_dataloader(make_samples(), batch_size=2 * BATCH, shuffle=True)

    def step(engine: Engine, batch: Any) -> float:  # noqa: ARG001 - Ignite passes it
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: loader.sampler.set_epoch(engine.state.epoch))
    to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(to_save, DiskSaver(str(run.checkpoints), require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if run.is_first_half:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, run.die)
    if run.is_resumed:
        (file,) = run.checkpoints.glob("*.pt")
        Checkpoint.load_objects(to_save, torch.load(file))
    trainer.run(loader, max_epochs=EPOCHS)
    run.finish(net)


def main() -> None:
    run = Run()
    warnings.simplefilter("ignore")
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(train, run)


if __name__ == "__main__":
    main()
