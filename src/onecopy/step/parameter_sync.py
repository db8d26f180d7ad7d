"""Share: after an update, every owner sends its updated parameters to all other ranks."""

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
    """One broadcast: of one memory range in place, or of several that are packed."""

    owner: int
    params: tuple[int, ...]
    memories: tuple[Tensor, ...]
    packed: bool
    nbytes: int


class PackBuffers:
    """Buffers for packed broadcasts, allocated once and used in turns. There is one more than may be in flight."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._turn: dict[torch.device, int] = {}

    def reserve(self, transfers: Sequence[_Transfer]) -> None:
        """Allocate buffers for these broadcasts, but no more than can be in use at one time."""
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
        """The buffer of the oldest broadcast. Broadcasts end in order, so it is free."""
        self._turn[device] = (self._turn.get(device, -1) + 1) % len(self._buffers[device])
        return self._buffers[device][self._turn[device]]

    @property
    def nbytes(self) -> int:
        """The memory of all buffers."""
        return sum(buffer.numel() for buffers in self._buffers.values() for buffer in buffers)


class ParameterSync:
    """The broadcasts that make all replicas equal, planned once for some memory ranges.

    The broadcasts of the owners alternate, so that all owners send at the same time. Everything is planned in the
    constructor: ``share`` makes a few calls per message and none per parameter.

    Args:
        collectives: the ranks.
        ranges: the memory that each owner sends.
        direct_bytes: memory ranges from this size on are sent in place.
        buffers: buffers for packed broadcasts that are shared with other instances.
    """

    def __init__(
        self,
        collectives: Collectives,
        ranges: Sequence[OwnedMemory],
        direct_bytes: int,
        buffers: PackBuffers | None = None,
    ) -> None:
        self._collectives = collectives
        queues: dict[tuple[int, torch.device], list[OwnedMemory]] = {}
        for each in ranges:
            queues.setdefault((each.owner, each.memory.device), []).append(each)
        planned = [_plan(queue, direct_bytes) for queue in queues.values()]
        self._transfers = [transfer for transfer in chain(*zip_longest(*planned)) if transfer is not None]
        self._buffers = PackBuffers() if buffers is None else buffers
        self._buffers.reserve(self._transfers)

    def share(self, changed: Sequence[bool] | None = None) -> None:
        """Send the parameters of all owners to all ranks; with ``changed``, only messages with a changed parameter."""
        self.start(changed).drain()

    def start(self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None) -> InFlight:
        """As :meth:`share`, but return the messages in flight, for the caller to wait for.

        Instances with the same buffers must add their messages to the same ``in_flight``.
        """
        in_flight = in_flight or InFlight()
        for transfer in self._transfers:
            if changed is not None and not any(changed[index] for index in transfer.params):
                continue
            first = transfer.memories[0]
            if not transfer.packed:
                in_flight.add(self._collectives.broadcast(first, transfer.owner), first, staged=False)
                continue
            buffer = self._buffers.next(first.device)[: transfer.nbytes]
            if transfer.owner == self._collectives.group_rank:
                torch.cat(transfer.memories, out=buffer)
                then = None
            else:
                # Unchanged parameters are received with the others, but not written: autograd may still need them.
                chosen = None if changed is None else [changed[index] for index in transfer.params]
                then = unpacker(buffer, transfer.memories, chosen)
            in_flight.add(self._collectives.broadcast(buffer, transfer.owner), buffer, True, then)
        return in_flight

    @property
    def messages(self) -> int:
        """The number of broadcasts of a full ``share``."""
        return len(self._transfers)

    @property
    def staging_bytes(self) -> int:
        """The extra memory for packed broadcasts."""
        return self._buffers.nbytes


def _plan(ranges: Sequence[OwnedMemory], direct_bytes: int) -> list[_Transfer]:
    """The broadcasts of one owner on one device."""
    transfers = []
    for message in plan_messages([each.memory.numel() for each in ranges], direct_bytes):
        members = [ranges[position] for position in message.ranges]
        params = tuple(chain.from_iterable(each.params for each in members))
        memories = tuple(each.memory for each in members)
        if not message.packed:
            memories = (memories[0][message.start : message.stop],)
        nbytes = message.stop - message.start
        transfers.append(_Transfer(members[0].owner, params, memories, message.packed, nbytes))
    return transfers
