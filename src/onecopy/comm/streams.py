"""Streams of an accelerator: a side stream for work beside the current one, and streams that wait for each other.

The CPU has no streams: there the work runs in place, and nothing waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future

_NO_STREAM = contextlib.nullcontext()


class SideStream:
    """One stream beside the current one. Nothing here blocks the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Make the side stream current. It waits for the work that the current stream has enqueued."""
        return _NO_STREAM if self._stream is None else self._on_stream(self._stream)

    @contextlib.contextmanager
    def _on_stream(self, stream: torch.Stream) -> Iterator[None]:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            yield

    def join(self) -> None:
        """Make the current stream wait for the enqueued work of the side stream."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def future(self) -> Future[Tensor]:
        """A future whose result is set on the side stream."""
        return Future() if self._stream is None else Future(devices=[self._device])


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which the calling thread enqueues work for a device; None for the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def wait_for_stream(waiting: torch.Stream | None, other: torch.Stream | None) -> None:
    """Make one stream wait for the enqueued work of another one."""
    if waiting is not None and other is not None and waiting != other:
        waiting.wait_stream(other)


class UsedStreams:
    """The streams that have worked on some memory. Almost always it is only the current one, and nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.Stream] = {}  # by stream id

    def note(self) -> None:
        """Note that the current stream works on the memory."""
        stream = current_stream(self._device)
        if stream is not None:
            self._streams[stream.stream_id] = stream

    def join(self) -> None:
        """Make the current stream wait for the other streams."""
        for stream in self._streams.values():
            wait_for_stream(current_stream(self._device), stream)

    def release(self) -> None:
        """Make the other streams wait for the current one, before they reuse the memory, and forget them."""
        for stream in self._streams.values():
            wait_for_stream(stream, current_stream(self._device))
        self._streams.clear()
