"""Buffers: a pool of reused ones, and many memory ranges as few messages.

Large ranges are sent in place, and small ones are packed. Sender and receiver compute the same messages from the sizes
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.streams import current_stream, wait_for_stream
from onecopy.comm.work import InFlight, Work


@dataclass(slots=True)
class _Memory:
    """Memory of the pool."""

    memory: Tensor  # the bytes
    allocated_on: torch.Stream | None  # the stream on which the memory was allocated; None on the CPU
    used_on: torch.Stream | None  # the stream on which its last user has waited for the end of its use


class BufferPool:
    """Gives out flat buffers and takes them back: fresh pages cost as much as the copies into them.

    It keeps little more memory than was in use at one time.

    On an accelerator, the stream that takes a buffer waits for the stream that gave it back.
    """

    def __init__(self) -> None:
        self._free: list[_Memory] = []
        self._in_use: dict[int, _Memory] = {}  # by address
        self._most_in_use = 0  # bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer with undefined contents."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device=device)
        # A much larger buffer is left for a larger request.
        fitting = [
            (each.memory.numel(), position)
            for position, each in enumerate(self._free)
            if nbytes <= each.memory.numel() <= 2 * nbytes and each.memory.device == device
        ]
        chosen = self._free.pop(min(fitting)[1]) if fitting else self._allocate(nbytes, device)
        wait_for_stream(current_stream(device), chosen.used_on)
        flat = chosen.memory[:nbytes].view(dtype)
        self._in_use[flat.data_ptr()] = chosen
        return flat

    def _allocate(self, nbytes: int, device: torch.device) -> _Memory:
        in_use = sum(each.memory.numel() for each in self._in_use.values()) + nbytes
        self._most_in_use = max(self._most_in_use, in_use)
        # An eighth more is kept: otherwise a few bytes too many would free the largest buffer.
        while self._free and in_use + sum(each.memory.numel() for each in self._free) > self._most_in_use * 9 // 8:
            freed = self._free.pop(0)
            wait_for_stream(freed.allocated_on, freed.used_on)  # torch reuses it on the stream of its allocation
        # On the CPU, zeros would cost as much as the copies into the buffer. Elsewhere they do not, and padding that a
        # collective sends is defined.
        make = torch.empty if device.type == "cpu" else torch.zeros
        stream = current_stream(device)
        return _Memory(make(nbytes, dtype=torch.uint8, device=device), stream, stream)

    def give_back(self, *buffers: Tensor) -> None:
        """Make buffers from :meth:`take` available again; other tensors are ignored."""
        for buffer in buffers:
            memory = self._in_use.pop(buffer.data_ptr(), None)
            if memory is not None:
                memory.used_on = current_stream(buffer.device)
                self._free.append(memory)


@dataclass(frozen=True, slots=True)
class Message:
    """Ranges, by position, that are sent together. A message that is not packed is ``[start, stop)`` of one range."""

    ranges: tuple[int, ...]
    packed: bool
    start: int
    stop: int


def plan_messages(sizes: Sequence[int], direct_bytes: int | None = None) -> list[Message]:
    """Divide ranges of ``sizes`` bytes into messages, in order; empty ranges are in none.

    Ranges from ``direct_bytes`` on (default: ``limits.DIRECT_BYTES``) are sent in place.
    """
    direct_bytes = limits.DIRECT_BYTES if direct_bytes is None else direct_bytes
    messages: list[Message] = []
    pack: list[int] = []
    packed_bytes = 0

    def close_pack() -> None:
        nonlocal packed_bytes
        if pack:
            messages.append(Message(tuple(pack), packed=True, start=0, stop=packed_bytes))
            pack.clear()
            packed_bytes = 0

    for position, size in enumerate(sizes):
        if size >= direct_bytes:
            messages.extend(
                Message((position,), False, start, min(start + limits.MESSAGE_BYTES, size))
                for start in range(0, size, limits.MESSAGE_BYTES)
            )
        elif size > 0:
            if packed_bytes + size > limits.PACK_BYTES:
                close_pack()
            pack.append(position)
            packed_bytes += size
    close_pack()
    return messages


def pack(buffer: Tensor, views: Sequence[Tensor], parts: Sequence[Tensor | None]) -> None:
    """Copy parts into the views of a flat buffer, which lie one behind the other; nothing reads a view of None."""
    if not buffer.numel():
        return
    if buffer.device.type == "cpu" and all(part is None or part.dtype == buffer.dtype for part in parts):
        # Many small copies on the CPU take several times as long as one concatenation.
        zero = buffer.new_zeros(1)
        both = zip(views, parts, strict=True)
        torch.cat([zero.expand(len(view)) if part is None else part for view, part in both], out=buffer)
        return
    copied = [(view, part) for view, part in zip(views, parts, strict=True) if part is not None]
    if copied:
        torch._foreach_copy_([view for view, _ in copied], [part for _, part in copied])


def send_ranges(ranges: Sequence[Tensor], start: Callable[[Tensor], Work], device: torch.device) -> None:
    """Send byte ranges, one message after the other; ranges on another device are copied to ``device`` first."""
    in_flight = InFlight()
    for message in plan_messages([each.numel() for each in ranges]):
        in_flight.leave(limits.PACKS_IN_FLIGHT)
        if message.packed:
            buffer = torch.cat([ranges[position].to(device) for position in message.ranges])
        else:
            buffer = ranges[message.ranges[0]][message.start : message.stop].to(device)
        staged = message.packed or ranges[message.ranges[0]].device != device
        in_flight.add(start(buffer), staged=staged)
    in_flight.drain()


def receive_ranges(ranges: Sequence[Tensor], start: Callable[[Tensor], Work], device: torch.device) -> None:
    """Receive the messages of :func:`send_ranges` into byte ranges, in place where possible."""
    in_flight = InFlight()
    for message in plan_messages([each.numel() for each in ranges]):
        targets = [ranges[position] for position in message.ranges]
        if not message.packed:
            targets = [targets[0][message.start : message.stop]]
        if not message.packed and targets[0].device == device:
            in_flight.add(start(targets[0]))
            continue
        in_flight.leave(limits.PACKS_IN_FLIGHT)
        buffer = torch.empty(message.stop - message.start, dtype=torch.uint8, device=device)
        in_flight.add(start(buffer), unpacker(buffer, targets), staged=True)
    in_flight.drain()


def unpacker(buffer: Tensor, targets: Sequence[Tensor]) -> Callable[[], None]:
    """A function that copies a packed buffer into the ranges it was packed from."""
    sources = list(buffer.split([target.numel() for target in targets]))
    return partial(torch._foreach_copy_, list(targets), sources)
