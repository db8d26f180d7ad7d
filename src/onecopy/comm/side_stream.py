"""A side stream of an accelerator, for work that runs beside the backward pass; on the CPU the work runs in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future

_NO_STREAM = contextlib.nullcontext()


class SideStream:
    """One stream beside the current one. Nothing here blocks the host.

    Attributes:
        is_cpu: whether the device is the CPU, which has no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self.is_cpu = self._stream is None

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Make the side stream current. It waits for the work that the current stream has enqueued."""
        return _NO_STREAM if self._stream is None else self._on_stream(self._stream)

    @contextlib.contextmanager
    def _on_stream(self, stream: torch.Stream) -> Iterator[None]:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            yield

    def record(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from being reused before the side stream has done its enqueued work."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for the enqueued work of the side stream."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def future(self) -> Future[Tensor]:
        """A future whose result is set on the side stream."""
        return Future() if self._stream is None else Future(devices=[self._device])
