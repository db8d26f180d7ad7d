"""Sharing: the parts of the owners' memory in a round, and equal parameters on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.sharing import OwnedMemory, Sharing
from onecopy.common.flat_views import as_bytes
from tests.support.harness import distributed

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
