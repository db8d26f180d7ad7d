"""The command ``onecopy train``: trains a small GPT at a level of sharding, or at all of them, and compares."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onecopy.bench import bf16_probe
from onecopy.cli.errors import fail, guarded, need
from onecopy.cli.plan import Precision
from onecopy.demo import launching
from onecopy.demo.report import print_report
from onecopy.demo.settings import LEVELS, OPTIMIZERS, Result, Settings

EXAMPLES = """Examples:

  onecopy train --level 3

  onecopy train --compare --ranks 4 --plot compare.png

  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m onecopy.cli train --level 2

Ctrl-C saves a checkpoint and stops. The same command continues. A training that is finished begins anew.
"""

Level = Enum("Level", {name: name for name in LEVELS}, type=str)  # type: ignore[misc]
OptimizerName = Enum("OptimizerName", {name: name for name in OPTIMIZERS}, type=str)  # type: ignore[misc]
ADAMW = OptimizerName("adamw")
STANDARD = Settings()


@guarded
def train(
    level: Annotated[Level | None, typer.Option(help="Plain DDP or a level of sharding.", show_default="1")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Train with plain DDP and at every level.")] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes on this machine; not with torchrun.", show_default="2")
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="The optimizer.")] = ADAMW,
    precision: Annotated[
        Precision, typer.Option(help="All in fp32; all in bf16; or bf16 with fp32 master weights and state.")
    ] = Precision.fp32,
    steps: Annotated[int, typer.Option(min=1, help="The number of steps.")] = STANDARD.steps,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step.")] = STANDARD.batch,
    length: Annotated[int, typer.Option(min=2, help="Words per sequence.")] = STANDARD.length,
    width: Annotated[int, typer.Option(min=32, help="The width of the layers, a multiple of 32.")] = STANDARD.width,
    layers: Annotated[int, typer.Option(min=1, help="The number of layers.")] = STANDARD.layers,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = STANDARD.save_every,
    folder: Annotated[Path, typer.Option(help="The directory for checkpoints, results and the picture.")] = Path(
        STANDARD.folder
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, and remove the checkpoints of before.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="The picture to write, as PNG or SVG.", show_default="train.png in the folder")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="A directory for TensorBoard.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train a small GPT on generated sentences, with processes on this machine or as a rank of torchrun. CPU only."""
    if compare and level is not None:
        raise typer.BadParameter("--compare trains at every level: leave out --level")
    if width % 32:
        raise typer.BadParameter(f"--width must be a multiple of 32, got {width}")
    if ranks is not None and launching.is_launched() and ranks != int(os.environ["WORLD_SIZE"]):
        raise typer.BadParameter(f"--ranks {ranks}, but torchrun has started {os.environ['WORLD_SIZE']} ranks")
    if plot is not None:
        need("matplotlib", "--plot", "demo")
    if tensorboard is not None:
        need("tensorboard", "--tensorboard", "tensorboard")
    settings = Settings(
        optimizer=optimizer.value,
        precision=precision.value,
        steps=steps,
        batch=batch,
        length=length,
        width=width,
        layers=layers,
        save_every=save_every,
        folder=str(folder),
        fresh=fresh,
        tensorboard=str(tensorboard or ""),
        to_stderr=as_json,
    )
    levels = LEVELS if compare else ((level or Level("1")).value,)
    jobs = [replace(settings, level=each) for each in levels]
    message = bf16_probe.protect() if precision is not Precision.fp32 else ""
    console = Console(stderr=as_json)
    if message:
        console.print(message, markup=False, highlight=False)
    results = _as_rank(jobs) if launching.is_launched() else _launched(jobs, ranks or 2)
    if results:
        _report(results, as_json, plot or Path(folder) / "train.png", plot is not None)


def _as_rank(jobs: list[Settings]) -> list[Result]:
    """Train as one rank that torchrun has started; only rank 0 returns results."""
    from onecopy.demo import worker
    from onecopy.demo.training import StopRequest

    stop, results = StopRequest().listen(), []
    with worker.process_group():
        for job in jobs:
            results.append(worker.run(job, stop))
            if not results[-1].finished:
                raise typer.Exit(launching.STOPPED)
    return results if os.environ["RANK"] == "0" else []


def _launched(jobs: list[Settings], ranks: int) -> list[Result]:
    """Start processes for one training after the other. Of a comparison that was stopped, finished ones are kept."""
    finished = {job.level: result for job in jobs if (result := _finished(job, ranks)) is not None}
    if len(finished) == len(jobs):
        for job in jobs:
            job.result_file.unlink(missing_ok=True)
        finished = {}
    for job in jobs:
        if job.level in finished:
            continue
        try:
            launching.launch(job, ranks)
        except launching.StoppedError:
            _stopped(job)
        except launching.RankFailedError as error:
            if str(error):
                fail(f"{error}; the same command continues from the last checkpoint in {job.checkpoints}")
            raise typer.Exit(1) from None
        result = Result.read(job.result_file)
        if result is None:
            fail(f"{job.result_file} was not written")
        if not result.finished:
            _stopped(job)
        finished[job.level] = result
    return [finished[job.level] for job in jobs]


def _finished(job: Settings, ranks: int) -> Result | None:
    """Return the result of this training if it was finished with the same settings."""
    result = None if job.fresh else Result.read(job.result_file)
    same = result is not None and result.finished and result.ranks == ranks
    return result if same and result is not None and result.settings == asdict(job) else None


def _stopped(job: Settings) -> None:
    Console(stderr=True).print(f"stopped; the same command continues from the checkpoint in {job.checkpoints}")
    raise typer.Exit(launching.STOPPED)


def _report(results: list[Result], as_json: bool, picture: Path, is_required: bool) -> None:
    """Print the table or JSON, and write the picture if matplotlib is installed."""
    if as_json:
        typer.echo(json.dumps([asdict(result) for result in results], indent=1))
    else:
        terminal = shutil.get_terminal_size((130, 24)).columns
        print_report(Console(width=max(terminal, 100)), results)
    notes = Console(stderr=as_json)
    if is_required or importlib.util.find_spec("matplotlib") is not None:
        from onecopy.demo.picture import draw

        draw(results, picture)
        notes.print(f"wrote {picture}", highlight=False, soft_wrap=True)
    else:
        notes.print("there is no picture without matplotlib: pip install 'onecopy[demo]'", markup=False)
