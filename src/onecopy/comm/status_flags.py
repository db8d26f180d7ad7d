"""Status flags: short rows of integers that ranks exchange in every step, read at once or at a later call.

On an accelerator, reading a tensor makes the host wait for everything that was enqueued before. There flags are copied
to pinned memory and read one call later, when they have long arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from onecopy.comm.streams import SideStream
from onecopy.comm.work import Work


def flags_on(device: torch.device, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Flags as a tensor on a device, without making the host wait."""
    flags = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return flags
    # From pageable memory the host would wait for everything that the device has still to do.
    return flags.pin_memory().to(device, non_blocking=True)


class DeferredRead:
    """A tensor that the host reads later: the copy to the host is enqueued now, on a stream of its own.

    So the stream that computes waits neither for the copy nor for the exchange that writes the tensor. The tensor is
    referenced until it has been copied, because its memory may not be reused before. ``work`` is the exchange that
    writes it, or None if the current stream has written it.
    """

    def __init__(self, tensor: Tensor, work: Work | None = None) -> None:
        self._tensor, self._work, self._host, self._event = tensor, work, tensor, None
        if tensor.device.type == "cpu":
            return
        with _read_stream(tensor.device).use():
            if work is not None:
                work.wait()
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device.type)
            self._event.record()
        for read in list(_copying):
            if read.has_arrived:
                _copying.discard(read)
        _copying.add(self)

    @property
    def has_arrived(self) -> bool:
        """Whether the host can read the values without waiting."""
        return self._work is None if self._event is None else bool(self._event.query())

    def wait(self) -> None:
        """Make the host wait until the values have arrived."""
        if self._event is not None:
            if not self._event.query():
                self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
            self._work = None

    def read(self) -> Tensor:
        """The values, on the CPU. The host waits if they have not arrived yet."""
        self.wait()
        return self._host


_copying: set[DeferredRead] = set()
"""Reads whose copies may be unfinished: the optimizer that would read them may be freed before."""


@lru_cache
def _read_stream(device: torch.device) -> SideStream:
    """The stream on which deferred flags are copied to the host."""
    return SideStream(device)


CheckFlags = Callable[[Tensor], None]
"""Raises if the flags of all ranks, on the CPU, tell of a failure."""


class DeferredFlags:
    """Flags that the host reads when they have arrived, at the latest one step after they were exchanged.

    A call that fails on one rank raises there at once; the other ranks raise when they read the flags. Flags are read
    in the order of their exchange: a rank that has failed takes part in no later exchange.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[DeferredRead, CheckFlags]] = deque()
        self._count = 0  # of all flags that were put
        self._forgotten: list[DeferredRead] = []

    def put(self, flags: Tensor, work: Work | None, check: CheckFlags) -> int:
        """Keep flags, which ``work`` writes, to be checked later; return their number, for :meth:`check_through`."""
        self._forgotten = [read for read in self._forgotten if not read.has_arrived]
        self._unread.append((DeferredRead(flags, work), check))
        self._count += 1
        return self._count

    def check_arrived(self) -> None:
        """Check the flags that have arrived, without waiting."""
        while self._unread and self._unread[0][0].has_arrived:
            self._check_oldest()

    def check_through(self, number: int) -> None:
        """Wait for the flags with this number and all before, and check them."""
        while self._count - len(self._unread) < min(number, self._count):
            self._check_oldest()

    def check_all(self) -> None:
        """Wait for all flags, and check them."""
        self.check_through(self._count)

    def wait(self) -> None:
        """Wait for all flags, without reading them."""
        for read, _ in self._unread:
            read.wait()

    def __bool__(self) -> bool:
        return bool(self._unread)

    def clear(self) -> None:
        """Forget the flags, because all ranks have raised, or because a later call has made them out of date."""
        # Their memory is referenced until the exchange has ended.
        self._forgotten += [read for read, _ in self._unread if not read.has_arrived]
        self._unread.clear()

    def _check_oldest(self) -> None:
        read, check = self._unread.popleft()
        try:
            check(read.read())
        except Exception:
            self.clear()  # a rank has failed, and takes part in no later exchange: later flags may never arrive
            raise
