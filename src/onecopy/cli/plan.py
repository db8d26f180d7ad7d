"""The command ``onecopy plan``: compares the memory of all levels for a model and recommends one."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from math import inf, prod
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onecopy.layout import Layout, default_shard_by, extend
from onecopy.planning.comparison import (
    GB,
    PRECISIONS,
    USABLE,
    Advice,
    Row,
    compare,
    fits,
    recommend,
    unit_of,
)
from onecopy.planning.memory import OPTIMIZERS
from onecopy.planning.models import Source, from_counts, from_path, specs_of

EXAMPLES = """Examples:

  onecopy plan --params 7.5e9 --ranks 64 --precision bf16-master

  onecopy plan my_package.models:make_model --ranks 8 --memory 24 --layout

  onecopy plan path/to/config.json --ranks 8 --memory 80
"""

NOTES = (
    "Parameters, gradients and state follow from the shapes. Buffers hold parameters and gradients that are sent.",
    "The rows with DDP assume gradient_as_bucket_view=True. Without it DDP has two copies of the gradients.",
    "Activations are not included.",
)

OptimizerName = Enum("OptimizerName", {name: name for name in OPTIMIZERS}, type=str)  # type: ignore[misc]
Precision = Enum("Precision", {name: name for name in PRECISIONS}, type=str)  # type: ignore[misc]
ADAMW, FP32 = OptimizerName("adamw"), Precision("fp32")


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


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="package.module:function that returns the module, or a Hugging Face config.json."),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(parser=count, metavar="NUMBER", help="Elements, such as 7e9 or 7B, instead of MODEL."),
    ] = None,
    largest: Annotated[
        float | None,
        typer.Option(parser=count, metavar="NUMBER", help="Elements of the largest parameter; default: a twentieth."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="The number of data-parallel ranks.")] = 8,
    optimizer: Annotated[OptimizerName, typer.Option(help="The optimizer class.")] = ADAMW,
    precision: Annotated[
        Precision, typer.Option(help="All in fp32; all in bf16; or bf16 with fp32 master weights and state.")
    ] = FP32,
    memory: Annotated[
        float | None, typer.Option(callback=positive, help="Memory of one GPU in GB, to tell what fits.")
    ] = None,
    layout: Annotated[bool, typer.Option("--layout", help="Also draw which rank owns which parameter.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare the memory of all levels for a model and recommend one. Nothing is trained or downloaded."""
    source, chosen = _source(model, params, largest), OPTIMIZERS[optimizer.value]
    rows = compare(source, chosen, precision.value, ranks)
    limit = None if memory is None else memory * GB
    advice = recommend(rows, chosen, precision.value == "bf16-master", limit)
    policy = default_shard_by(chosen.splittable)
    owners = extend(None, specs_of(source.shapes), ranks, policy, chosen.splittable) if layout else None
    if as_json:
        typer.echo(json.dumps(_as_json(source, rows, limit, advice, owners), indent=1))
        return
    console = Console()
    elements = sum(prod(shape) for shape in source.shapes.values())
    console.print(f"{escape(source.title)}: {elements:,} elements in {len(source.shapes)} parameters")
    _print_memory(console, rows, limit)
    _print_step(console, rows)
    console.print(*NOTES, sep="\n", style="dim", highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{advice.choice}[/bold]: {advice.reason}\n")
    console.print(escape(advice.code), highlight=False, soft_wrap=True)
    if owners is not None:
        typer.echo("\nlevel 1: {}\n{}".format(str(owners).partition("\n")[0], owners.draw(console.width)))


def _source(model: str | None, params: float | None, largest: float | None) -> Source:
    if (model is None) == (params is None):
        raise typer.BadParameter("give either MODEL or --params, such as: onecopy plan --params 7e9 --ranks 64")
    if params is not None and not 1 <= params < inf:
        raise typer.BadParameter(f"--params must be at least 1 and finite, got {params:g}")
    try:
        return from_counts(params, largest) if params is not None else from_path(str(model))
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _table(title: str, columns: list[str]) -> Table:
    return Table(*columns, title=title, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)


def _print_memory(console: Console, rows: list[Row], limit: float | None) -> None:
    unit, scale = unit_of(rows)
    kinds = [kind for kind in rows[0].memory if any(row.memory[kind] for row in rows)]
    columns = ["", *kinds, "total", *(["fits"] if limit is not None else [])]
    table = _table(f"{unit} on the rank with the most", columns)
    for row in rows:
        cells = [f"{row.memory[kind] / scale:.2f}" for kind in kinds]
        cells.append(f"{row.total / scale:.2f}")
        if limit is not None:
            cells.append("yes" if fits(row, limit) else "no")
        table.add_row(row.name, *cells)
    console.print(table)


def _print_step(console: Console, rows: list[Row]) -> None:
    unit, scale = unit_of(rows)
    table = _table("one step of one rank", ["", f"{unit} sent", "collectives", "operations"])
    for row in rows:
        table.add_row(row.name, f"{row.sent / scale:.2f}", f"{row.calls:,}", f"{row.operations:,}")
    console.print(table)


def _as_json(
    source: Source, rows: list[Row], limit: float | None, advice: Advice, owners: Layout | None
) -> dict[str, Any]:
    return {
        "model": source.title,
        "elements": sum(prod(shape) for shape in source.shapes.values()),
        "usable_memory": None if limit is None else USABLE * limit,
        "ways": [{**asdict(row), "total": row.total, "fits": fits(row, limit)} for row in rows],
        "advice": asdict(advice),
        "layout": None if owners is None else [asdict(shard) for shard in owners.shards],
    }
