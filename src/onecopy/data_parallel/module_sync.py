"""Parameters and buffers of a module, broadcast from one rank to all others, as DDP does it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecopy.comm import limits
from onecopy.comm.buffers import plan_messages, unpacker
from onecopy.comm.collectives import Collectives
from onecopy.comm.work import InFlight
from onecopy.common.flat_views import as_bytes, flat_view
from onecopy.common.torch_private import buffers_of


@dataclass(slots=True)
class ModuleSync:
    """Broadcasts a module's parameters and buffers; with a mesh from the first replica to the others, too.

    Without ``broadcast_buffers`` it broadcasts buffers in the construction only.
    """

    _module: nn.Module
    _broadcast_buffers: bool
    _collectives: Collectives
    _replicas: Collectives | None

    def buffers_to_broadcast(self, last_pass_synchronised: bool = True) -> list[Tensor]:
        """The buffers that the module has now; none without ``broadcast_buffers``.

        DDP broadcasts buffers before a forward pass, with or without gradients, if the pass before it had gradients
        that are reduced. So it sends them once before several passes under ``no_sync()`` or without gradients.
        """
        return buffers_of(self._module) if self._broadcast_buffers and last_pass_synchronised else []

    def broadcast_all(self) -> None:
        """Broadcast all parameters and buffers of the first rank."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        for collectives in (self._replicas, self._collectives):
            if collectives is not None:
                _broadcast(tensors, collectives, "constructing ShardedDataParallel")

    def broadcast_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Broadcast these buffers from the first rank of the first replica."""
        for collectives in (self._replicas, self._collectives):
            if buffers and collectives is not None and collectives.world_size > 1:
                _broadcast(buffers, collectives, "forward()")


def _broadcast(tensors: Sequence[Tensor], collectives: Collectives, call: str) -> None:
    """Broadcast tensors of the first rank, packed, device by device.

    All are packed, in the order of their elements, because ranks may have other strides.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    in_flight = InFlight()
    for members in by_device.values():
        sizes = [tensor.numel() * tensor.element_size() for tensor in members]
        for message in plan_messages(sizes, direct_bytes=sys.maxsize):
            if message.stop > limits.PACK_BYTES:
                in_flight.drain()  # one large tensor at a time has a copy
            in_flight.leave(limits.PACKS_IN_FLIGHT)
            packed = [members[position] for position in message.ranges]
            if collectives.group_rank == 0:
                buffer = torch.cat([_bytes_of(tensor.detach().contiguous()) for tensor in packed])
                in_flight.add(collectives.broadcast(buffer, 0, call), staged=True)
            else:
                buffer = torch.empty(message.stop, dtype=torch.uint8, device=packed[0].device)
                in_flight.add(collectives.broadcast(buffer, 0, call), _writer(buffer, packed), staged=True)
    in_flight.drain()


def _writer(buffer: Tensor, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A function that writes a packed buffer into the tensors."""

    def write() -> None:
        # Through .data, so that autograd does not see it, as in DDP: the backward pass of an earlier forward pass may
        # still need the old version.
        targets = [tensor.data for tensor in tensors]
        contiguous = [target.contiguous() for target in targets]  # the target itself, or a copy with other strides
        unpacker(buffer, [_bytes_of(memory) for memory in contiguous])()
        for target, memory in zip(targets, contiguous, strict=True):
            if memory is not target:
                target.copy_(memory)

    return write


def _bytes_of(contiguous: Tensor) -> Tensor:
    return as_bytes(flat_view(contiguous))
