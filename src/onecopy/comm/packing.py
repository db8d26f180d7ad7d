"""Many pieces of memory as few messages: large pieces travel in place, small ones packed together.

Used for sharing parameters, handing gradients over and gathering state. Both sides compute the same messages from the
pieces' sizes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from onecopy.comm.collectives import Work

DIRECT_BYTES = 1 << 20
"""Pieces from this size on are sent from where they are: a message of their own costs less than two copies."""

PACK_BYTES = 8 << 20
"""The largest buffer into which small pieces are packed."""

MESSAGE_BYTES = 64 << 20
"""Longer pieces are sent in parts of this size."""

PACKS_IN_FLIGHT = 4
"""Packed buffers that may be under way at once; with their size this bounds the extra memory."""


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces (by position) that travel together; a direct one is the range ``[start, stop)`` of its only piece."""

    pieces: tuple[int, ...]
    packed: bool
    start: int
    stop: int


def plan_messages(sizes: Sequence[int], direct_bytes: int = DIRECT_BYTES) -> list[Message]:
    """Divide pieces of ``sizes`` bytes into messages, in order; empty pieces travel with none."""
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
                Message((position,), False, start, min(start + MESSAGE_BYTES, size))
                for start in range(0, size, MESSAGE_BYTES)
            )
        elif size > 0:
            if packed_bytes + size > PACK_BYTES:
                close_pack()
            pack.append(position)
            packed_bytes += size
    close_pack()
    return messages


class InFlight:
    """Messages under way, ended in the order they were started; at most ``PACKS_IN_FLIGHT`` staged ones at a time."""

    def __init__(self) -> None:
        # Each entry keeps its buffer alive until the transfer that reads or writes it has ended.
        self._entries: deque[tuple[Work, Tensor, bool, Callable[[], None] | None]] = deque()
        self._staged = 0

    def add(self, work: Work, buffer: Tensor, staged: bool, then: Callable[[], None] | None = None) -> None:
        """Note a transfer over ``buffer`` (``staged`` if that is extra memory); ``then`` runs when it has ended."""
        self._entries.append((work, buffer, staged, then))
        self._staged += staged
        while self._staged > PACKS_IN_FLIGHT:
            self._finish_oldest()

    def drain(self) -> None:
        """Wait for everything."""
        while self._entries:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _, staged, then = self._entries.popleft()
        work.wait()
        if then is not None:
            then()
        self._staged -= staged


def send_stream(pieces: Sequence[Tensor], start: Callable[[Tensor], Work], device: torch.device) -> None:
    """Send byte views one after the other; what is elsewhere than ``device`` goes through it message by message."""
    flying = InFlight()
    for message in plan_messages([piece.numel() for piece in pieces]):
        if message.packed:
            buffer = torch.cat([pieces[position].to(device) for position in message.pieces])
        else:
            buffer = pieces[message.pieces[0]][message.start : message.stop].to(device)
        staged = message.packed or pieces[message.pieces[0]].device != device
        flying.add(start(buffer), buffer, staged)
    flying.drain()


def receive_stream(pieces: Sequence[Tensor], start: Callable[[Tensor], Work], device: torch.device) -> None:
    """Receive into byte views what :func:`send_stream` sends, in place where that is possible."""
    flying = InFlight()
    sizes = [piece.numel() for piece in pieces]
    for message in plan_messages(sizes):
        targets = [pieces[position] for position in message.pieces]
        if not message.packed:
            targets = [targets[0][message.start : message.stop]]
        if not message.packed and targets[0].device == device:
            flying.add(start(targets[0]), targets[0], staged=False)
            continue
        buffer = torch.empty(message.stop - message.start, dtype=torch.uint8, device=device)
        flying.add(start(buffer), buffer, True, unpacker(buffer, targets))
    flying.drain()


def unpacker(buffer: Tensor, targets: Sequence[Tensor], chosen: Sequence[bool] | None = None) -> Callable[[], None]:
    """What copies a packed buffer into the pieces it was packed from, or into some of them."""
    destinations = list(targets)
    sources = list(buffer.split([target.numel() for target in destinations]))
    if chosen is not None:
        destinations, sources = list(compress(destinations, chosen)), list(compress(sources, chosen))
    return lambda: torch._foreach_copy_(destinations, sources)
