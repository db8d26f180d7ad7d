"""One rank of a training, as torchrun starts it: ``python -m onecopy.demo.worker SETTINGS``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from onecopy.demo.display import Display
from onecopy.demo.settings import Result, Settings
from onecopy.demo.training import Progress, StopRequest, train
from onecopy.errors import OnecopyError
from onecopy.planning.memory_report import KINDS


def run(settings: Settings, stop: StopRequest) -> Result:
    """Train in a process group that exists, show progress on rank 0, and write the result there."""
    console = Console(stderr=settings.to_stderr, quiet=dist.get_rank() != 0)
    with Display(console) as display, contextlib.ExitStack() as stack:
        writer: Any = None

        def show(progress: Progress) -> None:
            nonlocal writer
            display.show(progress)
            if settings.tensorboard:
                writer = writer or stack.enter_context(_tensorboard_writer(settings, progress.step))
                _write_scalars(writer, progress)

        result = train(settings, stop, show)
    if dist.get_rank() == 0:
        result.write(settings.result_file)
        first, last = result.losses[0], result.losses[-1]
        speed = f"{result.milliseconds:.0f} ms a step, {result.total(result.largest) / 1e6:.1f} MB a rank"
        done = f"{len(result.losses)} steps" if result.finished else f"stopped after {len(result.losses)} steps"
        start = f", from step {result.first_step} on" if result.first_step else ""
        console.print(f"{result.name}: {done}{start}, loss {first:.3f} → {last:.3f}, {speed}", highlight=False)
    return result


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Make the process group of all ranks that torchrun has started, and end it."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _tensorboard_writer(settings: Settings, first_step: int) -> Any:
    """Return a writer for TensorBoard, which then shows no values of earlier runs from this step on."""
    from torch.utils.tensorboard import SummaryWriter  # an extra

    return SummaryWriter(str(Path(settings.tensorboard) / settings.run_folder.name), purge_step=first_step)


def _write_scalars(writer: Any, progress: Progress) -> None:
    writer.add_scalar("loss", progress.losses[-1], progress.step)
    writer.add_scalar("tokens per second", progress.tokens_per_second, progress.step)
    for number, (memory, resident) in enumerate(zip(progress.memory, progress.resident, strict=True)):
        for kind in KINDS:
            writer.add_scalar(f"bytes of rank {number}/{kind}", memory[kind], progress.step)
        writer.add_scalar(f"bytes of rank {number}/process", resident, progress.step)


def main(text: str) -> None:
    """Train with these settings. An error that the user can correct is one line, and the exit code is 1."""
    stop = StopRequest().listen()  # first of all: from here on a signal is answered by a checkpoint
    try:
        with process_group():
            run(Settings.from_json(text), stop)
    except (OnecopyError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError and "gloo" not in str(error):
            raise  # a mistake of ours, with its traceback; gloo reports a rank that has gone
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(sys.argv[1])
