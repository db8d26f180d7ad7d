"""The generated tables of docs/accelerators.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planning import table
from tests.support import paths

PAGE = paths.ROOT / "docs/accelerators.md"


def test_the_tables_of_the_page_are_the_generated_ones(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text())
    table.write(copy, "collectives", table.tables())
    assert copy.read_text() == PAGE.read_text(), f"run python -m tests.planning.table {PAGE}"
    copy.write_text(f"text {table.BEGIN.format('name')}")
    with pytest.raises(ValueError, match="has no lines"):
        table.write(copy, "name", "text")
    assert copy.read_text() == f"text {table.BEGIN.format('name')}"
