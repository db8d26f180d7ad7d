"""Make tables from the rows of a run, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from onecopy.bench.memory_use import KINDS
from onecopy.bench.models import elements_of
from onecopy.bench.summaries import Row, bound, host_time_models, predictions, runs_in, select, summaries, title_of

MB = 1e6


def time_cells(summary: Row) -> list[str]:
    """Return the cells of one variant in the table of a timed run."""
    if summary["error"]:
        return [summary["variant"], summary["error"]]
    low, high = summary["quartiles"]
    wire = "" if summary["wire"] is None else f"{summary['wire']:.2f}"
    return [
        summary["variant"],
        f"{summary['ms']:.1f}",
        f"{summary['backward_ms']:.1f}",
        f"{summary['step_ms']:.1f}",
        f"{summary['to_ddp']:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{summary['to_torch']:.3f}",
        f"{100 * summary['idle']:.0f}%",
        wire,
        f"{summary['difference']:.0e}" if summary["difference"] else "0",
    ]


TIME_COLUMNS = ("variant", "ms", "backward", "step", "x DDP", "quartiles", "x torch", "idle", "wire", "difference")
MEMORY_COLUMNS = (
    "variant",
    "parameters",
    "gradients",
    "state",
    "other",
    "together",
    "between steps",
    "peak",
    "resident",
    "max/mean state",
)


def memory_rows(rows: Sequence[Row], ranks: int) -> list[list[str]]:
    """Return cells for each variant: MB by kind on the rank with the highest peak, and the imbalance of the state."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "memory" and row["ranks"] == ranks:
            found.setdefault(row["variant"], []).append(row)
    cells = []
    for variant, each in found.items():
        if each[0].get("error"):
            cells.append([variant, each[0]["error"]])
            continue
        largest = max(each, key=lambda row: row["peak"])
        states = [row["state"] for row in each]
        together = sum(largest[kind] for kind in KINDS)
        sizes = [*(largest[kind] for kind in KINDS), together, largest["between"], largest["peak"]]
        kinds = [f"{bytes_ / MB:.1f}" for bytes_ in sizes]
        imbalance = max(states) * len(states) / sum(states) if sum(states) else 1.0
        cells.append([variant, *kinds, f"{largest['resident'] / MB:.0f}", f"{imbalance:.3f}"])
    return cells


SIZE_COLUMNS = ("variant", "parameters", "between steps MB", "% of the model", "at the peak MB", "% of the model")


def size_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Return cells for each variant and model size: memory other than parameters, gradients and state."""
    found: dict[tuple[str, int], Row] = {}
    for row in select(rows, "size"):
        if row.get("error"):
            continue
        key = (row["variant"], sum(elements_of(row["sizes"])))
        if key not in found or row["peak"] > found[key]["peak"]:
            found[key] = row
    cells = []
    for (variant, count), row in found.items():
        needed = sum(row[kind] for kind in ("parameters", "gradients", "state"))
        lasting, peak = row["between"] - needed, row["peak"] - needed
        shares = [
            f"{each / MB:.1f}" if unit == "MB" else f"{100 * each / (4 * count):.1f}"
            for each in (lasting, peak)
            for unit in ("MB", "%")
        ]
        cells.append([variant, f"{count:,}", *shares])
    return cells


SAVING_COLUMNS = ("variant", "gather the state", "save")


def save_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Return cells for each variant: the seconds to gather the state, and to save."""
    cells = []
    for row in select(rows, "save"):
        if row["error"]:
            cells.append([row["variant"], row["error"]])
            continue
        parts = [f"{row[part]:.2f}" if part in row else "" for part in ("consolidate", "save")]
        cells.append([row["variant"], *parts])
    return cells


def host_time_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Return cells for each variant: for each model ms of ``step()``, and in brackets ms beside AdamW's own."""
    cells: dict[str, dict[str, str]] = {}
    for row in (row for row in rows if row["kind"] in ("alone", "overhead") and "tensors" in row):
        beside = "" if row["kind"] == "alone" else f" ({1e3 * row['seconds']:.2f})"
        cells.setdefault(row["variant"], {})[row["model"]] = f"{1e3 * row['whole']:.2f}{beside}"
    models = host_time_models(rows)
    return [[variant, *(found.get(model, "") for model in models)] for variant, found in cells.items()]


def host_time_columns(rows: Sequence[Row]) -> list[str]:
    """Return the headings for ``host_time_rows``."""
    return ["variant", *(f"{model}, {tensors} tensors" for model, tensors in host_time_models(rows).items())]


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print all tables for which there are rows."""
    for run in runs_in(rows):
        console.print(_table(title_of(run), TIME_COLUMNS, [time_cells(each) for each in summaries(rows, run)]))
        console.print(f"lower bound from primitives: {1e3 * bound(rows, run):.1f} ms")
        model = [
            [each["variant"], f"{1e3 * each['measured']:.1f}", f"{1e3 * each['predicted']:.1f}", f"{each['off']:.2f}"]
            for each in predictions(rows, run)
        ]
        console.print(_table("time model", ("variant", "measured ms", "predicted ms", "ratio"), model))
    for ranks in sorted({row["ranks"] for row in rows if row["kind"] == "memory"}):
        console.print(_table(f"MB on the largest of {ranks} ranks", MEMORY_COLUMNS, memory_rows(rows, ranks)))
    if select(rows, "size"):
        console.print(_table("memory beside parameters, gradients and state", SIZE_COLUMNS, size_rows(rows)))
    if select(rows, "save"):
        console.print(_table("seconds", SAVING_COLUMNS, save_rows(rows)))
    columns = ("policy", "parameters", "ranks", "seconds")
    planning = [[_number(row[column]) for column in columns] for row in select(rows, "planning")]
    if planning:
        console.print(_table("planning", columns, planning))
    if host_time_models(rows):
        title = "ms of processor time in step() (beside AdamW's own)"
        console.print(_table(title, host_time_columns(rows), host_time_rows(rows)))


def _number(value: Any) -> str:
    """Return the text of a cell."""
    return f"{value:.5f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _table(title: str, columns: Sequence[str], cells: Iterable[Sequence[str]]) -> Table:
    """Return a table for the terminal."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("variant", "policy") else "right")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *(list(row) + [""] * (len(columns) - len(row)) for row in cells)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
