"""The pool of buffers, the messages for many memory ranges, and messages in flight."""

from __future__ import annotations

import collections
import functools

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecopy.comm.buffers import BufferPool, plan_messages, receive_ranges, send_ranges
from onecopy.comm.limits import DIRECT_BYTES, MESSAGE_BYTES, PACK_BYTES, PACKS_IN_FLIGHT
from onecopy.comm.work import InFlight

CPU = torch.device("cpu")


def lend(pool: BufferPool, *sizes: int) -> list[torch.Tensor]:
    return [pool.take(size, torch.float32, CPU) for size in sizes]


def addresses(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def test_the_same_memory_is_given_out_again_in_any_order() -> None:
    pool = BufferPool()
    sizes = (1000, 10, 400_000, 30, 1000)
    first = lend(pool, *sizes)
    assert len(addresses(first)) == len(sizes)
    pool.give_back(*first)
    second = lend(pool, *reversed(sizes))
    assert addresses(second) == addresses(first), "small ones do not take what large ones need"
    assert [tensor.numel() for tensor in second] == list(reversed(sizes))


def test_other_types_fit_and_foreign_tensors_are_ignored() -> None:
    pool = BufferPool()
    (floats,) = lend(pool, 100)
    pool.give_back(floats, torch.zeros(100))
    halves = pool.take(200, torch.bfloat16, CPU)
    assert halves.data_ptr() == floats.data_ptr()
    assert halves.numel() == 200
    assert pool.take(0, torch.float32, CPU).numel() == 0


SIZES = st.one_of(
    st.sampled_from(
        [0, 1, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, PACK_BYTES, MESSAGE_BYTES, MESSAGE_BYTES + 1]
    ),
    st.integers(0, 3 * MESSAGE_BYTES),
    st.integers(0, DIRECT_BYTES),
)


@settings(max_examples=500)
@given(st.lists(SIZES, max_size=40), st.sampled_from([1, 64, DIRECT_BYTES]))
@example([DIRECT_BYTES - 1] * 20, DIRECT_BYTES)
@example([5, DIRECT_BYTES, 6], DIRECT_BYTES)
def test_messages_carry_every_byte_once_in_order_and_within_bounds(sizes: list[int], direct_bytes: int) -> None:
    messages = plan_messages(sizes, direct_bytes)
    sent: list[int] = [0] * len(sizes)
    for message in messages:
        if message.packed:
            assert message.ranges == tuple(sorted(message.ranges))
            assert (message.start, message.stop) == (0, sum(sizes[position] for position in message.ranges))
            assert 0 < message.stop <= PACK_BYTES
            for position in message.ranges:
                assert sent[position] == 0
                assert sizes[position] < direct_bytes
                sent[position] = sizes[position]
        else:
            (position,) = message.ranges
            assert sizes[position] >= direct_bytes
            assert message.start == sent[position], "parts follow each other"
            assert 0 < message.stop - message.start <= MESSAGE_BYTES
            sent[position] = message.stop
    assert sent == sizes
    for packed in (True, False):
        first = [message.ranges[0] for message in messages if message.packed is packed]
        assert first == sorted(first)


class Transfer:
    """Work that notes when it is waited for."""

    def __init__(self, waited: list[int], number: int) -> None:
        self.waited, self.number = waited, number

    def wait(self) -> None:
        self.waited.append(self.number)


def test_staged_buffers_in_flight_are_bounded_and_finish_in_order() -> None:
    waited: list[int] = []
    finished: list[int] = []
    flying = InFlight()
    for number in range(10):
        flying.leave(PACKS_IN_FLIGHT)
        assert number - len(waited) <= PACKS_IN_FLIGHT
        flying.add(Transfer(waited, number), functools.partial(finished.append, number), staged=True)
    flying.drain()
    assert waited == finished == list(range(10))


class Wire:
    """A channel within one process: messages are received in the order in which they were sent."""

    def __init__(self) -> None:
        self.messages: collections.deque[Tensor] = collections.deque()

    def send(self, buffer: Tensor) -> Transfer:
        self.messages.append(buffer.clone())
        return Transfer([], 0)

    def receive(self, buffer: Tensor) -> Transfer:
        buffer.copy_(self.messages.popleft())
        return Transfer([], 0)


def test_a_stream_arrives_as_it_was_sent() -> None:
    sizes = [0, 7, DIRECT_BYTES, 1, *[DIRECT_BYTES - 1] * 9, 3, 2 * DIRECT_BYTES + 5, 0]
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    wire = Wire()
    send_ranges(pieces, wire.send, CPU)
    assert len(wire.messages) == len(plan_messages(sizes)) < len(sizes)
    received = [torch.zeros_like(piece) for piece in pieces]
    receive_ranges(received, wire.receive, CPU)
    assert not wire.messages
    assert all(map(torch.equal, received, pieces))
