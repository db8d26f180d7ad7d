"""Share: after an update, every owner sends its updated parameters to all other ranks.

The two transports plan it differently: ``broadcast_sharing.py`` for pairs of ranks, ``gather_sharing.py`` for the
backend's collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onecopy.comm.packing import InFlight


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """Contiguous memory, as bytes, of parameters that one rank owns.

    Attributes:
        owner: the group rank of the owner.
        params: the indices of the parameters.
        memory: the bytes.
        itemsize: the bytes of one element; the memory is aligned to it.
    """

    owner: int
    params: tuple[int, ...]
    memory: Tensor
    itemsize: int


class ParameterSharing(Protocol):
    """The messages that make all replicas equal, planned once for some memory ranges.

    Attributes:
        messages: the number of messages.
        staging_bytes: the extra memory for packed messages.
    """

    @property
    def messages(self) -> int:
        """The number of messages."""

    @property
    def staging_bytes(self) -> int:
        """The extra memory."""

    def start(self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None) -> InFlight:
        """Start sending the parameters of all owners to all ranks, and return the messages in flight.

        Args:
            changed: whether each parameter has changed; messages without a changed parameter are left out. All ranks
                must give the same.
            in_flight: the messages in flight of an instance with the same buffers.
        """


class PackBuffers:
    """Buffers for packed messages, allocated once and used in turns. There is one more than may be in flight."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._turn: dict[torch.device, int] = {}

    def reserve(self, sizes: Sequence[tuple[torch.device, int]], most_in_flight: int) -> None:
        """Allocate buffers for packed messages of these sizes in bytes, but no more than can be in use at one time."""
        by_device: dict[torch.device, list[int]] = {}
        for device, nbytes in sizes:
            by_device.setdefault(device, []).append(nbytes)
        for device, needed in by_device.items():
            known = self._buffers.get(device, [])
            count = min(len(known) + len(needed), most_in_flight + 1)
            nbytes = max(*needed, *(buffer.numel() for buffer in known), 0)
            if len(known) < count or known[0].numel() < nbytes:
                # Zeroed, because padding is sent, too.
                self._buffers[device] = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]

    def next(self, device: torch.device) -> Tensor:
        """The buffer of the oldest message. Messages end in order, so it is free."""
        self._turn[device] = (self._turn.get(device, -1) + 1) % len(self._buffers[device])
        return self._buffers[device][self._turn[device]]

    @property
    def nbytes(self) -> int:
        """The memory of all buffers."""
        return sum(buffer.numel() for buffers in self._buffers.values() for buffer in buffers)
