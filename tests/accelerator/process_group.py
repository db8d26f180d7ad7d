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
_OPS = {SUM: dist.ReduceOp.SUM, AVG: dist.ReduceOp.SUM, MIN: dist.ReduceOp.MIN, MAX: dist.ReduceOp.MAX}
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
        self._work, self._error = work, None
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
    exchange: Callable[[], Exchange]
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

    def launch(self, kept: Any, call: Call, peer: int | None = None) -> int:
        """Queue a collective, or a message to or from a peer, and return its stream."""
        place = self._core.current_device(), peer
        if place not in self._streams:
            self._streams[place] = self._core.new_stream()
        stream, site, text = self._streams[place], counters.site(), ""
        size = max(sum(tensor.nbytes for tensor in side) for side in (call.inputs, call.outputs))
        self._scheduler.step.collectives.append(Collective(call.name, size, call.operations, site, self._group))
        if peer is None:  # messages are not ordered among the ranks
            self._launched += 1
            text = f"number {self._launched}: {call.description}"

        def run() -> Callable[[], bool]:
            return Running(self._run(call, text), lambda: kept.drop(stream)).poll

        self._scheduler.wait_stream(stream, self._core.current_stream())
        reads, writes = ([shadow(t) for t in side] for side in (call.inputs, call.outputs))
        about = next((list(t.shape) for t in (*call.outputs, *call.inputs)), "")
        call.inputs = call.outputs = ()  # only ``kept`` keeps them from being freed
        self._scheduler.enqueue(call.name, run, reads, writes, stream=stream, shape=about, where=site)
        for observe in self.observers:
            observe(self, call.name, stream)
        return stream

    def _run(self, call: Call, text: str) -> Exchange:
        if text:
            yield from self._compare(text)
        yield from call.exchange()

    def _compare(self, text: str) -> Exchange:
        """Exchange the descriptions of a collective and raise if the ranks are in different ones."""
        own = torch.frombuffer(bytearray(text.encode()[:_DESCRIPTION].ljust(_DESCRIPTION)), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self._size)]
        yield self._gloo.allgather([rows], [own])
        texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        if len(set(texts)) > 1:
            message = f"the ranks are in different collectives: {dict(enumerate(texts))}"
            self._scheduler.races.report("collective order", message)
            raise RuntimeError(message)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Return a tensor's memory as a flat CPU tensor."""
        alias: Tensor = self._core.alias(tensor)
        return alias.as_strided((alias.numel(),), (1,))

    # Collectives

    def broadcast(self, kept: Any, tensor: Tensor, root: int) -> int:
        flat = self._flat(tensor)
        inputs, outputs = ([tensor], []) if root == self._rank else ([], [tensor])
        return self.launch(
            kept, Call("broadcast", inputs, outputs, lambda: self._broadcast(flat, root), f"from {root}")
        )

    def _broadcast(self, flat: Tensor, root: int) -> Exchange:
        if flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            yield self._gloo.broadcast([flat], options)

    def allreduce(self, kept: Any, tensor: Tensor, op: int) -> int:
        flat = self._flat(tensor)
        return self.launch(kept, Call("all_reduce", [tensor], [tensor], lambda: self._reduced(flat, op), f"op {op}"))

    def _reduced(self, flat: Tensor, op: int) -> Exchange:
        if op not in _OPS:
            raise RuntimeError(f"{NAME} does not have reduce operation {op}")
        if flat.numel():
            options: Any = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            yield self._gloo.allreduce([flat], options)
            if op == AVG:
                flat.div_(self._size)

    def allgather(self, kept: Any, outputs: list[Tensor], tensor: Tensor) -> int:
        """Queue an all-gather into a list; with uneven parts it is a broadcast per rank, as with NCCL."""
        own, parts = self._flat(tensor), [self._flat(t) for t in outputs]

        def exchange() -> Exchange:
            parts[self._rank].copy_(own)
            for root, part in enumerate(parts):
                yield from self._broadcast(part, root)

        return self.launch(kept, Call("all_gather", [tensor], outputs, exchange, operations=_operations(outputs)))

    def allgather_base(self, kept: Any, output: Tensor, tensor: Tensor) -> int:
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        whole, own = self._flat(output), self._flat(tensor)

        def exchange() -> Exchange:
            if whole.numel():
                yield self._gloo.allgather([list(whole.chunk(self._size))], [own.clone()])

        return self.launch(kept, Call("all_gather_into_tensor", [tensor], [output], exchange))

    def reduce_scatter(self, kept: Any, output: Tensor, inputs: list[Tensor], op: int) -> int:
        """Queue a reduce-scatter of a list; with uneven parts it is a reduce per rank, as with NCCL."""
        parts, to = [self._flat(t) for t in inputs], self._flat(output)
        exchange = functools.partial(self._scattered, parts, to, op)
        call = Call("reduce_scatter", inputs, [output], exchange, operations=_operations(inputs))
        # Its output differs among the ranks.
        call.description = f"reduce_scatter {output.dtype} op {op} of parts {[t.numel() for t in inputs]}"
        return self.launch(kept, call)

    def reduce_scatter_base(self, kept: Any, output: Tensor, tensor: Tensor, op: int) -> int:
        if output.numel() * self._size != tensor.numel():
            raise ValueError("input tensor must be the same size as output size times world size")
        to, parts = self._flat(output), list(self._flat(tensor).chunk(self._size))
        exchange = functools.partial(self._scattered, parts, to, op)
        return self.launch(kept, Call("reduce_scatter_tensor", [tensor], [output], exchange, f"op {op}"))

    def _scattered(self, parts: list[Tensor], to: Tensor, op: int) -> Exchange:
        """Send each rank its part and add up what arrives, in the order of the ranks."""
        if op not in (SUM, AVG):
            raise RuntimeError(f"{NAME} does not have reduce operation {op} in a reduce-scatter")
        counts = [part.numel() for part in parts]
        arrived = torch.empty(self._size * to.numel(), dtype=to.dtype)
        if sum(counts):
            own = [to.numel()] * self._size
            yield self._gloo.alltoall_base(arrived, torch.cat(parts), own, counts, dist.AllToAllOptions())
        rows = arrived.view(self._size, -1)
        result = functools.reduce(torch.add, rows)
        to.copy_(result / self._size if op == AVG else result)

    def barrier(self, kept: Any) -> int:
        """Queue a barrier; its ``wait()`` blocks the host, as with NCCL."""
        return self.launch(kept, Call("barrier", [], [], lambda: self._reduced(torch.zeros(1), SUM)))

    # Messages between two ranks, on the stream of the pair

    def send(self, kept: Any, tensor: Tensor, peer: int) -> int:
        flat = self._flat(tensor)
        call = Call("send", [tensor], [], lambda: iter([Message(self._gloo.send([flat], peer, 0))]))
        return self.launch(kept, call, peer)

    def recv(self, kept: Any, tensor: Tensor, peer: int) -> int:
        flat = self._flat(tensor)
        call = Call("recv", [], [tensor], lambda: iter([Message(self._gloo.recv([flat], peer, 0))]))
        return self.launch(kept, call, peer)
