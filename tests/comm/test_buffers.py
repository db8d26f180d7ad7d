"""The messages for many memory ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from onecopy.comm.buffers import receive_ranges, send_ranges
from onecopy.comm.limits import DIRECT_BYTES, MESSAGE_BYTES

CPU = torch.device("cpu")


class Transfer:
    """Work that is done."""

    def wait(self) -> None:
        pass


def test_a_stream_arrives_as_it_was_sent() -> None:
    sizes = [0, 7, DIRECT_BYTES, 1, *[DIRECT_BYTES - 1] * 9, 3, MESSAGE_BYTES + 5, 0, 2]
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    wire: list[Tensor] = []

    def send(buffer: Tensor) -> Transfer:
        wire.append(buffer.clone())
        return Transfer()

    def receive(buffer: Tensor) -> Transfer:
        buffer.copy_(wire.pop(0))
        return Transfer()

    send_ranges(pieces, send, CPU)
    assert len(wire) < len(sizes), "small ones are packed"
    assert max(map(len, wire)) == MESSAGE_BYTES
    received = [torch.zeros_like(piece) for piece in pieces]
    receive_ranges(received, receive, CPU)
    assert not wire
    assert all(map(torch.equal, received, pieces))
