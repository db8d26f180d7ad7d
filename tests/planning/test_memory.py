"""The planned bytes of one rank by kind."""

from __future__ import annotations

from itertools import pairwise

import pytest

from onecopy.planning.collectives import Way, ddp_buckets
from onecopy.planning.memory import buffer_bytes, memory_bytes
from onecopy.planning.models import Model, specs_of
from tests.planning.table import gpt_xl

MIB = 1 << 20


@pytest.mark.parametrize(
    ("way", "splittable", "gradients", "state"),
    [
        (Way.DDP, True, 4e6, 8e6),
        (Way.LEVEL_1, True, 4e6, 2e6),
        (Way.LEVEL_2, True, 4e6, 2e6),
        (Way.LEVEL_3, True, 1e6, 2e6),
        (Way.LEVEL_1, False, 4e6, 0.6 * 8e6),
        (Way.LEVEL_3, False, 0.6 * 4e6, 0.6 * 8e6),
    ],
)
def test_memory_by_kind(way: Way, splittable: bool, gradients: float, state: float) -> None:
    """A model of 4 MB, of which one parameter is 60%, on 4 ranks."""
    model = Model(specs_of({"large": (600_000,), "small": (400_000,)}), splittable)
    found = memory_bytes(way, model, 4, 8, 4)
    assert (found["parameters"], found["gradients"]) == pytest.approx((4e6, gradients))
    assert (found["state"], found["master weights"]) == pytest.approx((state, state / 2))


def test_buffers_are_bounded() -> None:
    embedding = 50257 * 2048 * 2
    assert buffer_bytes(Way.LEVEL_3, gpt_xl(), 8) == embedding
    assert buffer_bytes(Way.LEVEL_3, gpt_xl(), 512) == 2 * 512 * MIB
    assert buffer_bytes(Way.LEVEL_1, gpt_xl(), 8) == 2 * 64 * MIB
    assert buffer_bytes(Way.DDP, gpt_xl(), 8) == 0


@pytest.mark.parametrize("ranks", [8, 512])
def test_level_2_also_has_a_copy_and_a_part_of_two_ddp_buckets(ranks: int) -> None:
    model = gpt_xl()
    sizes = [sum(model.specs[index].nbytes for index in bucket) for bucket in ddp_buckets(model.specs, model.order)]
    largest = max(one + other for one, other in pairwise(sizes))
    level_1, level_2 = (buffer_bytes(way, model, ranks) for way in (Way.LEVEL_1, Way.LEVEL_2))
    assert level_2 - level_1 == pytest.approx(largest * (1 + 1 / ranks))
