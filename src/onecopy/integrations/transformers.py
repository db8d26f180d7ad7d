"""Callbacks for transformers' Trainer: gather the optimizer state before each save, or let all ranks write it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from onecopy import checkpoint

FOLDER = "onecopy"
"""The directory of optimizer state, scheduler and random number states in each of Trainer's checkpoints."""


class ConsolidatedCheckpoints(TrainerCallback):
    """Gathers the optimizer state on rank 0 before Trainer saves it there.

    Put it behind callbacks that decide about saving. Trainer calls each method on all ranks, with its arguments, its
    state, its control, and objects such as the optimizer.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Gather the state, if Trainer saves after this step."""
        if control.should_save and not args.save_only_model:
            _unwrapped(objects["optimizer"]).consolidate_state_dict()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Gather the state, if Trainer may save after an evaluation: no callback comes after that decision."""
        if args.save_strategy == "best" and not args.save_only_model and objects["optimizer"] is not None:
            _unwrapped(objects["optimizer"]).consolidate_state_dict()


class ShardedCheckpoints(TrainerCallback):
    """Saves the optimizer, the scheduler and random number states with :func:`onecopy.checkpoint.save`.

    Use it with ``TrainingArguments(save_only_model=True)``: Trainer saves the model and its own state, and this
    callback saves the rest in a directory ``onecopy`` beside. With ``trainer.train(resume_from_checkpoint=...)`` it
    loads that directory. Any number of ranks can load it.

    Trainer calls each method on all ranks, with its arguments, its state, its control, and objects such as the
    optimizer and the scheduler.

    Args:
        resume_from: the checkpoint that is resumed from, if it is not in ``output_dir``.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None) -> None:
        self._resume_from = None if resume_from is None else Path(resume_from)
        self._random_states: dict[str, Any] | None = None

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Save the optimizer, the scheduler and random number states; all ranks write."""
        if not args.save_only_model:
            raise ValueError("ShardedCheckpoints needs TrainingArguments(save_only_model=True)")
        extra = checkpoint.capture(scheduler=objects["lr_scheduler"])
        folder = _folder_of(args, state) / FOLDER
        optimizer = _unwrapped(objects["optimizer"])
        # Trainer overwrites its files, too, if a run has gone back to an older step.
        checkpoint.save(folder, state.global_step, optimizer=optimizer, extra=extra, overwrite=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Load the optimizer and the scheduler, if training resumes."""
        if not state.global_step:
            return
        folder = (self._resume_from or _folder_of(args, state)) / FOLDER
        extra = checkpoint.load(folder, optimizer=_unwrapped(objects["optimizer"])).extra
        checkpoint.restore(extra, scheduler=objects["lr_scheduler"])
        self._random_states = extra

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Set the random number states, if training resumes at the begin of an epoch."""
        if float(state.epoch or 0).is_integer():
            self._restore_random_states()

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG002
        """Set the random number states, if training resumes inside an epoch: Trainer has skipped batches by now."""
        self._restore_random_states()

    def _restore_random_states(self) -> None:
        if self._random_states is not None:
            checkpoint.restore(self._random_states)
            self._random_states = None


def _folder_of(args: Any, state: Any) -> Path:
    """Trainer's directory for the checkpoint of a step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
