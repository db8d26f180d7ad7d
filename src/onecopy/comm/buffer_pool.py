"""Memory that is used again from step to step: fresh pages cost as much as the copies into them."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Lends flat memory. It keeps little more than was in use at a time, and nothing that was not its own."""

    def __init__(self) -> None:
        self._free: list[tuple[int, Tensor]] = []  # with the size of each
        self._in_use: dict[int, tuple[int, Tensor]] = {}
        self._most = 0  # bytes that were lent at a time

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many elements, with any content."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device=device)
        # What is much larger is left for those who need it.
        fitting = [
            (size, number)
            for number, (size, each) in enumerate(self._free)
            if nbytes <= size <= 2 * nbytes and each.device == device
        ]
        if fitting:
            size, memory = self._free.pop(min(fitting)[1])
        else:
            size = nbytes
            buffers = sum(size for size, _ in self._in_use.values()) + nbytes
            self._most = max(self._most, buffers)
            # A little more is kept, or a few bytes too many would make the largest go.
            while self._free and buffers + sum(size for size, _ in self._free) > self._most * 9 // 8:
                del self._free[0]
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        flat = memory[:nbytes].view(dtype)
        self._in_use[flat.data_ptr()] = (size, memory)
        return flat

    def give_back(self, *buffers: Tensor) -> None:
        """Let others use what :meth:`take` returned; other memory is ignored."""
        for tensor in buffers:
            memory = self._in_use.pop(tensor.data_ptr(), None)
            if memory is not None:
                self._free.append(memory)
