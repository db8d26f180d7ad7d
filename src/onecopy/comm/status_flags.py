"""Short rows of numbers that ranks exchange in every step: onto an accelerator and back without stopping the host."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def flags_on(device: torch.device, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers in the memory of a device."""
    word = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return word
    # From pageable memory the host would wait for everything that the device has still to do.
    return word.pin_memory().to(device, non_blocking=True)


MOST_FLAGS = 7


class FlagRows:
    """A word of each rank on the CPU, in memory to be used again: making tensors takes longer than sending them.

    All are equally long, so that whoever expects a word can receive any.
    """

    def __init__(self, ranks: int) -> None:
        self._row = struct.Struct(f"={1 + MOST_FLAGS}q")
        self._memory = bytearray(ranks * self._row.size)
        self.tensors = torch.frombuffer(self._memory, dtype=torch.int64).view(ranks, -1).unbind()

    def write(self, rank: int, call: str, word: Sequence[int]) -> None:
        """Put a rank's word into its row, with the call that the rank is at."""
        rest = [0] * (MOST_FLAGS - len(word))
        self._row.pack_into(self._memory, rank * self._row.size, zlib.crc32(call.encode()), *word, *rest)

    def read(self, length: int) -> list[list[int]] | None:
        """All words, if all ranks are at the same call."""
        rows = list(self._row.iter_unpack(self._memory))
        return [list(row[1 : 1 + length]) for row in rows] if len({row[0] for row in rows}) == 1 else None


class DeferredRead:
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
