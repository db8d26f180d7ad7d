"""The C++ part is compiled before the first test, and the processes with the simulated accelerator end with the run."""

from __future__ import annotations

import pathlib
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.accelerator import build
from tests.accelerator.harness import sim_pools
from tests.support.harness import EVERYTHING

HERE = pathlib.Path(__file__).parent
CASES = {"test_training.py": 16, "test_mutations.py": 4, "test_costs.py": 3, "test_failures.py": 4}
CASES["test_check_gpu.py"] = 0
"""The most cases of one test in ``make test``, by file (2 in others); ``make accelerator`` runs all."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with many cases, run a few at equal distances: the whole table takes minutes."""
    if EVERYTHING or config.getoption("keyword") or any("::" in argument for argument in config.args):
        return
    tables = defaultdict(list)
    for item in items:
        if HERE in item.path.parents:
            tables[item.nodeid.partition("[")[0]].append(item)
    left_out = []
    for table in tables.values():
        most = CASES.get(table[0].path.name, 2)
        kept = {(2 * number + 1) * len(table) // (2 * most) for number in range(most)}
        left_out += [item for position, item in enumerate(table) if len(table) > most and position not in kept]
    config.hook.pytest_deselected(items=left_out)
    unwanted = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in unwanted]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile where no test's limit of time runs: on a busy machine it can take minutes."""
    needed = any(HERE in item.path.parents for item in session.items)
    if needed and build.compiler() and not session.config.option.collectonly:
        build.library()


@pytest.fixture(scope="session", autouse=True)
def _end_simulating_processes() -> Iterator[None]:
    yield
    sim_pools.close()
