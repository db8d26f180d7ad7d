"""Copies of many tensors at once, so that kernel launches and transfers do not grow in number with the tensors.

Transfers between an accelerator and the host go through pinned memory, because the host waits for every transfer from
or to other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like, flat_view

BATCH = 1 << 24
"""Number of elements that are copied at a time, where a copy needs further memory on an accelerator."""

ALIGNMENT = 16
"""Number of elements to which tensors in one buffer are aligned, for vectorised kernels."""


def batches(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut flat tensors, one after the other, into batches of ``BATCH`` elements."""
    found: list[list[Tensor]] = [[]]
    room = BATCH
    for flat in flats:
        while flat.numel() > room:
            found[-1].append(flat[:room])
            flat, room = flat[room:], BATCH
            found.append([])
        found[-1].append(flat)
        room -= flat.numel()
    return found


def converted_together(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors into one new buffer in the data type, on the device and with the strides of ``like``, in one call.

    The tensors have one data type and one device, and so have those of ``like``, which are dense.
    """
    offsets, total = [], 0
    for tensor in like:
        offsets.append(total)
        total += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(total, dtype=like[0].dtype, device=like[0].device)
    copies = [buffer.as_strided(each.shape, each.stride(), at) for each, at in zip(like, offsets, strict=True)]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def start_copies_to_host(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Start copying tensors of an accelerator into pinned memory, in the data type and with the strides of ``like``.

    The values have arrived after :func:`wait_for_host_copies`. The arguments are as for :func:`converted_together`.
    """
    device, sizes = tensors[0].device, [tensor.numel() for tensor in like]
    host = _host_buffer(sum(sizes), like[0].dtype, device)
    flats = [flat_like(tensor, each) for tensor, each in zip(tensors, like, strict=True)]
    for pieces, part in zip(batches(flats), host.split(BATCH), strict=True):
        staged = torch.empty(part.numel(), dtype=part.dtype, device=device)
        torch._foreach_copy_(list(staged.split([piece.numel() for piece in pieces])), pieces)
        part.copy_(staged, non_blocking=True)
    return [flat.as_strided(each.shape, each.stride()) for flat, each in zip(host.split(sizes), like, strict=True)]


def wait_for_host_copies(device: torch.device) -> None:
    """Make the host wait for the copies that were started on a device's current stream."""
    event = _record_event(device)
    if event is not None:
        event.synchronize()


class CopiesToDevice:
    """Copies tensors of the host into tensors of an accelerator, without making the host wait for the copies."""

    def __init__(self) -> None:
        # The pinned memory of the last copies, and events after which it is free. Backends differ in whether their
        # allocator keeps such memory from being used again too early.
        self._in_use: list[tuple[list[Tensor], torch.Event | None]] = []

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start copying dense tensors of one data type into as many of another, with equal shapes and strides.

        The data type is converted on the host, where the sources may be changed at once.
        """
        device, dtype = targets[0].device, targets[0].dtype
        self._free()
        buffers = []
        for pieces, target_pieces in zip(
            batches([flat_view(source) for source in sources]),
            batches([flat_view(target) for target in targets]),
            strict=True,
        ):
            sizes = [piece.numel() for piece in pieces]
            host = _host_buffer(sum(sizes), dtype, device)
            torch._foreach_copy_(list(host.split(sizes)), pieces)
            staged = host.to(device, non_blocking=True)
            torch._foreach_copy_(target_pieces, list(staged.split(sizes)))
            buffers.append(host)
        self._in_use.append((buffers, _record_event(device)))

    def _free(self) -> None:
        """Free the pinned memory of copies that have ended, without waiting for the others."""
        self._in_use = [(buffers, event) for buffers, event in self._in_use if event is not None and not event.query()]


def _host_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, pinned for transfers from or to a device that is not the CPU."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type != "cpu")


def _record_event(device: torch.device) -> torch.Event | None:
    """An event after the enqueued work of a device's current stream; None for the CPU, which has no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
