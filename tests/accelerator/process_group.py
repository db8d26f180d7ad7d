"""The backend "simccl": collectives with the stream behaviour of NCCL whose data goes through gloo.

A collective is queued on the stream of its communicator, which waits for the current stream. ``wait()`` makes the
current stream wait and returns at once. Before the data of each collective, the ranks exchange a description of it and
fail if they differ.
"""

from __future__ import annotations

import datetime
import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import counters
from tests.accelerator.counters import Collective
from tests.accelerator.operators import shadow
from tests.accelerator.scheduler import Scheduler

NAME = "simccl"
SUM, AVG, _, MIN, MAX = range(5)
_OPS: dict[int, Any] = {SUM: torch.add, AVG: torch.add, MIN: torch.minimum, MAX: torch.maximum}
_DESCRIPTION = 256
"""Bytes of a collective's description that the ranks exchange."""

Exchange = Iterator[Any]
"""A collective that runs: it yields gloo works and goes on when each is done."""


def register(core: Any, scheduler: Scheduler) -> None:
    """Make the backend known to torch.distributed."""

    def create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return core.Backend(rank, size, Communicator(core, scheduler, rank, size, gloo), timeout)

    dist.Backend.register_backend(NAME, create, devices=["sim"])


class Running:
    """A generator of gloo works as queued work of the device."""

    def __init__(self, exchange: Exchange, done: Callable[[], None]) -> None:
        self._exchange, self._done = exchange, done
        self._work: Any = next(exchange, None)

    def poll(self) -> bool:
        """Go on if the work is done; True at the end."""
        while self._work is not None:
            if not self._work.is_completed():
                return False
            self._work.wait()
            self._work = next(self._exchange, None)
        self._done()
        return True


