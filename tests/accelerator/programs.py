"""The training loops of the table: accumulation, clipping, scaling, streams, uneven inputs, checkpoints."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

import onecopy
from onecopy import checkpoint
from tests.accelerator.training import Training, one_pass


def accumulated(training: Training, step: int) -> None:
    """Three passes per step, of which the last one synchronises."""
    training.zero_grad()
    with training.model.no_sync():
        for number in (3 * step, 3 * step + 1):
            training.loss(number).backward()
    training.loss(3 * step + 2).backward()
    training.step()


def synchronised_each_time(training: Training, step: int) -> None:
    """Three passes per step that all synchronise."""
    training.zero_grad()
    for number in range(3 * step, 3 * step + 3):
        training.loss(number).backward()
    training.step()


def mixed_accumulation(training: Training, step: int) -> None:
    """A pass that synchronises, one that does not, and one that does again."""
    training.zero_grad()
    training.loss(3 * step).backward()
    with training.model.no_sync():
        training.loss(3 * step + 1).backward()
    training.loss(3 * step + 2).backward()
    training.step()


def zeroed_in_place(training: Training, step: int) -> None:
    training.model.zero_grad(set_to_none=False)
    training.loss(step).backward()
    training.step()


def never_zeroed(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.step()


def written(how: str) -> Callable[[Training, int], None]:
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


def scaled(training: Training, step: int) -> None:
    """A scaler, and in one step a gradient on the last rank that is not finite."""
    if training.scaler is None:
        training.scaler = torch.amp.GradScaler(training.place.device.type, init_scale=1024.0, growth_interval=2)
    training.zero_grad()
    loss = training.loss(step)
    if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
        loss = loss * float("inf")
    training.scaler.scale(loss).backward()
    for optimizer in training.optimizers:
        training.scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        training.scaler.step(optimizer)
    training.scaler.update()
    training.note(torch.tensor(training.scaler.get_scale()))


def spoiled(training: Training, step: int) -> None:
    """In one step the loss of the last rank is not finite."""
    training.zero_grad()
    loss = training.loss(step)
    if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
        loss = loss * float("inf")
    loss.backward()
    training.step()


def on_a_side_stream(training: Training) -> None:
    """All training happens on a stream that is not the default one."""
    stream: Any = contextlib.nullcontext()
    if training.place.simulated:
        stream = torch.Stream(training.place.device)
        stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for step in range(5):
            one_pass(training, step)
    if training.place.simulated:
        torch.accelerator.current_stream().wait_stream(stream)


def unfrozen_on_another_stream(training: Training) -> None:
    """A layer is trained from the third step on: autograd accumulates its gradients on the stream of that step."""
    for step in range(2):
        one_pass(training, step)
    training.module.requires_grad_(True)
    stream = torch.Stream(training.place.device) if training.place.simulated else None
    for step in range(2, 5):
        training.zero_grad()
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
        with stream or contextlib.nullcontext():
            loss = training.loss(step)
        if stream is not None:
            torch.accelerator.current_stream().wait_stream(stream)
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


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for child in children for tensor in _tensors(child)]


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
        training.note(*_tensors(states))
        new.load_state_dict(states[0])
    again.module.load_state_dict(training.module.state_dict())
    for step in range(3, 6):
        one_pass(training, step)
        one_pass(again, step)
    training.note(*(param.detach() for param in again.model.parameters()))


def saving(blocking: bool) -> Callable[[Training], None]:
    """Save, go on, load into a new model and its optimizers, and go on there."""

    def program(training: Training) -> None:
        folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder, device=_object_device(training))
        root, group = Path(folder[0]), training.place.group
        for step in range(2):
            one_pass(training, step)
        checkpoint.save(
            root, 2, model=training.model, optimizer=training.optimizers, blocking=blocking, process_group=group
        )
        for step in range(2, 4):
            one_pass(training, step)
        checkpoint.wait()
        again = Training(training.case, training.place)
        checkpoint.load(root, model=again.model, optimizer=again.optimizers, process_group=group)
        training.note(*(param.detach() for param in again.model.parameters()))
        for step in range(2, 4):
            one_pass(again, step)
        training.note(*(param.detach() for param in again.model.parameters()))

    return program


def _object_device(training: Training) -> torch.device | None:
    return torch.device("sim", torch.accelerator.current_device_index()) if training.place.simulated else None
