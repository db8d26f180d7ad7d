"""Shared set-up: which cases run, worker processes that end with the run, and a hypothesis that is repeatable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import settings

from onecopy.bench import processor
from tests.support.harness import EVERYTHING, pools

PROCESSOR = processor.protect()
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
    kept = {id(item) for table in tables.values() for item in covering(table)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def covering(table: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases in which every value of every parameter occurs: first those that have only new values, then the rest."""
    if len(table) == 1 or not hasattr(table[0], "callspec"):
        yield from table
        return
    rows = [getattr(item, "callspec").params for item in table]  # noqa: B009 - typed as an item of any kind
    varying = [name for name in rows[0] if len({id(row[name]) for row in rows}) > 1]
    seen: set[tuple[str, int]] = set()
    for wanted in (all, any):
        for item, row in zip(table, rows, strict=True):
            values = [(name, id(row[name])) for name in varying]
            if wanted(value not in seen for value in values):
                yield item
                seen.update(values)


def pytest_report_header() -> list[str]:
    """Say what was left out, and what this processor needs."""
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
