"""The table at the end of a training or of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onecopy.demo.settings import Result
from onecopy.planning.memory_report import KINDS

MB = 1e6
WITHOUT = "DDP, predicted"


def memory_rows(results: Sequence[Result]) -> list[tuple[str, dict[str, float]]]:
    """Return the bytes by kind of the rank with the most, for each training; plain DDP comes first.

    If plain DDP was not trained, its row is the planner's prediction.
    """
    rows: list[tuple[str, dict[str, float]]] = []
    if results and results[0].ddp and not any(result.name == "DDP" for result in results):
        rows.append((WITHOUT, results[0].ddp))
    return rows + [(result.name, {**result.memory[result.largest]}) for result in results]


def largest_difference(result: Result, reference: Result) -> float:
    """Return the largest difference between the losses of two trainings in the same step."""
    return max((abs(one - other) for one, other in zip(result.losses, reference.losses, strict=False)), default=0.0)


def table_of(results: Sequence[Result]) -> Table:
    """Return a table with one row for each training."""
    rows = memory_rows(results)
    kinds = [kind for kind in KINDS if any(memory[kind] for _, memory in rows)]
    compared = len(results) > 1
    columns = [*kinds, "total", "of DDP", "process", "ms/step", "tokens/s", "last loss"]
    table = Table("MB per rank", *columns, *(["loss differs by"] * compared), box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    whole = sum(rows[0][1].values())
    by_name = {result.name: result for result in results}
    for name, memory in rows:
        total, result = sum(memory.values()), by_name.get(name)
        cells = [f"{memory[kind] / MB:.2f}" for kind in kinds]
        cells += [f"{total / MB:.2f}", f"{total / whole:.0%}"]
        if result is not None:
            resident = max(result.resident)
            cells += [f"{resident / MB:.0f}", f"{result.milliseconds:.0f}", f"{result.tokens_per_second:,.0f}"]
            cells += [f"{result.losses[-1]:.4f}"]
            cells += [f"{largest_difference(result, results[0]):.1g}"] * compared
        table.add_row(name, *cells)
    return table


def print_report(console: Console, results: Sequence[Result]) -> None:
    """Print the table of memory, time and loss, an explanation of its columns, and a sentence by the model."""
    first = results[0]
    settings = f"{first.settings['optimizer']}, {first.settings['precision']}"
    words = f"{first.elements:,} parameters on {first.ranks} ranks, {settings}, {len(first.losses)} steps"
    console.print(Text.assemble(("A small GPT: ", "bold"), words))
    console.print(table_of(results))
    rows = memory_rows(results)
    (_, before), (best, after) = rows[0], min(rows, key=lambda row: sum(row[1].values()))
    saved = (sum(before.values()) - sum(after.values())) / MB
    if saved > 0:
        share = saved * MB / sum(before.values())
        console.print(f"{best} saves {saved:.1f} MB of {sum(before.values()) / MB:.1f} MB on each rank ({share:.0%}).")
    console.print(
        "Bytes are those of parameters, gradients and optimizer state on the rank with the most, between two steps; "
        '"process" is all that the process has in memory, torch itself included. '
        "Times are those of this run. onecopy bench compares them in turns.",
        style="dim",
    )
    console.print(Text.assemble("The model writes: ", (f'"{results[-1].text}"', "italic")))
