"""Status flags: short rows of integers that ranks exchange in every step, read at once or at a later call.

On an accelerator, reading a tensor makes the host wait for everything that was enqueued before. There flags are copied
to pinned memory and read one call later, when they have long arrived.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.work import Work

MOST_FLAGS = 7
"""Number of flags that a row has room for."""


def flags_on(device: torch.device, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Flags as a tensor on a device, without making the host wait."""
    flags = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return flags
    # From pageable memory the host would wait for everything that the device has still to do.
    return flags.pin_memory().to(device, non_blocking=True)


class FlagRows:
    """One row of flags per rank on the CPU, in memory that is reused: making tensors takes longer than sending them.

    All rows have the same length, so that a rank can receive the flags of any call.
    """

    def __init__(self, ranks: int) -> None:
        self._row = struct.Struct(f"={1 + MOST_FLAGS}q")
        self._memory = bytearray(ranks * self._row.size)
        self.tensors = torch.frombuffer(self._memory, dtype=torch.int64).view(ranks, -1).unbind()

    def write(self, group_rank: int, call: str, flags: Sequence[int]) -> None:
        """Write a rank's flags into its row, with a checksum of the call that the rank is in."""
        rest = [0] * (MOST_FLAGS - len(flags))
        call_checksum = zlib.crc32(call.encode())
        self._row.pack_into(self._memory, group_rank * self._row.size, call_checksum, *flags, *rest)

    def read(self, length: int) -> list[list[int]] | None:
        """The first ``length`` flags of every rank, or None if the ranks are in different calls."""
        rows = list(self._row.iter_unpack(self._memory))
        return [list(row[1 : 1 + length]) for row in rows] if len({row[0] for row in rows}) == 1 else None


class DeferredRead:
    """A tensor that the host reads later: the copy to the host is enqueued now."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device.type)
            self._event.record()

    def read(self) -> list[Any]:
        """The values. The host waits if the copy has not arrived yet."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values


class DeferredFlags:
    """The flags of the last call, which the next call reads.

    ``step()``, the pipelined step and the backward pass each have one. A call that fails on one rank raises there at
    once; the other ranks raise when they read the flags.
    """

    def __init__(self) -> None:
        self._unread: DeferredRead | None = None
        self._work: Work | None = None

    def put(self, flags: Tensor, work: Work | None = None) -> None:
        """Keep flags to be read later; ``work``, if given, is the exchange that writes them."""
        self._unread, self._work = DeferredRead(flags), work

    def take(self) -> list[Any] | None:
        """Read the flags, once: None if there are none."""
        self.wait()
        unread, self._unread, self._work = self._unread, None, None
        return None if unread is None else unread.read()

    def wait(self) -> None:
        """Wait for the exchange, without reading."""
        if self._work is not None:
            self._work.wait()

    @property
    def in_flight(self) -> bool:
        """Whether an exchange was left in flight whose flags have not been read."""
        return self._work is not None

    def clear(self) -> None:
        """Forget the flags, because a later call has made them out of date."""
        self._unread = self._work = None
