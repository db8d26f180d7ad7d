"""Processes with a background service that end in every way: none of them may hang or abort."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.rows import Row
from tests.support.process_ends import WAYS, end_all


def rows(count: int, seed: int) -> Iterator[Row]:
    """Yield a row for each way to end."""
    for name in WAYS:
        ended, seconds, problems = end_all(max(2, count // 8), [(scheme, name) for scheme in ("tcp", "file")])
        yield Row(f"process ends: {name}", ended, ended - len(problems), seconds, "", problems)
