"""Buffers that are reused from step to step: fresh pages cost as much as the copies into them."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Gives out flat buffers and takes them back. It keeps little more memory than was in use at one time."""

    def __init__(self) -> None:
        self._free: list[tuple[int, Tensor]] = []  # (bytes, memory)
        self._in_use: dict[int, tuple[int, Tensor]] = {}  # by address
        self._most_in_use = 0  # bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer with undefined contents."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device=device)
        # A much larger buffer is left for a larger request.
        fitting = [
            (size, position)
            for position, (size, memory) in enumerate(self._free)
            if nbytes <= size <= 2 * nbytes and memory.device == device
        ]
        if fitting:
            size, memory = self._free.pop(min(fitting)[1])
        else:
            size = nbytes
            in_use = sum(size for size, _ in self._in_use.values()) + nbytes
            self._most_in_use = max(self._most_in_use, in_use)
            # An eighth more is kept: otherwise a few bytes too many would free the largest buffer.
            while self._free and in_use + sum(size for size, _ in self._free) > self._most_in_use * 9 // 8:
                del self._free[0]
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        flat = memory[:nbytes].view(dtype)
        self._in_use[flat.data_ptr()] = (size, memory)
        return flat

    def give_back(self, *buffers: Tensor) -> None:
        """Make buffers from :meth:`take` available again; other tensors are ignored."""
        for buffer in buffers:
            memory = self._in_use.pop(buffer.data_ptr(), None)
            if memory is not None:
                self._free.append(memory)
