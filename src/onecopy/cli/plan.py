"""The command ``onecopy plan``: compares the memory of all levels for a model and recommends one."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from math import inf, prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onecopy.cli.errors import guarded, need
from onecopy.layout import Layout, default_shard_by, extend
from onecopy.planning import estimate
from onecopy.planning.advice import GB, USABLE, Advice, fits, recommend, unit_of
from onecopy.planning.comparison import UTILISATION, Row, activation_bytes, compare, planned_job
from onecopy.planning.optimizers import OPTIMIZERS
from onecopy.planning.sources import Source, from_counts, from_path

EXAMPLES = """Examples:

  onecopy plan --params 7.5e9 --ranks 64 --precision bf16-master

  onecopy plan my_package.models:make_model --ranks 8 --memory 24

  onecopy plan path/to/config.json --ranks 8 --memory 80 --batch 4 --sequence 2048 --plot plan.png

  onecopy plan my_package.models:make_model --ranks 4 --layout --plot layout.png
"""


class Precision(str, Enum):
    """The data types of parameters, gradients and state."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_master = "bf16-master"


def positive(value: float | None) -> float | None:
    """Return a number of the command line; raise an error if it is not finite or not greater than 0."""
    if value is not None and not 0 < value < inf:
        raise typer.BadParameter(f"it must be finite and greater than 0, got {value:g}")
    return value


def count(text: str) -> float:
    """Return a number of elements, which may end in K, M or B."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number such as 7e9 or 7B") from None


OptimizerName = Enum("OptimizerName", {name: name for name in OPTIMIZERS}, type=str)  # type: ignore[misc]
ADAMW = OptimizerName("adamw")


@guarded
def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="A function that makes the model, as package.module:function, or a Hugging Face config."),
    ] = None,
    params: Annotated[
        float | None, typer.Option(parser=count, help="Instead of MODEL: the number of parameters, as 7e9 or 7B.")
    ] = None,
    largest: Annotated[
        float | None, typer.Option(parser=count, help="With --params: the elements of the largest parameter.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="The number of data-parallel ranks.")] = 8,
    ranks_per_machine: Annotated[int, typer.Option(min=1, help="Ranks in one machine.")] = 8,
    optimizer: Annotated[OptimizerName, typer.Option(help="The optimizer class.")] = ADAMW,
    precision: Annotated[
        Precision,
        typer.Option(help="All in fp32; all in bf16; or bf16 with fp32 master weights and state."),
    ] = Precision.fp32,
    memory: Annotated[
        float | None, typer.Option(callback=positive, help="Memory of one GPU in GB, to tell what fits.")
    ] = None,
    bandwidth: Annotated[
        float, typer.Option(callback=positive, help="GB/s that a rank sends inside a machine.")
    ] = 200.0,
    network: Annotated[
        float, typer.Option(callback=positive, help="GB/s that a rank sends between machines: 50 is 400 Gbit/s.")
    ] = 50.0,
    batch: Annotated[int, typer.Option(min=0, help="Sequences per rank and step, for activations and time.")] = 0,
    sequence: Annotated[int, typer.Option(min=0, help="Tokens per sequence.")] = 0,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of the layers, if the model does not tell.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers, if the model does not tell.")] = None,
    checkpointing: Annotated[bool, typer.Option(help="Activations are computed again in the backward pass.")] = False,
    tflops: Annotated[
        float, typer.Option(callback=positive, help="Peak TFLOP/s of one GPU, for the time of a step.")
    ] = 300.0,
    layout: Annotated[bool, typer.Option("--layout", help="Also draw which rank owns which parameter.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a picture of the memory, with --layout also of the layout, as PNG or SVG."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare the memory of all levels for a model and recommend one. Nothing is trained or downloaded."""
    if plot is not None:
        need("matplotlib", "--plot", "demo")
    source, chosen = _source(model, params, largest, hidden, layers), OPTIMIZERS[optimizer.value]
    job = planned_job(source, chosen, precision.value, batch * sequence, tflops * 1e12)
    speed = bandwidth if ranks <= ranks_per_machine else network
    machine = estimate.Machine(ranks, speed * GB, estimate.collective_latency(ranks), pairwise=False)
    rows = compare(job, machine)
    itemsize = job.model.specs[0].dtype.itemsize if job.model.specs else 4
    activations = activation_bytes(source, batch, sequence, itemsize, checkpointing) if batch * sequence else None
    limit = None if memory is None else memory * GB
    advice = recommend(rows, chosen, precision is Precision.bf16_master, limit, activations)
    policy = default_shard_by(chosen.splittable)
    owners = extend(None, job.model.specs, ranks, policy, chosen.splittable) if layout else None
    if as_json:
        typer.echo(json.dumps(_as_json(source, rows, activations, limit, advice, owners), indent=1))
    else:
        console = Console()
        console.print(f"{escape(source.title)}: {job.model.elements:,} elements in {len(source.shapes)} parameters")
        _print_memory(console, rows, limit, activations)
        _print_step(console, rows)
        _print_assumptions(console, machine, activations, batch * sequence, tflops)
        console.print(f"\n[bold]{advice.choice}[/bold]: {advice.reason}\n")
        console.print(escape(advice.code), highlight=False, soft_wrap=True)
        if owners is not None:
            typer.echo("\nlevel 1: {}\n{}".format(str(owners).partition("\n")[0], owners.draw(console.width)))
    if plot is not None:
        from onecopy.planning.picture import draw  # needs matplotlib

        draw(rows, activations, limit, f"{source.title}, {ranks} ranks, {precision.value}", plot, owners)
        Console(stderr=True).print(f"wrote {plot}")


