"""The C++ part is compiled before the first test, and the processes with the simulated accelerator end with the run."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.accelerator import build
from tests.accelerator.harness import sim_pools


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile where no test's limit of time runs: on a busy machine it can take minutes."""
    needed = any(pathlib.Path(__file__).parent in item.path.parents for item in session.items)
    if needed and build.compiler() and not session.config.option.collectonly:
        build.library()


@pytest.fixture(scope="session", autouse=True)
def _end_simulating_processes() -> Iterator[None]:
    yield
    sim_pools.close()
