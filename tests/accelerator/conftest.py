"""The processes with the simulated accelerator end with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator.harness import sim_pools


@pytest.fixture(scope="session", autouse=True)
def _end_simulating_processes() -> Iterator[None]:
    yield
    sim_pools.close()
