"""How ``ShardedDataParallel`` divides its buckets into segments that are updated and sent together."""

from __future__ import annotations

import functools

import pytest
import torch

from onecopy.comm.collectives import Collectives
from onecopy.data_parallel.step import divide_into_segments

MB = 1 << 20
CPU = torch.device("cpu")


def bucket_sizes(total: int, bucket: int) -> list[int]:
    """Sizes as plans have them: full buckets, and at the end ever smaller ones."""
    sizes: list[int] = []
    while total > 0:
        sizes.append(max(1 * MB, min(bucket, total // 2)))
        total -= sizes[-1]
    return sizes


def collectives_of(in_place: bool, ranks: int) -> Collectives:
    """The ranks as far as sizes depend on them."""
    made = Collectives.__new__(Collectives)
    made.world_size, made._backends = ranks, {"cpu": "gloo" if in_place else "nccl"}
    return made


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranks", [2, 64, 512])
@pytest.mark.parametrize("total", [20 * MB, 500 * MB, 2600 * MB, 140_000 * MB])
def test_segments_grow_and_the_first_is_small(total: int, ranks: int, in_place: bool) -> None:
    collectives = collectives_of(in_place, ranks)
    bucket_bytes = collectives.bucket_bytes(CPU)
    sizes = bucket_sizes(total, bucket_bytes)
    segments = divide_into_segments(sizes, functools.partial(collectives.segment_bytes, CPU))
    assert [number for segment in segments for number in segment] == list(reversed(range(len(sizes))))
    assert [sizes[number] for number in segments[0]] == [1 * MB], "the next forward pass reads it first"
    largest = max(sum(sizes[number] for number in segment) for segment in segments)
    if in_place:
        assert largest <= 2 * bucket_bytes
    else:
        assert len(segments) <= 10
        assert largest <= max(bucket_bytes, total // 3) + bucket_bytes
