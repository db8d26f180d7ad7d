"""The staging buffer of pairwise exchanges: message lengths and slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onecopy.comm.limits import (
    MAX_REDUCE_MESSAGE_BYTES,
    MIN_REDUCE_MESSAGE_BYTES,
    STAGED_BYTES,
)
from onecopy.comm.pairwise_exchange import (
    message_length,
    message_lengths,
    staging_slots,
)

# The room in which messages are received


@given(st.lists(st.integers(0, 300), max_size=60).map(tuple), st.integers(1, 2000))
def test_messages_that_are_not_used_yet_never_overlap(sizes: tuple[int, ...], room: int) -> None:
    found = staging_slots(sizes, room)
    assert len(found) == len(sizes)
    for number, (place, size) in enumerate(zip(found, sizes, strict=True)):
        assert place.offset + size <= max(room, 2 * max(sizes)), "it stays in the room"
        assert place.after < number, "nothing waits for itself or for what comes later"
        for earlier in range(place.after + 1, number):
            start = found[earlier].offset
            assert start + sizes[earlier] <= place.offset or place.offset + size <= start or size * sizes[earlier] == 0
    if sum(sizes) <= room:
        assert all(place.after == -1 for place in found), "everything has room at once"


@given(st.integers(1, 300), st.integers(1, 60))
def test_while_one_message_is_used_the_next_of_its_size_can_arrive(size: int, count: int) -> None:
    assert all(place.after < number - 1 for number, place in enumerate(staging_slots((size,) * count, 1)) if number)


@given(st.integers(1, 3000), st.sampled_from([1, 2, 4, 8, 16]))
def test_messages_of_all_ranks_fit_twice_into_the_room_but_are_never_too_short(ranks: int, itemsize: int) -> None:
    nbytes = message_length(ranks, itemsize) * itemsize
    assert MIN_REDUCE_MESSAGE_BYTES <= nbytes <= MAX_REDUCE_MESSAGE_BYTES
    assert 2 * (ranks - 1) * nbytes <= STAGED_BYTES or nbytes == MIN_REDUCE_MESSAGE_BYTES


@given(st.lists(st.integers(0, 5_000_000), max_size=5), st.integers(1, 20))
def test_stretches_are_cut_into_messages_in_order(sizes: list[int], ranks: int) -> None:
    lengths = message_lengths(sizes, ranks, 4)
    assert sum(lengths) == sum(sizes)
    assert all(0 < length <= message_length(ranks, 4) for length in lengths)
    for size in sizes:
        taken = 0
        while taken < size:
            taken += lengths.pop(0)
        assert taken == size
