"""The tables of a run as text, as the results page shows them, and a JSON file that keeps them.

The rows of a run are large and are not in the repository. The tables are small, so they can be. The words of the page
can then change without a new run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from onecopy.bench.summaries import Row, bound, host_time_models, predictions, runs_in, select, summaries, title_of
from onecopy.bench.tables import (
    MEMORY_COLUMNS,
    SAVING_COLUMNS,
    SIZE_COLUMNS,
    TIME_COLUMNS,
    host_time_columns,
    host_time_rows,
    markdown,
    memory_rows,
    save_rows,
    size_rows,
    time_cells,
)

BETWEEN = " | "
"""What is between two cells of a row in the file, so that a row is one line."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text, with a title and a sentence below it."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown, without its title."""
        return markdown(self.columns, self.cells)

    def rows(self) -> Iterator[dict[str, str]]:
        """Yield each row by its columns, without the variants that have an error in place of figures."""
        for cells in self.cells:
            if len(cells) == len(self.columns):
                yield dict(zip(self.columns, cells, strict=True))


@dataclass(frozen=True, slots=True)
class ResultTables:
    """All tables of the results page. A part that was not measured has no table."""

    machine: str
    pictures: Sequence[str] = ()
    times: Sequence[Table] = field(default_factory=list)
    model: Sequence[Table] = field(default_factory=list)
    memory: Sequence[Table] = field(default_factory=list)
    sizes: Sequence[Table] = field(default_factory=list)
    saving: Sequence[Table] = field(default_factory=list)
    planning: Sequence[Table] = field(default_factory=list)
    host_time: Sequence[Table] = field(default_factory=list)


PARTS = tuple(each.name for each in fields(ResultTables) if each.name not in ("machine", "pictures"))


def write(results: ResultTables, path: Path) -> None:
    """Write the tables to a JSON file."""
    parts = {
        part: [
            {
                "title": table.title,
                "rows": [BETWEEN.join(row) for row in (table.columns, *table.cells)],
                "note": table.note,
            }
            for table in getattr(results, part)
        ]
        for part in PARTS
    }
    text = json.dumps({"machine": results.machine, "pictures": list(results.pictures)} | parts, indent=1)
    path.write_text(text + "\n")


def read(path: Path) -> ResultTables:
    """Read the tables from a JSON file."""
    found = json.loads(path.read_text())
    parts: dict[str, list[Table]] = {}
    for part in PARTS:
        parts[part] = []
        for table in found[part]:
            columns, *cells = (row.split(BETWEEN) for row in table["rows"])
            parts[part].append(Table(table["title"], columns, cells, table["note"]))
    return ResultTables(found["machine"], found["pictures"], **parts)


def from_rows(rows: Sequence[Row], machine: str, pictures: Sequence[Path]) -> ResultTables:
    """Make all tables for which a run has rows."""
    titles = [f"{ranks} ranks" for ranks in sorted({row["ranks"] for row in select(rows, "memory")})]
    return ResultTables(
        machine,
        [picture.name for picture in pictures],
        times=list(_times(rows)),
        model=list(_model(rows)),
        memory=[Table(title, MEMORY_COLUMNS, memory_rows(rows, int(title.split()[0]))) for title in titles],
        sizes=[Table("", SIZE_COLUMNS, size_rows(rows))] if select(rows, "size") else [],
        saving=[Table("", SAVING_COLUMNS, save_rows(rows))] if select(rows, "save") else [],
        planning=[_planning(rows)] if select(rows, "planning") else [],
        host_time=[Table("", host_time_columns(rows), host_time_rows(rows))] if host_time_models(rows) else [],
    )


def _times(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the table of step times of each run, with the lower bound below it."""
    for run in runs_in(rows):
        rounds = len(next(row for row in select(rows, "time", run) if row["seconds"])["seconds"])
        cells = [time_cells(each) for each in summaries(rows, run)]
        note = f"Lower bound: {1e3 * bound(rows, run):.1f} ms."
        yield Table(f"{title_of(run).capitalize()}, {rounds} rounds", TIME_COLUMNS, cells, note)


def _model(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield the table of predicted step times, if times were measured."""
    cells = [
        [
            title_of(run),
            each["variant"],
            f"{1e3 * each['measured']:.0f}",
            f"{1e3 * each['predicted']:.0f}",
            f"{each['off']:.2f}",
        ]
        for run in runs_in(rows)
        for each in predictions(rows, run)
    ]
    if cells:
        yield Table("", ("run", "variant", "measured ms", "predicted ms", "ratio"), cells)


def _planning(rows: Sequence[Row]) -> Table:
    """Return the table of planning times."""
    planning = select(rows, "planning")
    ranks = sorted({row["ranks"] for row in planning})
    seconds = {(row["policy"], row["parameters"], row["ranks"]): row["seconds"] for row in planning}
    cells = [
        [policy, f"{count:,}", *(_seconds(seconds.get((policy, count, number))) for number in ranks)]
        for policy, count in dict.fromkeys((row["policy"], row["parameters"]) for row in planning)
    ]
    columns = [f"{number:,} rank" + ("s" if number > 1 else "") for number in ranks]
    return Table("", ("policy", "parameters", *columns), cells)


def _seconds(value: float | None) -> str:
    return "not run" if value is None else f"{value:.4f}"
