"""Sizes that bound messages and buffers on the way between ranks, in bytes unless they say otherwise."""

from __future__ import annotations

from collections.abc import Sequence

# Sharing parameters, gathering state, Join.

DIRECT_BYTES = 1 << 20
"""Memory ranges from this size on are sent in place: a message of their own costs less than two copies."""

PACK_BYTES = 8 << 20
"""The largest buffer into which small memory ranges are packed."""

MESSAGE_BYTES = 64 << 20
"""Longer memory ranges are sent in parts of this size."""

PACKS_IN_FLIGHT = 4
"""Number of packed buffers that may be in flight; with their size this bounds the extra memory."""

# Messages between pairs of ranks.

CHUNK_BYTES = 4 << 20
"""A long broadcast between pairs is cut into parts of this size times the number of receivers.

Parts let both directions and all pairs make progress at once. The factor keeps the number of messages constant when
there are more ranks.
"""

REDUCE_MESSAGE_BYTES = 4 << 20
"""The most bytes of one message of a reduce-scatter: an owner adds one up while the next one arrives."""

TAGS = 1 << 16
"""Number of message tags that one user of a process group gets."""

TAG_BLOCKS = 1 << 14
"""Number of users of a process group before tags are used again."""

MESSAGE_TAG = TAG_BLOCKS * TAGS
"""The tag of other messages: not 0, the tag of messages that a user has in flight in the same group."""

VOTE_TAG = MESSAGE_TAG + 1
"""The tag of votes: ranks that are in different calls must not take them for other data."""

# Reducing gradients.

DIRECT_GRADIENT_BYTES = 1 << 18
"""Gradients from this size on are sent from autograd's own memory: a message costs less than a copy."""

DDP_BUCKETS_IN_FLIGHT = 2
"""Number of DDP's buckets that the reduce-scatter hook leaves in flight when another one comes."""

DDP_BUCKETS_WITH_TAGS = 1 << 12
"""Number of DDP's buckets in a backward pass whose messages have tags of their own."""

# ShardedDataParallel.

BUCKET_BYTES = 8 << 20
"""The default size from which a bucket is full, between pairs of ranks."""

# The backend's collectives.

COLLECTIVE_BUCKET_BYTES = 64 << 20
"""The size from which a bucket is full, and the most bytes of one all-gather, with few ranks."""

COLLECTIVE_BUCKET_BYTES_PER_RANK = 1 << 20
"""With many ranks a bucket has at least this size for each rank: a collective's latency grows with the ranks."""

MOST_COLLECTIVE_BUCKET_BYTES = 512 << 20
"""The size that a bucket reaches with very many ranks: buckets in flight are extra memory."""

SEGMENT_GROWTH = 3
"""A segment of ShardedDataParallel has up to this many times the bytes of all segments before it.

So few segments are enough, each of which is one step of the inner optimizer, and the first buckets, which the next
forward pass reads first, go alone.
"""

LARGEST_SEGMENTS = 3
"""With the backend's collectives a segment has at most one of this many parts of all bytes.

So the update of the last one hides behind others. Between pairs of ranks a segment has the size of a bucket.
"""

ROUNDS_IN_FLIGHT = 1
"""Number of packed all-gathers that may be in flight while the next one is packed."""

MOST_PADDING = 1 / 16
"""Parts of different lengths are padded to equal ones if the padding is at most this fraction of them."""

PADDING_BYTES_PER_RANK = 64 << 10
"""They are also padded if the padding is at most these bytes for each rank: one operation less costs more."""


def bucket_bytes(ranks: int, pairwise: bool) -> int:
    """The default size of a bucket, for messages between pairs of ranks or for the backend's collectives."""
    if pairwise:
        return BUCKET_BYTES
    growing = max(COLLECTIVE_BUCKET_BYTES, ranks * COLLECTIVE_BUCKET_BYTES_PER_RANK)
    return min(growing, MOST_COLLECTIVE_BUCKET_BYTES)


def padded(sizes: Sequence[int], itemsize: int) -> list[int]:
    """The lengths, in elements, of one part per rank: equal if padding adds little, else the sizes themselves."""
    longest = max(sizes)
    if allows_padding(longest * itemsize, sum(sizes) * itemsize, len(sizes)):
        return [longest] * len(sizes)
    return list(sizes)


def allows_padding(longest: int, total: int, ranks: int) -> bool:
    """Whether one part per rank, of ``total`` bytes in all, is padded to the longest part for one collective.

    Otherwise the parts are sent with their own lengths, by one operation for each: padding a layout that is uneven by
    design would multiply the traffic.
    """
    return longest * ranks - total <= max(MOST_PADDING * total, PADDING_BYTES_PER_RANK * (ranks - 1))
