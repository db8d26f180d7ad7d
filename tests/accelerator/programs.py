"""The training loops of the table: accumulation, clipping, scaling, streams, uneven inputs, checkpoints."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

import onecopy
from onecopy import checkpoint
from tests.accelerator.training import Training, one_pass

Iterate = Callable[[Training, int], None]


def passes(*synchronised: bool) -> Iterate:
    """Several passes per step; those that are not synchronised run under ``no_sync()``."""

    def iterate(training: Training, step: int) -> None:
        training.zero_grad()
        for number, synchronises in enumerate(synchronised):
            with contextlib.nullcontext() if synchronises else training.model.no_sync():
                training.loss(len(synchronised) * step + number).backward()
        training.step()

    return iterate


accumulated, synchronised_each_time = passes(False, False, True), passes(True, True, True)
mixed_accumulation = passes(True, False, True)


def zeroed_in_place(training: Training, step: int) -> None:
    training.model.zero_grad(set_to_none=False)
    training.loss(step).backward()
    training.step()


def never_zeroed(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.step()


def written(how: str) -> Iterate:
    """After every other step, values are written into the parameters: those win, and the others stay precise."""

    def iterate(training: Training, step: int) -> None:
        one_pass(training, step)
        for param in training.module.parameters() if step % 2 else ():
            values = param.detach().clone()
            values[::2] = 0.625
            if how == "copied":
                with torch.no_grad():
                    param.copy_(values)
            elif how == "replaced":
                param.data = values
            else:
                param.data[::2] = 0.625
        if how == "refreshed" and step % 2:
            training.optimizer.refresh_master_weights()

    return iterate


def clipped(training: Training, step: int) -> None:
    training.zero_grad()
    training.loss(step).backward()
    if len(training.optimizers) == 1:
        norm = training.optimizer.clip_grad_norm_(0.1, error_if_nonfinite=False)
    else:
        norm = onecopy.clip_grad_norm_(training.optimizers, 0.1)
    training.note(norm)
    training.step()


def spoiled_loss(training: Training, step: int) -> Tensor:
    """The loss, which in one step is not finite on the last rank."""
    is_spoiled = step == 2 and dist.get_rank() == dist.get_world_size() - 1
    return training.loss(step) * (float("inf") if is_spoiled else 1.0)


def scaled(training: Training, step: int) -> None:
    """A scaler, and in one step a gradient on the last rank that is not finite."""
    if training.scaler is None:
        training.scaler = torch.amp.GradScaler(training.place.device.type, init_scale=1024.0, growth_interval=2)
    training.zero_grad()
    training.scaler.scale(spoiled_loss(training, step)).backward()
    for optimizer in training.optimizers:
        training.scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        training.scaler.step(optimizer)
    training.scaler.update()
    training.note(torch.tensor(training.scaler.get_scale()))


def spoiled(training: Training, step: int) -> None:
    training.zero_grad()
    spoiled_loss(training, step).backward()
    training.step()


def on_a_side_stream(training: Training) -> None:
    """All training happens on a stream that is not the default one."""
    with beside(stream_of(training)):
        for step in range(5):
            one_pass(training, step)


def stream_of(training: Training) -> torch.Stream | None:
    """A new stream; None for the CPU, which has none."""
    return torch.Stream(training.place.device) if training.place.simulated else None


@contextlib.contextmanager
def beside(stream: torch.Stream | None) -> Iterator[None]:
    """Work on a stream that waits for the current one, and for which that one waits at the end."""
    if stream is None:
        yield
        return
    current = torch.accelerator.current_stream()
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def unfrozen_on_another_stream(training: Training) -> None:
    """A layer is trained from the third step on: autograd accumulates its gradients on the stream of that step."""
    for step in range(2):
        one_pass(training, step)
    training.module.requires_grad_(True)
    stream = stream_of(training)
    for step in range(2, 5):
        training.zero_grad()
        with beside(stream):
            loss = training.loss(step)
        loss.backward()
        training.step()


def with_evaluation(training: Training, step: int) -> None:
    """After every step a forward pass without gradients."""
    one_pass(training, step)
    with torch.no_grad():
        training.note(training.loss(step + 10))


def uneven(training: Training) -> None:
    """Later ranks have more inputs."""
    with Join([training.model, *training.optimizers], model=training.model):
        for step in range(3 + dist.get_rank()):
            one_pass(training, step)


def consolidated(training: Training) -> None:
    """The state on one rank, and state loaded into another optimizer."""
    for step in range(3):
        one_pass(training, step)
    again = Training(training.case, training.place)
    for old, new in zip(training.optimizers, again.optimizers, strict=True):
        states: list[Any] = []
        for to in range(old.world_size):
            old.consolidate_state_dict(to=to)
            if old.rank == to:
                states.append(old.state_dict())
        training.note(*(value for state in states[0]["state"].values() for value in state.values()))
        new.load_state_dict(states[0])
    again.module.load_state_dict(training.module.state_dict())
    for step in range(3, 6):
        one_pass(training, step)
        one_pass(again, step)
    training.note(*again.model.parameters())


def saving(blocking: bool) -> Callable[[Training], None]:
    """Save, go on, load into a new model and its optimizers, and go on there."""

    def program(training: Training) -> None:
        device = training.place.device
        folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder, device=device if training.place.simulated else None)
        root, group = Path(folder[0]), training.place.group
        for step in range(2):
            one_pass(training, step)
        what = {"model": training.model, "optimizer": training.optimizers, "process_group": group}
        checkpoint.save(root, 2, **what, blocking=blocking)
        for step in range(2, 4):
            one_pass(training, step)
        checkpoint.wait()
        again = Training(training.case, training.place)
        checkpoint.load(root, model=again.model, optimizer=again.optimizers, process_group=group)
        training.note(*again.model.parameters())
        for step in range(2, 4):
            one_pass(again, step)
        training.note(*again.model.parameters())

    return program
