"""Short rows of numbers that ranks exchange in every step: onto an accelerator and back without stopping the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def word_on(device: torch.device, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers in the memory of a device."""
    word = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return word
    # From pageable memory the host would wait for everything that the device has still to do.
    return word.pin_memory().to(device, non_blocking=True)


class LateWord:
    """A word that the host reads later than it arrives."""

    def __init__(self, word: Tensor) -> None:
        self._host, self._event = word, None
        if word.device.type != "cpu":
            self._host = torch.empty(word.shape, dtype=word.dtype, pin_memory=True)
            self._host.copy_(word, non_blocking=True)
            self._event = torch.Event(word.device.type)
            self._event.record()

    def read(self) -> list[Any]:
        """The numbers; waits for the device if it has not come so far."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers
