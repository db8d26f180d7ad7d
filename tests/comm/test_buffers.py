"""The pool of buffers, the messages for many memory ranges, and messages in flight."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from onecopy.comm.buffers import BufferPool, receive_ranges, send_ranges
from onecopy.comm.limits import DIRECT_BYTES, MESSAGE_BYTES, PACKS_IN_FLIGHT
from onecopy.comm.work import InFlight

CPU = torch.device("cpu")


def test_the_same_memory_is_given_out_again_in_any_order_and_type() -> None:
    pool = BufferPool()
    sizes = (1000, 10, 400_000, 30, 1000)
    first = [pool.take(size, torch.float32, CPU) for size in sizes]
    assert len({tensor.data_ptr() for tensor in first}) == len(sizes)
    pool.give_back(*first, torch.zeros(100))  # a foreign tensor is ignored
    second = [pool.take(2 * size, torch.bfloat16, CPU) for size in reversed(sizes)]
    assert {each.data_ptr() for each in second} == {each.data_ptr() for each in first}, "small ones take small ones"
    assert [tensor.numel() for tensor in second] == [2 * size for size in reversed(sizes)]
    assert pool.take(0, torch.float32, CPU).numel() == 0


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


def test_a_stream_arrives_as_it_was_sent() -> None:
    sizes = [0, 7, DIRECT_BYTES, 1, *[DIRECT_BYTES - 1] * 9, 3, MESSAGE_BYTES + 5, 0, 2]
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    wire: list[Tensor] = []

    def send(buffer: Tensor) -> Transfer:
        wire.append(buffer.clone())
        return Transfer([], 0)

    def receive(buffer: Tensor) -> Transfer:
        buffer.copy_(wire.pop(0))
        return Transfer([], 0)

    send_ranges(pieces, send, CPU)
    assert len(wire) < len(sizes), "small ones are packed"
    assert max(map(len, wire)) == MESSAGE_BYTES
    received = [torch.zeros_like(piece) for piece in pieces]
    receive_ranges(received, receive, CPU)
    assert not wire
    assert all(map(torch.equal, received, pieces))
