"""The command ``onecopy bench`` measures variants, and shows, draws, records and compares the results."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onecopy.bench import bf16_probe, regression_check, running
from onecopy.bench.launching import machine
from onecopy.bench.models import MODELS, Sizes
from onecopy.bench.tables import print_tables
from onecopy.bench.variants import VARIANTS, chosen
from onecopy.cli.errors import guarded, need

EXAMPLES = """Examples:

  onecopy bench --ranks 2 --rounds 5 --parts time --variants 'DDP;onecopy'

  onecopy bench show bench.jsonl
"""

app = typer.Typer(help="Compare onecopy with its alternatives in one run on this machine.", epilog=EXAMPLES)

Rows = Annotated[Path, typer.Argument(help="The file of results that a run has written.")]


@app.callback(invoke_without_command=True)
@guarded
def bench(
    context: typer.Context,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    variants: Annotated[
        str, typer.Option(help="Measure only variants whose names contain one of these texts, separated by ';'.")
    ] = "",
    model: Annotated[
        str, typer.Option(help=f"One or several of these models, separated by commas: {', '.join(MODELS)}.")
    ] = "reference",
    link: Annotated[
        str, typer.Option(help="'loopback', or rates such as 4gbit to which it is limited, separated by commas.")
    ] = "loopback",
    rounds: Annotated[int, typer.Option(min=1, help="The number of times that each variant is measured.")] = 20,
    parts: Annotated[
        str,
        typer.Option(
            help="Measurements, separated by commas. time: steps; memory: tensors by kind; sizes: memory of larger "
            "models; growth: planning, and the host time of step(); save: gathering and saving the state."
        ),
    ] = ",".join(running.PARTS),
    size: Annotated[
        list[str] | None, typer.Option(help="Change a size of the model, such as depth=4. Can be given several times.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file for the results, one JSON object per line.")] = Path(
        "bench.jsonl"
    ),
) -> None:
    """Measure the variants and print tables. Each result is written to a file as soon as it is measured."""
    if context.invoked_subcommand is not None:
        return
    names = chosen(variants)
    sizes = {key: _number(f"--size {key}", value) for key, _, value in (text.partition("=") for text in size or [])}
    _check_known("model", model.split(","), MODELS)
    _check_known("part", parts.split(","), running.PARTS)
    _check_known("size", sizes, asdict(Sizes()))
    plan = running.Plan(
        names=names,
        ranks=[_number("--ranks", number) for number in ranks.split(",")],
        models=model.split(","),
        links=["" if name == "loopback" else name for name in link.split(",")],
        rounds=rounds,
        parts=parts.split(","),
        sizes=sizes,
    )
    console = Console(width=150)
    message = bf16_probe.protect()
    if message:
        console.print(message, markup=False, highlight=False)
    console.print(f"{machine()}; {len(names)} of {len(VARIANTS)} variants")
    out.unlink(missing_ok=True)
    rows = []
    with console.status("") as status:
        for row in running.run(plan, status.update):
            if row.get("failed"):
                console.print(f"failed: {row['variant']}: {row['error']}", style="red")
            running.write(row, out)
            rows.append(row)
    print_tables(rows, console)
    console.print(f"results are in {out}")


@app.command(epilog="Example: onecopy bench show bench.jsonl")
@guarded
def show(path: Rows) -> None:
    """Print the tables of an earlier run."""
    print_tables(running.read(path), Console(width=150))


@app.command(epilog="Example: onecopy bench draw bench.jsonl pictures")
@guarded
def draw(path: Rows, folder: Annotated[Path, typer.Argument(help="The directory for the pictures.")]) -> None:
    """Draw pictures from the results of an earlier run."""
    need("matplotlib", "onecopy bench draw", "bench")
    from onecopy.bench.pictures import draw as draw_pictures

    for made in draw_pictures(running.read(path), folder):
        Console().print(str(made))


@app.command(epilog="Example: onecopy bench page bench.jsonl --after benchmarks/checkpoints.md")
@guarded
def page(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of results, all of one machine. Without them, the recorded tables are used."),
    ] = None,
    tables: Annotated[Path, typer.Option(help="The file of recorded tables. New results replace it.")] = Path(
        "benchmarks/results.json"
    ),
    target: Annotated[
        Path, typer.Option(help="The page to write. The pictures are written to the same directory.")
    ] = Path("docs/benchmarks.md"),
    after: Annotated[Path | None, typer.Option(help="A file whose text is appended to the page.")] = None,
) -> None:
    """Write the page of results. With new results, also record their tables and draw the pictures."""
    from onecopy.bench import result_tables
    from onecopy.bench.results_page import page as page_of

    if paths:
        need("matplotlib", "onecopy bench page", "bench")
        from onecopy.bench.pictures import draw as draw_pictures

        rows = [row for path in paths for row in running.read(path)]
        pictures = draw_pictures(rows, target.parent)
        result_tables.write(result_tables.from_rows(rows, machine(), pictures), tables)
    text = page_of(result_tables.read(tables))
    target.write_text(text + ("\n" + after.read_text() if after is not None else ""))
    Console().print(f"wrote {target}")


@app.command(epilog="Example: onecopy bench record bench.jsonl benchmarks/recorded.json")
@guarded
def record(path: Rows, target: Annotated[Path, typer.Argument(help="The file of recorded ratios.")]) -> None:
    """Record the ratios of a run, for the command check."""
    regression_check.record(running.read(path), target)


@app.command(epilog="Example: onecopy bench check bench.jsonl benchmarks/recorded.json")
@guarded
def check(path: Rows, recorded: Annotated[Path, typer.Argument(help="The file of recorded ratios.")]) -> None:
    """Fail if a ratio is worse than the recorded one by more than noise."""
    found = regression_check.losses(running.read(path), recorded)
    for loss in found:
        Console().print(
            f"{loss.run}: {loss.variant}: {loss.recorded:.3f} before, {loss.now:.3f} now, limit {loss.limit:.3f}",
            style="red",
        )
    if found:
        raise typer.Exit(1)
    Console().print("no ratio is worse than the recorded one by more than noise")


def _check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise an error of the command line for a name that is not known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"there is no {kind} {unknown[0]!r}; there are {', '.join(known)}")


def _number(option: str, text: str) -> int:
    """Return a number of an option; a wrong one is an error of the command line."""
    if not text.strip().isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{option} takes numbers from 1 on, got {text!r}")
    return int(text)
