"""Sharing: the parts of the owners' memory in a round, and equal parameters on all ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.sharing import OwnedMemory, Sharing
from onecopy.common.flat_views import as_bytes
from tests.support.harness import distributed


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8).filter(any))
@example([100, 100, 0])
@example([100, 99])
def test_parts_are_padded_only_where_that_adds_little(sizes: list[int]) -> None:
    with mock.patch.object(limits, "PADDING_BYTES_PER_RANK", 40):
        lengths = limits.padded(sizes, 4)
    padding = max(sizes) * len(sizes) - sum(sizes)
    adds_little = 4 * padding <= max(limits.MOST_PADDING * 4 * sum(sizes), 40 * (len(sizes) - 1))
    assert lengths == ([max(sizes)] * len(sizes) if adds_little else sizes)


DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.int8, torch.complex128]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("direct_bytes", [1, 300, 1 << 20], ids=["in place", "some in place", "packed"])
@distributed(2, 3)
def test_all_ranks_end_with_the_owners_values(world_size: int, direct_bytes: int, uneven: bool) -> None:
    collectives = Collectives()
    params: list[Tensor] = []
    ranges: list[OwnedMemory] = []
    for number in range(4 * world_size):
        owner = 0 if uneven and number < 3 * world_size else number % world_size
        value = number if owner == collectives.group_rank else -1
        params.append(torch.full((50 + 13 * (number % 3),), value, dtype=DTYPES[number % len(DTYPES)]))
        ranges.append(OwnedMemory(owner, (number,), as_bytes(params[-1]), params[-1].element_size()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_BYTES", direct_bytes)
        patch.setattr(limits, "BUCKET_BYTES", 1024)
        sharing = Sharing(collectives, ranges)
    assert sharing.messages > 3, "several rounds, to use the buffers in turns"
    for factor in (1, 2):
        for each, param in zip(ranges, params, strict=True):
            if each.owner == collectives.group_rank:
                param.mul_(factor)
        sharing.start().drain()
        for number, param in enumerate(params):
            assert torch.equal(param, torch.full_like(param, number * factor)), (number, factor)


@pytest.mark.parametrize("direct_bytes", [1, 1 << 20], ids=["in place", "packed"])
@distributed(2)
def test_what_has_not_changed_is_not_written(world_size: int, direct_bytes: int) -> None:
    collectives = Collectives()
    params = [torch.full((64,), float(collectives.group_rank)) for _ in range(4)]
    ranges = [OwnedMemory(index % 2, (index,), as_bytes(param), 4) for index, param in enumerate(params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_BYTES", direct_bytes)
        sharing = Sharing(collectives, ranges)
    sharing.start([False, False, True, False]).drain()
    here = collectives.group_rank
    assert [param[0].item() for param in params] == [here, here, 0, here]
