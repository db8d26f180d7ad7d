"""Where work beside the backward pass runs: on a side stream of an accelerator, or right here on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.futures import Future

_HERE = contextlib.nullcontext()


class SideStream:
    """A place for work whose results others wait for through futures.

    On an accelerator everything is enqueued on one side stream, which first waits for what the current stream has
    enqueued so far; nothing blocks the host. On the CPU the work is simply done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self.is_cpu = self._stream is None  # nothing to enter, and nothing to keep

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Run the body on the lane, after what the caller's stream has enqueued."""
        return _HERE if self._stream is None else self._on_stream(self._stream)

    @contextlib.contextmanager
    def _on_stream(self, stream: torch.Stream) -> Iterator[None]:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            yield

    def record(self, tensor: Tensor) -> None:
        """Do not let this memory be used again before what the lane has enqueued so far is done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def join(self) -> None:
        """Make the caller's stream wait for what the lane has enqueued so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def future(self) -> Future[Tensor]:
        """A future to be completed from the lane."""
        return Future() if self._stream is None else Future(devices=[self._device])
