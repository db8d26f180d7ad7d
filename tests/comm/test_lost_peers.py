"""A rank that is lost in a call: the error of every other rank names the call, this rank and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import EVERYTHING
from tests.support.lost_peers import WAYS, problems


@pytest.mark.parametrize("world_size", [2, 3] if EVERYTHING else [2])
@pytest.mark.parametrize("way", WAYS if EVERYTHING else WAYS[:1])
def test_the_errors_of_the_other_ranks(tmp_path: Path, way: str, world_size: int) -> None:
    assert problems(world_size, way, str(tmp_path)) == []
