"""Rows of the table of faults, as text and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SHOWN = 10
"""How many problems of a row are printed."""


@dataclass(frozen=True)
class Row:
    """A fault that was tried some times."""

    fault: str  # its name
    tried: int  # how often
    survived: int  # how often everything was as it should be
    seconds: float  # the longest time to the error, or to the end if there must be no error
    note: str = ""  # what else is to be said
    problems: list[str] = field(default_factory=list)  # everything that was not as it should be

    @property
    def is_right(self) -> bool:
        """Whether the fault has never done damage."""
        return self.survived == self.tried and not self.problems


@dataclass
class Results:
    """What one run of the table has found."""

    count: int  # the argument of ``make faults``
    seed: int  # of the run
    torch: str  # the version of torch
    parts: dict[str, list[Row]] = field(default_factory=dict)  # the rows of each part
    seconds: dict[str, float] = field(default_factory=dict)  # how long each part took

    @property
    def rows(self) -> list[Row]:
        """The rows of all parts."""
        return [row for rows in self.parts.values() for row in rows]

    @property
    def is_right(self) -> bool:
        """Whether no row has a failure, and there are rows."""
        return bool(self.rows) and all(row.is_right for row in self.rows)

    def write(self, path: Path) -> None:
        """Write the results to a file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the results from a file."""
        content: dict[str, Any] = json.loads(path.read_text())
        parts = {part: [Row(**row) for row in rows] for part, rows in content.pop("parts").items()}
        return cls(parts=parts, **content)


def line(fault: str, tried: object, survived: object, seconds: str, note: str) -> str:
    """Cells in columns."""
    return f"{fault:<50}  {tried:>6}  {survived:>8}  {seconds:>10}  {note}".rstrip()


def text_of(row: Row) -> str:
    """A row as text, and its problems below."""
    seconds = f"{row.seconds:.1f} s" if row.tried else ""
    note = row.note if row.is_right else f"FAILED {row.note}"
    problems = [f"{row.fault}: {problem}" for problem in row.problems[:SHOWN]]
    return "\n".join([line(row.fault, row.tried, row.survived, seconds, note), *problems])


def table(rows: Iterable[Row]) -> str:
    """All rows as text."""
    return "\n".join([line("fault", "tried", "survived", "worst time", ""), *map(text_of, rows)])
