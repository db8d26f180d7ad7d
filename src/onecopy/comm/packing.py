"""Many memory ranges as few messages: large ranges are sent in place, small ones are packed into buffers.

Used to share parameters and module state, to hand over gradients and to gather optimizer state. Sender and receiver
compute the same messages from the sizes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.work import Work


@dataclass(frozen=True, slots=True)
class Message:
    """Ranges, by position, that are sent together. A message that is not packed is ``[start, stop)`` of one range."""

    ranges: tuple[int, ...]
    packed: bool
    start: int
    stop: int


def plan_messages(sizes: Sequence[int], direct_bytes: int | None = None) -> list[Message]:
    """Divide ranges of ``sizes`` bytes into messages, in order; empty ranges are in none.

    Args:
        sizes: the size of each range.
        direct_bytes: ranges from this size on are sent in place (default: ``limits.DIRECT_BYTES``).
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


class InFlight:
    """Messages in flight, waited for in the order they were started.

    Few of them use extra memory at one time.
    """

    def __init__(self) -> None:
        # An entry refers to its memory, so that it lives until the message has been waited for.
        self._entries: deque[tuple[Work, Tensor | None, Callable[[], None] | None, bool]] = deque()
        self._staged = 0

    def add(
        self,
        work: Work,
        memory: Tensor | None = None,
        then: Callable[[], None] | None = None,
        staged: bool = False,
    ) -> None:
        """Add a message in flight.

        Args:
            work: the message.
            memory: memory that must live until the message has ended.
            then: a function that is called when the message has ended.
            staged: whether the memory is extra memory.
        """
        self._entries.append((work, memory, then, staged))
        self._staged += staged

    def leave(self, most_staged: int) -> None:
        """Wait for the oldest messages until no more than ``most_staged`` use extra memory."""
        while self._staged > most_staged:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait for all messages."""
        while self._entries:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _, then, staged = self._entries.popleft()
        work.wait()
        if then is not None:
            then()
        self._staged -= staged


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
        in_flight.add(start(buffer), buffer, staged=staged)
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
        in_flight.add(start(buffer), buffer, unpacker(buffer, targets), staged=True)
    in_flight.drain()


def unpacker(buffer: Tensor, targets: Sequence[Tensor]) -> Callable[[], None]:
    """A function that copies a packed buffer into the ranges it was packed from."""
    sources = list(buffer.split([target.numel() for target in targets]))
    return partial(torch._foreach_copy_, list(targets), sources)
