"""``onecopy bench``: measure, show, draw, record, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onecopy.bench import checking, processor, running
from onecopy.bench.models import MODELS
from onecopy.bench.report import machine, print_tables
from onecopy.bench.variants import VARIANTS, chosen

app = typer.Typer(help="Compare onecopy with everything people would use instead, in one run on this machine.")

Rows = Annotated[Path, typer.Argument(help="A file of rows that a run has written.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    variants: Annotated[str, typer.Option(help="Only those whose names contain one of these; use ';' between.")] = "",
    model: Annotated[str, typer.Option(help=f"One or several of {', '.join(MODELS)}.")] = "reference",
    link: Annotated[str, typer.Option(help="'loopback' or a rate such as 4gbit, separated by commas.")] = "loopback",
    rounds: Annotated[int, typer.Option(help="Turns of each variant.")] = 20,
    parts: Annotated[str, typer.Option(help="What to measure.")] = "time,memory,sizes,growth,save",
    size: Annotated[list[str] | None, typer.Option(help="A size of the model instead, such as depth=4.")] = None,
    out: Annotated[Path, typer.Option(help="Where rows go, one JSON object per line.")] = Path("bench.jsonl"),
) -> None:
    """Measure and show; rows are added to a file as they come."""
    if context.invoked_subcommand is not None:
        return
    names = chosen(variants)
    unknown = [name for name in model.split(",") if name not in MODELS]
    if unknown:
        raise typer.BadParameter(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    plan = running.Plan(
        names=names,
        ranks=[int(number) for number in ranks.split(",")],
        models=model.split(","),
        links=["" if name == "loopback" else name for name in link.split(",")],
        rounds=rounds,
        parts=parts.split(","),
        sizes={key: int(value) for key, _, value in (text.partition("=") for text in size or [])},
    )
    console = Console(width=150)
    told = processor.protect()
    if told:
        console.print(told, markup=False, highlight=False)
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
    console.print(f"rows are in {out}")


@app.command()
def show(path: Rows) -> None:
    """Print the tables of an earlier run."""
    print_tables(running.read(path), Console(width=150))


@app.command()
def draw(path: Rows, folder: Annotated[Path, typer.Argument(help="Where the pictures go.")]) -> None:
    """Draw the pictures of an earlier run."""
    from onecopy.bench.pictures import draw as draw_pictures

    for made in draw_pictures(running.read(path), folder):
        Console().print(str(made))


@app.command()
def page(
    paths: Annotated[list[Path], typer.Argument(help="Files of rows, of one machine.")],
    target: Annotated[Path, typer.Option(help="The page; pictures go beside it.")] = Path("docs/benchmarks.md"),
    after: Annotated[Path | None, typer.Option(help="A file whose text follows what is written.")] = None,
) -> None:
    """Write the page of results and draw its pictures."""
    from onecopy.bench.page import page as page_of
    from onecopy.bench.pictures import draw as draw_pictures

    rows = [row for path in paths for row in running.read(path)]
    text = page_of(rows, machine(), draw_pictures(rows, target.parent))
    target.write_text(text + ("\n" + after.read_text() if after is not None else ""))
    Console().print(f"wrote {target}")


@app.command()
def record(path: Rows, target: Annotated[Path, typer.Argument(help="The file of recorded ratios.")]) -> None:
    """Keep the ratios of a run, for ``check``."""
    checking.record(running.read(path), target)


@app.command()
def check(path: Rows, recorded: Annotated[Path, typer.Argument(help="The file of recorded ratios.")]) -> None:
    """Fail if a ratio has become worse than the recorded one, beyond noise."""
    found = checking.losses(running.read(path), recorded)
    for loss in found:
        Console().print(
            f"{loss.run}: {loss.variant}: {loss.recorded:.3f} before, {loss.now:.3f} now, limit {loss.limit:.3f}",
            style="red",
        )
    if found:
        raise typer.Exit(1)
    Console().print("no loss beyond noise")
