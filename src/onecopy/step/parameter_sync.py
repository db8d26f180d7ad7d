"""After an update: every owner's new values travel to all other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import InFlight, plan_messages, unpacker
from onecopy.step.parameter_storage import OwnedMemory


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One broadcast: of one piece of memory where it is, or of several, packed."""

    owner: int
    params: tuple[int, ...]
    memories: tuple[Tensor, ...]
    packed: bool
    nbytes: int


class Slots:
    """Buffers for packed transfers, made once and used in turns; one more than may be in flight, so one is free."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._turn: dict[torch.device, int] = {}

    def reserve(self, transfers: Sequence[_Transfer]) -> None:
        """Make room for these transfers beside those before them. No more slots are made than can be in use."""
        packed: dict[torch.device, list[int]] = {}
        for transfer in transfers:
            if transfer.packed:
                packed.setdefault(transfer.memories[0].device, []).append(transfer.nbytes)
        for device, sizes in packed.items():
            known = self._buffers.get(device, [])
            count = min(len(known) + len(sizes), limits.PACKS_IN_FLIGHT + 1)
            nbytes = max(max(sizes), *(buffer.numel() for buffer in known), 0)
            if len(known) < count or known[0].numel() < nbytes:
                self._buffers[device] = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]

    def next(self, device: torch.device) -> Tensor:
        """The buffer whose transfer is the oldest; transfers end in order, so it is free."""
        self._turn[device] = (self._turn.get(device, -1) + 1) % len(self._buffers[device])
        return self._buffers[device][self._turn[device]]

    @property
    def nbytes(self) -> int:
        """How much memory they are."""
        return sum(buffer.numel() for buffers in self._buffers.values() for buffer in buffers)


class ParameterSync:
    """The broadcasts that make all replicas equal, planned once for some pieces of memory.

    Owners take turns in the order of the transfers, so that all of them send at the same time. What a step needs is
    made here: ``share`` does a few calls per message and nothing per parameter.
    """

    def __init__(
        self, collectives: Collectives, pieces: Sequence[OwnedMemory], direct_bytes: int, slots: Slots | None = None
    ) -> None:
        self._collectives = collectives
        queues: dict[tuple[int, torch.device], list[OwnedMemory]] = {}
        for piece in pieces:
            queues.setdefault((piece.owner, piece.memory.device), []).append(piece)
        planned = [_plan(queue, direct_bytes) for queue in queues.values()]
        self._transfers = [transfer for transfer in chain(*zip_longest(*planned)) if transfer is not None]
        self._slots = Slots() if slots is None else slots
        self._slots.reserve(self._transfers)

    def share(self, touched: Sequence[bool] | None = None) -> None:
        """Send every owner's values to all; with ``touched``, only transfers that carry a touched parameter."""
        self.start(touched).drain()

    def start(self, touched: Sequence[bool] | None = None, flying: InFlight | None = None) -> InFlight:
        """As :meth:`share`, but leave the end of it to the caller, who drains what is returned.

        Several may be under way at once if they are added to one another's ``flying``, or do not share slots.
        """
        flying = flying or InFlight()
        for transfer in self._transfers:
            if touched is not None and not any(touched[index] for index in transfer.params):
                continue
            first = transfer.memories[0]
            if not transfer.packed:
                flying.add(self._collectives.broadcast(first, transfer.owner), first, staged=False)
                continue
            buffer = self._slots.next(first.device)[: transfer.nbytes]
            if transfer.owner == self._collectives.group_rank:
                torch.cat(transfer.memories, out=buffer)
                then = None
            else:
                # Untouched members are sent with the others but not written: autograd may still need them.
                chosen = None if touched is None else [touched[index] for index in transfer.params]
                then = unpacker(buffer, transfer.memories, chosen)
            flying.add(self._collectives.broadcast(buffer, transfer.owner), buffer, True, then)
        return flying

    @property
    def messages(self) -> int:
        """How many broadcasts a full ``share`` starts."""
        return len(self._transfers)

    @property
    def staging_bytes(self) -> int:
        """The extra memory that packed transfers use."""
        return self._slots.nbytes


def _plan(pieces: Sequence[OwnedMemory], direct_bytes: int) -> list[_Transfer]:
    """One owner's transfers on one device."""
    transfers = []
    for message in plan_messages([piece.memory.numel() for piece in pieces], direct_bytes):
        members = [pieces[position] for position in message.ranges]
        params = tuple(chain.from_iterable(piece.params for piece in members))
        memories = tuple(piece.memory for piece in members)
        if not message.packed:
            memories = (memories[0][message.start : message.stop],)
        nbytes = message.stop - message.start
        transfers.append(_Transfer(members[0].owner, params, memories, message.packed, nbytes))
    return transfers
