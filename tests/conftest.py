"""Shared set-up: which cases run, worker processes that end with the run, and a hypothesis that is repeatable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support import bf16_probe
from tests.support.covering import covering
from tests.support.harness import EVERYTHING, pools

PROCESSOR = bf16_probe.protect()
"""What the header says of this processor; set in the environment before the first test and the first worker."""

settings.register_profile("onecopy", deadline=None, derandomize=True)
settings.load_profile("onecopy")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that runs for every combination of some values, run enough for each value to occur.

    Not if cases were chosen on the command line, and not with ``make test-all``.
    """
    chosen = config.getoption("keyword") or config.getoption("lf", False) or any("::" in arg for arg in config.args)
    if EVERYTHING or chosen:
        return
    tables = defaultdict(list)
    for item in items:
        tables[item.nodeid.partition("[")[0]].append(item)
    kept = {id(item) for table in tables.values() for item in enough(table)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def enough(table: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test in which every value of every parameter occurs."""
    if not hasattr(table[0], "callspec"):
        return table
    # Values need not be hashable; the same object stands for a value in all cases.
    rows = [{name: id(value) for name, value in getattr(item, "callspec").params.items()} for item in table]  # noqa: B009
    return [table[position] for position in covering(rows)]


def pytest_report_header() -> list[str]:
    """Say which cases are run, and which setting this processor needs."""
    cases = "every case of every table" if EVERYTHING else "every value of every table, not every combination"
    return [cases, PROCESSOR] if PROCESSOR else [cases]


@pytest.fixture(scope="module")
def fresh_processes() -> None:
    """Processes in which no earlier test has left groups that only some of the ranks are in.

    With such groups torch cannot make one by its members alone.
    """
    pools.close()


@pytest.fixture(scope="session", autouse=True)
def _end_worker_processes() -> Iterator[None]:
    yield
    pools.close()