class Message(threading.Thread):
    """A message of gloo, which makes progress only while a thread waits for it."""

    def __init__(self, work: Any) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Wait for it."""
        try:
            self._work.wait()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        """Whether the message has arrived or failed."""
        return not self.is_alive()

    def wait(self) -> None:
        """Raise if it has failed."""
        if self._error is not None:
            raise self._error


@dataclass
class Call:
    """A collective before it is queued."""

    name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    sent: Sequence[Tensor] = ()  # flat, what every rank gets from this one
    finish: Callable[[list[Tensor]], object] = len  # writes the results from what all ranks have sent
    about: str = ""
    operations: int = 1  # as NCCL would run them

    def __post_init__(self) -> None:
        tensors = [*self.outputs, *self.inputs]
        for tensor in tensors:
            if tensor.device.type != "sim":
                raise RuntimeError(f"{self.name}: {NAME} has no backend for a tensor on {tensor.device}")
            if tensor.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
                raise TypeError(f"{self.name}: NCCL does not have {tensor.dtype}")
            if not torch._debug_has_internal_overlap(tensor) == 0 or not _is_dense(tensor):
                raise ValueError(f"{self.name}: tensors must be contiguous")
        shown = str([list(tensor.shape) for tensor in self.outputs or self.inputs])
        if len(shown) >= 100:
            shown = f"{len(tensors)} tensors, checksum {zlib.crc32(shown.encode()):x}"
        self.description = f"{self.name} {self.about} {tensors[0].dtype if tensors else ''} of {shown}"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _operations(parts: Sequence[Tensor]) -> int:
    return 1 if len({part.numel() for part in parts}) == 1 else len(parts)


class Communicator:
    """One process group's streams, its gloo group and the order of its collectives."""

    _number = 0
    observers: ClassVar[list[Callable[[Communicator, str, int], None]]] = []
    """Functions that are called after every launch, with the name of the collective and its stream."""

    def __init__(self, core: Any, scheduler: Scheduler, rank: int, size: int, gloo: Any) -> None:
        self._core, self._scheduler, self._rank, self._size, self._gloo = core, scheduler, rank, size, gloo
        self._streams: dict[Any, int] = {}
        Communicator._number += 1
        self._group = Communicator._number
        self._launched = 0

    # Queueing

    def launch(self, kept: Any, call: Call, peer: int | None = None, message: Callable[[], Any] | None = None) -> int:
        """Queue a collective, or a message to or from a peer, and return its stream."""
        place = self._core.current_device(), peer
        if place not in self._streams:
            self._streams[place] = self._core.new_stream()
        stream, site = self._streams[place], counters.site()
        size = max(sum(tensor.nbytes for tensor in side) for side in (call.inputs, call.outputs))
        self._scheduler.step.collectives.append(Collective(call.name, size, call.operations, site, self._group))
        self._launched += message is None  # messages are not ordered among the ranks
        text = f"number {self._launched}: {call.description}"

        def run() -> Callable[[], bool]:
            exchange = self._run(call, text) if message is None else iter([Message(message())])
            return Running(exchange, lambda: kept.drop(stream)).poll

        self._scheduler.wait_stream(stream, self._core.current_stream())
        reads, writes = ([shadow(t) for t in side] for side in (call.inputs, call.outputs))
        about = next((list(t.shape) for t in (*call.outputs, *call.inputs)), "")
        call.inputs = call.outputs = ()  # only ``kept`` keeps them from being freed
        self._scheduler.enqueue(call.name, run, reads, writes, stream=stream, shape=about, where=site)
        for observe in self.observers:
            observe(self, call.name, stream)
        return stream

    def _run(self, call: Call, text: str) -> Exchange:
        yield from self._compare(text)
        yield from self._gather(torch.cat(list(call.sent)), call.finish)

    def _compare(self, text: str) -> Exchange:
        """Exchange the descriptions of a collective and raise if the ranks are in different ones."""
        texts: list[str] = []
        own = torch.frombuffer(bytearray(text.encode()[:_DESCRIPTION].ljust(_DESCRIPTION)), dtype=torch.uint8)
        yield from self._gather(own, lambda rows: texts.extend(bytes(row.tolist()).decode().strip() for row in rows))
        if len(set(texts)) > 1:
            message = f"the ranks are in different collectives: {dict(enumerate(texts))}"
            self._scheduler.races.report("collective order", message)
            raise RuntimeError(message)

    def _gather(self, own: Tensor, finish: Callable[[list[Tensor]], object]) -> Exchange:
        """Gather a flat tensor of every rank, as bytes, and let ``finish`` write the results."""
        rows = [torch.empty_like(own) for _ in range(self._size)]
        if own.numel():
            yield self._gloo.allgather([[row.view(torch.uint8) for row in rows]], [own.view(torch.uint8)])
            finish(rows)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Return a tensor's memory as a flat CPU tensor."""
        alias: Tensor = self._core.alias(tensor)
        return alias.as_strided((alias.numel(),), (1,))

    def _reduced(self, rows: Sequence[Tensor], op: int) -> Tensor:
        """Return the sum of what the ranks have sent, in their order, or what else a reduction gives."""
        if op not in _OPS:
            raise RuntimeError(f"{NAME} does not have reduce operation {op}")
        result: Tensor = functools.reduce(_OPS[op], rows)
        return result / self._size if op == AVG else result

    # Collectives

    def broadcast(self, kept: Any, tensor: Tensor, root: int) -> int:
        flat = self._flat(tensor)
        inputs, outputs = ([tensor], []) if root == self._rank else ([], [tensor])
        finish = lambda rows: flat.copy_(rows[root])  # noqa: E731
        return self.launch(kept, Call("broadcast", inputs, outputs, [flat], finish, f"from {root}"))

    def allreduce(self, kept: Any, tensor: Tensor, op: int) -> int:
        flat = self._flat(tensor)
        finish = lambda rows: flat.copy_(self._reduced(rows, op))  # noqa: E731
        return self.launch(kept, Call("all_reduce", [tensor], [tensor], [flat], finish, f"op {op}"))

    def allgather(self, kept: Any, outputs: list[Tensor], tensor: Tensor) -> int:
        """Queue an all-gather into a list; with uneven parts it is a broadcast per rank, as with NCCL."""
        own, parts = self._flat(tensor), [self._flat(each) for each in outputs]
        padding = own.new_zeros(max(part.numel() for part in parts) - own.numel())

        def finish(rows: list[Tensor]) -> None:
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row[: part.numel()])

        call = Call("all_gather", [tensor], outputs, [own, padding], finish, operations=_operations(outputs))
        return self.launch(kept, call)

    def allgather_base(self, kept: Any, output: Tensor, tensor: Tensor) -> int:
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        whole = self._flat(output)
        finish = lambda rows: whole.copy_(torch.cat(rows))  # noqa: E731
        return self.launch(kept, Call("all_gather_into_tensor", [tensor], [output], [self._flat(tensor)], finish))

    def reduce_scatter(self, kept: Any, output: Tensor, inputs: list[Tensor], op: int) -> int:
        """Queue a reduce-scatter of a list; with uneven parts it is a reduce per rank, as with NCCL."""
        parts = [self._flat(each) for each in inputs]
        finish = self._scattering(output, sum(part.numel() for part in parts[: self._rank]), op)
        call = Call("reduce_scatter", inputs, [output], parts, finish, operations=_operations(inputs))
        # Its output differs among the ranks.
        call.description = f"reduce_scatter {output.dtype} op {op} of parts {[part.numel() for part in parts]}"
        return self.launch(kept, call)

    def reduce_scatter_base(self, kept: Any, output: Tensor, tensor: Tensor, op: int) -> int:
        if output.numel() * self._size != tensor.numel():
            raise ValueError("input tensor must be the same size as output size times world size")
        finish = self._scattering(output, self._rank * output.numel(), op)
        call = Call("reduce_scatter_tensor", [tensor], [output], [self._flat(tensor)], finish, f"op {op}")
        return self.launch(kept, call)

    def _scattering(self, output: Tensor, start: int, op: int) -> Callable[[list[Tensor]], object]:
        """Return a function that reduces this rank's part of what all have sent."""
        to = self._flat(output)
        return lambda rows: to.copy_(self._reduced([row[start : start + to.numel()] for row in rows], op))

    def barrier(self, kept: Any) -> int:
        """Queue a barrier; its ``wait()`` blocks the host, as with NCCL."""
        return self.launch(kept, Call("barrier", [], [], [torch.zeros(1)], len))

    # Messages between two ranks, on the stream of the pair

    def send(self, kept: Any, tensor: Tensor, peer: int) -> int:
        flat = self._flat(tensor)
        return self.launch(kept, Call("send", [tensor], []), peer, lambda: self._gloo.send([flat], peer, 0))

    def recv(self, kept: Any, tensor: Tensor, peer: int) -> int:
        flat = self._flat(tensor)
        return self.launch(kept, Call("recv", [], [tensor]), peer, lambda: self._gloo.recv([flat], peer, 0))
