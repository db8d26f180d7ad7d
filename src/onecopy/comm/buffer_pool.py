"""Buffers that are reused from step to step: fresh pages cost as much as the copies into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.comm.side_stream import current_stream, wait_for_stream


@dataclass(slots=True)
class _Memory:
    """Memory of the pool.

    Attributes:
        memory: the bytes.
        allocated_on: the stream on which the memory was allocated; None on the CPU.
        used_on: the stream on which its last user has waited for the end of its use.
    """

    memory: Tensor
    allocated_on: torch.Stream | None
    used_on: torch.Stream | None

    @property
    def nbytes(self) -> int:
        """The size."""
        return self.memory.numel()


class BufferPool:
    """Gives out flat buffers and takes them back. It keeps little more memory than was in use at one time.

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
            (each.nbytes, position)
            for position, each in enumerate(self._free)
            if nbytes <= each.nbytes <= 2 * nbytes and each.memory.device == device
        ]
        chosen = self._free.pop(min(fitting)[1]) if fitting else self._allocate(nbytes, device)
        wait_for_stream(current_stream(device), chosen.used_on)
        flat = chosen.memory[:nbytes].view(dtype)
        self._in_use[flat.data_ptr()] = chosen
        return flat

    def _allocate(self, nbytes: int, device: torch.device) -> _Memory:
        in_use = sum(each.nbytes for each in self._in_use.values()) + nbytes
        self._most_in_use = max(self._most_in_use, in_use)
        # An eighth more is kept: otherwise a few bytes too many would free the largest buffer.
        while self._free and in_use + sum(each.nbytes for each in self._free) > self._most_in_use * 9 // 8:
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