def _source(
    model: str | None, params: float | None, largest: float | None, hidden: int | None, layers: int | None
) -> Source:
    if (model is None) == (params is None):
        raise typer.BadParameter("give either MODEL or --params, such as: onecopy plan --params 7e9 --ranks 64")
    if params is not None and not 1 <= params < inf:
        raise typer.BadParameter(f"--params must be at least 1 and finite, got {params:g}")
    try:
        source = from_counts(params, largest) if params is not None else from_path(str(model))
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if hidden is None and layers is None:
        return source
    return Source(source.title, source.shapes, hidden or source.hidden, layers or source.layers, source.vocabulary)


def _print_memory(console: Console, rows: list[Row], limit: float | None, activations: float | None) -> None:
    unit, scale = unit_of(rows)
    kinds = [kind for kind in rows[0].memory if any(row.memory[kind] for row in rows)]
    columns = ["", *kinds, *(["activations"] if activations else []), "total", *(["fits"] if limit is not None else [])]
    table = Table(
        *columns,
        title=f"{unit} on the rank with the most",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for row in rows:
        cells = [f"{row.memory[kind] / scale:.2f}" for kind in kinds]
        cells += [f"{activations / scale:.1f}"] if activations else []
        cells.append(f"{(row.total + (activations or 0)) / scale:.2f}")
        if limit is not None:
            cells.append("yes" if fits(row, limit, activations) else "no")
        table.add_row(row.name, *cells)
    console.print(table)


def _print_step(console: Console, rows: list[Row]) -> None:
    timed = any(row.step for row in rows)
    unit, scale = unit_of(rows)
    columns = ["", f"{unit} sent", "collectives", "operations", "ms of collectives", *(["ms of a step"] * timed)]
    table = Table(
        *columns, title="one step of one rank", box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False
    )
    for row in rows:
        step = ["-" if row.step is None else f"{1e3 * row.step:.0f}"] if timed else []
        counts = (f"{row.calls:,}", f"{row.operations:,}")
        table.add_row(row.name, f"{row.sent / scale:.2f}", *counts, f"{1e3 * row.communication:.0f}", *step)
    console.print(table)


def _print_assumptions(
    console: Console, machine: estimate.Machine, activations: float | None, tokens: int, tflops: float
) -> None:
    """Say which of the numbers follow from the plan, and which are assumed."""
    lines = [
        "Parameters, gradients and state follow from the shapes. Buffers hold parameters and gradients that are sent.",
        "The rows with DDP assume gradient_as_bucket_view=True. Without it DDP has two copies of the gradients.",
        f"Time assumes {machine.bandwidth / GB:.0f} GB/s and {1e6 * machine.latency:.0f} us for one operation.",
    ]
    if activations:
        lines.append("Activations are an estimate for a transformer; real ones are from half to twice of it.")
    else:
        lines.append("Activations are not included: give --batch and --sequence, and --hidden and --layers.")
    if tokens:
        lines.append(f"A step assumes {UTILISATION:.0%} of {tflops:.0f} TFLOP/s.")
    console.print(*lines, sep="\n", style="dim", highlight=False, soft_wrap=True)


def _as_json(
    source: Source,
    rows: list[Row],
    activations: float | None,
    limit: float | None,
    advice: Advice,
    owners: Layout | None,
) -> dict[str, Any]:
    return {
        "model": source.title,
        "elements": sum(prod(shape) for shape in source.shapes.values()),
        "activations": activations,
        "usable_memory": None if limit is None else USABLE * limit,
        "ways": [{**asdict(row), "total": row.total, "fits": fits(row, limit, activations)} for row in rows],
        "advice": asdict(advice),
        "layout": None if owners is None else [asdict(shard) for shard in owners.shards],
    }
