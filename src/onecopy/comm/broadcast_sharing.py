"""Sharing between pairs of ranks: every owner broadcasts its updated parameters, large ranges in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import InFlight, plan_messages, unpacker
from onecopy.comm.parameter_sharing import OwnedMemory, PackBuffers


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """One broadcast: of one memory range in place, or of several that are packed."""

    owner: int
    params: tuple[int, ...]
    memories: tuple[Tensor, ...]
    packed: bool
    nbytes: int


class BroadcastSharing:
    """The broadcasts that make all replicas equal.

    The broadcasts of the owners alternate, so that all owners send at the same time. Everything is planned in the
    constructor: ``start`` makes a few calls per message and none per parameter.

    Args:
        collectives: the ranks.
        ranges: the memory that each owner sends.
        direct_bytes: memory ranges from this size on are sent in place.
        buffers: buffers for packed broadcasts, which may be shared with other instances.
    """

    def __init__(
        self, collectives: Collectives, ranges: Sequence[OwnedMemory], direct_bytes: int, buffers: PackBuffers
    ) -> None:
        self._collectives = collectives
        queues: dict[tuple[int, torch.device], list[OwnedMemory]] = {}
        for each in ranges:
            queues.setdefault((each.owner, each.memory.device), []).append(each)
        planned = [_plan(queue, direct_bytes) for queue in queues.values()]
        self._broadcasts = [broadcast for broadcast in chain(*zip_longest(*planned)) if broadcast is not None]
        self._buffers = buffers
        self._buffers.reserve(
            [(each.memories[0].device, each.nbytes) for each in self._broadcasts if each.packed], limits.PACKS_IN_FLIGHT
        )

    def start(self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None) -> InFlight:
        """Start sending the parameters of all owners to all ranks, and return the messages in flight."""
        in_flight = in_flight or InFlight()
        for broadcast in self._broadcasts:
            if changed is not None and not any(changed[index] for index in broadcast.params):
                continue
            first = broadcast.memories[0]
            if not broadcast.packed:
                in_flight.add(self._collectives.broadcast(first, broadcast.owner), first, staged=False)
                continue
            buffer = self._buffers.next(first.device)[: broadcast.nbytes]
            if broadcast.owner == self._collectives.group_rank:
                torch.cat(broadcast.memories, out=buffer)
                then = None
            else:
                # Unchanged parameters are received with the others, but not written: autograd may still need them.
                chosen = None if changed is None else [changed[index] for index in broadcast.params]
                then = unpacker(buffer, broadcast.memories, chosen)
            in_flight.add(self._collectives.broadcast(buffer, broadcast.owner), buffer, True, then)
        return in_flight

    @property
    def messages(self) -> int:
        """The number of broadcasts of a full ``start``."""
        return len(self._broadcasts)

    @property
    def staging_bytes(self) -> int:
        """The extra memory for packed broadcasts."""
        return self._buffers.nbytes


def _plan(ranges: Sequence[OwnedMemory], direct_bytes: int) -> list[_Broadcast]:
    """The broadcasts of one owner on one device."""
    broadcasts = []
    for message in plan_messages([each.memory.numel() for each in ranges], direct_bytes):
        members = [ranges[position] for position in message.ranges]
        params = tuple(chain.from_iterable(each.params for each in members))
        memories = tuple(each.memory for each in members)
        if not message.packed:
            memories = (memories[0][message.start : message.stop],)
        nbytes = message.stop - message.start
        broadcasts.append(_Broadcast(members[0].owner, params, memories, message.packed, nbytes))
    return broadcasts
