"""How ``ShardedDataParallel`` divides its buckets into segments that are updated and sent together."""

from __future__ import annotations

from unittest import mock

import pytest

from onecopy.comm.transports import CollectiveTransport, PairwiseTransport
from onecopy.data_parallel.step import divide_into_segments

MB = 1 << 20


def bucket_sizes(total: int, bucket: int) -> list[int]:
    """Sizes as plans have them: full buckets, and at the end ever smaller ones."""
    sizes: list[int] = []
    while total > 0:
        sizes.append(max(1 * MB, min(bucket, total // 2)))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("ranks", [2, 64, 512])
@pytest.mark.parametrize("total", [20 * MB, 500 * MB, 2600 * MB, 140_000 * MB])
def test_with_collectives_there_is_a_handful_of_segments_and_the_first_is_small(total: int, ranks: int) -> None:
    transport = CollectiveTransport(mock.Mock(world_size=ranks))
    sizes = bucket_sizes(total, transport.bucket_bytes)
    segments = divide_into_segments(sizes, transport)
    assert [number for segment in segments for number in segment] == list(reversed(range(len(sizes))))
    assert len(segments) <= 10
    assert [sizes[number] for number in segments[0]] == [1 * MB], "the next forward pass reads it first"
    largest = max(sum(sizes[number] for number in segment) for segment in segments)
    assert largest <= max(transport.bucket_bytes, total // 3) + transport.bucket_bytes


def test_between_pairs_of_ranks_segments_are_as_large_as_buckets() -> None:
    transport = PairwiseTransport(mock.Mock(world_size=2))
    sizes = bucket_sizes(100 * MB, transport.bucket_bytes)
    segments = divide_into_segments(sizes, transport)
    assert [number for segment in segments for number in segment] == list(reversed(range(len(sizes))))
    assert max(sum(sizes[number] for number in segment) for segment in segments) <= 2 * transport.bucket_bytes
