"""Memory that is used again from step to step: fresh pages cost as much as the copies into them."""

from __future__ import annotations

import torch
from torch import Tensor


class Pool:
    """Lends flat memory. It keeps no more than was in use at a time, and nothing that was not its own."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many elements, with any content."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device=device)
        fitting = [memory for memory in self._free if memory.numel() >= nbytes and memory.device == device]
        if fitting:
            memory = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not memory]
        else:
            # What is too small is let go, so that the pool does not grow beyond what is in use at a time.
            self._free = self._free[1:]
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        lent = memory[:nbytes].view(dtype)
        self._lent[lent.data_ptr()] = memory
        return lent

    def give_back(self, *lent: Tensor) -> None:
        """Let others use what :meth:`take` returned; other memory is ignored."""
        for tensor in lent:
            memory = self._lent.pop(tensor.data_ptr(), None)
            if memory is not None:
                self._free.append(memory)
