"""A deleted model and optimizer are freed at once, at every level, and not by a later garbage collection."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.support.guards import OURS, Training
from tests.support.harness import distributed


@pytest.mark.parametrize("level", OURS)
@distributed(2)
def test_nothing_refers_to_a_deleted_model_and_optimizer(world_size: int, level: str) -> None:
    training = Training(level)
    training.iterate(0, 1, 2)
    training.zero.wait()
    references: dict[str, weakref.ref[object]] = {
        "optimizer": weakref.ref(training.zero),
        "engine": weakref.ref(training.zero.engine),
        "parameter": weakref.ref(training.param),
    }
    gc.collect()
    gc.disable()
    try:
        del training
        alive = [name for name, reference in references.items() if reference() is not None]
    finally:
        gc.enable()
    assert not alive
