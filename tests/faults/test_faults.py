"""The table of faults: its text, its exit code, and the page that is made from the recorded results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults import page
from tests.faults.__main__ import PARTS, main
from tests.faults.rows import Results, Row, table

GOOD = Row("a fault", 10, 10, 1.26, "a note")
BAD = Row("another fault", 10, 9, 0.5, "", ["rank 1 hangs"])


def test_the_page_has_the_recorded_results_of_every_part_each_in_one_line() -> None:
    recorded = Results.read(page.RECORDED)
    assert page.block_of(page.PAGE.read_text()) == page.text_of(recorded)
    assert set(recorded.parts) == set(PARTS)
    assert [row for row in recorded.rows if not row.is_right] == []
    shown = [page.rows_of(line, recorded) for line in page.LINES]
    assert all(shown)
    assert sorted(row.fault for rows in shown for row in rows) == sorted(row.fault for row in recorded.rows)


def test_a_row_with_a_failure_is_marked_and_fails_the_run() -> None:
    text = table([GOOD, BAD]).splitlines()
    assert text[1].split() == ["a", "fault", "10", "10", "1.3", "s", "a", "note"]
    assert text[2].split() == ["another", "fault", "10", "9", "0.5", "s", "FAILED"]
    assert text[3] == "another fault: rank 1 hangs"
    assert Results(1, 0, "", {"part": [GOOD]}).is_right
    assert not Results(1, 0, "", {"part": [GOOD, BAD]}).is_right
    assert not Results(1, 0, "").is_right


def test_results_are_written_and_read(tmp_path: Path) -> None:
    results = Results(3, 4, "2.13.0", {"part": [GOOD, BAD]}, {"part": 5.0})
    results.write(tmp_path / "out")
    assert Results.read(tmp_path / "out") == results


@pytest.mark.parametrize("arguments", [["0"], ["1", "--only", "nothing"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["faults", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "some of restarts, saves" in capsys.readouterr().err
