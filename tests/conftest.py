"""Shared set-up: the worker processes end with the run, and hypothesis is repeatable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from harness import pools

settings.register_profile("onecopy", deadline=None, derandomize=True)
settings.load_profile("onecopy")


@pytest.fixture(scope="session", autouse=True)
def _end_worker_processes() -> Iterator[None]:
    yield
    pools.close()
