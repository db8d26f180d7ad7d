"""How ``ShardedDataParallel`` divides its buckets into segments that are updated and sent together."""

from __future__ import annotations

import pytest

from onecopy.data_parallel.step import divide_into_segments

MB = 1 << 20


def bucket_sizes(total: int, bucket: int) -> list[int]:
    """Sizes as plans have them: full buckets, and at the end ever smaller ones."""
    sizes: list[int] = []
    while total > 0:
        sizes.append(max(1 * MB, min(bucket, total // 2)))
        total -= sizes[-1]
    return sizes


@pytest.mark.parametrize("bucket_bytes", [8 * MB, 64 * MB, 512 * MB])
@pytest.mark.parametrize("total", [20 * MB, 500 * MB, 2600 * MB, 140_000 * MB])
def test_there_are_few_segments_and_the_first_is_small(total: int, bucket_bytes: int) -> None:
    sizes = bucket_sizes(total, bucket_bytes)
    segments = divide_into_segments(sizes, bucket_bytes)
    assert [number for segment in segments for number in segment] == list(reversed(range(len(sizes))))
    assert len(segments) <= 20
    assert [sizes[number] for number in segments[0]] == [1 * MB], "the next forward pass reads it first"
    largest = max(sum(sizes[number] for number in segment) for segment in segments)
    assert largest <= max(bucket_bytes, total // 8) + bucket_bytes
