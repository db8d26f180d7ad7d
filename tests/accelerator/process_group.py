"""The backend "simccl": collectives with the stream behaviour of NCCL whose data goes through gloo.

A collective is queued on the stream of its communicator, which waits for the current stream. ``wait()`` makes the
current stream wait and returns at once. Before the data of each collective, the ranks exchange a description of it and
fail if they differ.
"""

from __future__ import annotations

import datetime
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import counters
from tests.accelerator.counters import Collective
from tests.accelerator.operators import shadow
from tests.accelerator.scheduler import Scheduler

NAME = "simccl"
SUM, AVG, PRODUCT, MIN, MAX = range(5)
_OPS = {SUM: dist.ReduceOp.SUM, AVG: dist.ReduceOp.SUM, PRODUCT: dist.ReduceOp.PRODUCT, MIN: dist.ReduceOp.MIN}
_OPS[MAX] = dist.ReduceOp.MAX
_DESCRIPTION = 256
"""Bytes of a collective's description that the ranks exchange."""

Exchange = Iterator[Any]
"""A collective that runs: it yields gloo works and goes on when each is done."""


def register(core: Any, scheduler: Scheduler) -> None:
    """Make the backend known to torch.distributed."""

    def create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return core.Backend(rank, size, Communicator(core, scheduler, store, rank, size, timeout), timeout)

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


class Message:
    """A message of gloo, which makes progress only while a thread waits for it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error

    def is_completed(self) -> bool:
        """Whether the message has arrived or failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Raise if it has failed."""
        if self._error is not None:
            raise self._error


class Call:
    """A collective before it is queued."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        exchange: Callable[[], Exchange],
        *,
        operations: int = 1,
        about: str = "",
        in_order: bool = True,
    ) -> None:
        for tensor in (*inputs, *outputs):
            if tensor.device.type != "sim":
                raise RuntimeError(f"{name}: {NAME} has no backend for a tensor on {tensor.device}")
            if tensor.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
                raise TypeError(f"{name}: NCCL does not have {tensor.dtype}")
            if not torch._debug_has_internal_overlap(tensor) == 0 or not _is_dense(tensor):
                raise ValueError(f"{name}: tensors must be contiguous")
        self.name, self.inputs, self.outputs, self.exchange = name, inputs, outputs, exchange
        self.operations = operations
        self.size = max(sum(t.nbytes for t in side) for side in (inputs, outputs))
        self.site = counters.site()
        shapes = [list(t.shape) for t in outputs or inputs]
        text = f"{name} {about} {(outputs or inputs)[0].dtype if shapes else ''} of "
        shown = (
            str(shapes)
            if len(str(shapes)) < 100
            else f"{len(shapes)} tensors, checksum {zlib.crc32(str(shapes).encode()):x}"
        )
        self.description = text + shown if in_order else ""


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


class Communicator:
    """One process group's streams, its gloo group and the order of its collectives."""

    _number = 0

    def __init__(
        self, core: Any, scheduler: Scheduler, store: Any, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        self._core, self._scheduler, self._rank, self._size = core, scheduler, rank, size
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[Any, int] = {}
        self._coalesced: list[Call] | None = None
        Communicator._number += 1
        self._group = Communicator._number
        self.order: list[str] = []

    # Queueing

    def _issue(self, kept: Any, call: Call, peer: int | None = None) -> int | None:
        """Queue a call, or put it into the coalesced group that is open."""
        if self._coalesced is not None:
            self._coalesced.append(call)
            return None
        return self._launch(kept, [call], peer)

    def _launch(self, kept: Any, calls: list[Call], peer: int | None = None) -> int:
        device = self._core.current_device()
        if (device, peer) not in self._streams:
            self._streams[device, peer] = self._core.new_stream()
        stream = self._streams[device, peer]
        for position, call in enumerate(calls):
            self._scheduler.step.collectives.append(
                Collective(call.name, call.size, call.operations, int(position == 0), call.site, self._group)
            )
        name = "+".join(dict.fromkeys(call.name for call in calls))
        text = " and ".join(filter(None, (call.description for call in calls)))
        self.order += [text] if text else []
        number = len(self.order)

        def run() -> Callable[[], bool]:
            exchange = self._run(calls, f"number {number}: {text}" if text else "")
            return Running(exchange, lambda: kept.drop(stream)).poll

        self._scheduler.wait_stream(stream, self._core.current_stream())
        reads = [shadow(t) for call in calls for t in call.inputs]
        writes = [shadow(t) for call in calls for t in call.outputs]
        about = next((list(t.shape) for call in calls for t in (*call.outputs, *call.inputs)), "")
        for call in calls:
            call.inputs = call.outputs = ()  # only ``kept`` keeps them from being freed
        self._scheduler.enqueue(name, run, reads, writes, stream=stream, shape=about, where=calls[0].site)
        return stream

    def _run(self, calls: list[Call], text: str) -> Exchange:
        if text:
            yield from self._compare(text)
        running = [call.exchange() for call in calls]
        first = [next(each, None) for each in running]
        for exchange, work in zip(running, first, strict=True):
            if work is not None:
                yield work
                yield from exchange

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

    def start_coalescing(self) -> None:
        """Collect the calls that follow."""
        if self._coalesced is not None:
            raise RuntimeError("coalescing is already started")
        self._coalesced = []

    def end_coalescing(self, kept: Any) -> int | None:
        """Queue the collected calls as one."""
        assert self._coalesced is not None
        calls, self._coalesced = self._coalesced, None
        del kept  # of no tensors
        tensors = [t for call in calls for t in (*call.inputs, *call.outputs)]
        return self._launch(self._core.keep(tensors), calls) if calls else None

    # Collectives

    def broadcast(self, kept: Any, tensors: list[Tensor], root: int) -> int | None:
        """Queue a broadcast."""
        flat = self._flat(tensors[0])

        def exchange() -> Exchange:
            yield from self._broadcast(flat, root)

        inputs, outputs = (tensors, []) if root == self._rank else ([], tensors)
        return self._issue(kept, Call("broadcast", inputs, outputs, exchange, about=f"from {root}"))

    def _broadcast(self, flat: Tensor, root: int) -> Exchange:
        if flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            yield self._gloo.broadcast([flat], options)

    def _reduced(self, flat: Tensor, op: int) -> Exchange:
        """All-reduce a flat tensor in place."""
        if op not in _OPS:
            raise RuntimeError(f"{NAME} does not have reduce operation {op}")
        if flat.numel():
            options: Any = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            yield self._gloo.allreduce([flat], options)
            if op == AVG:
                flat.div_(self._size)

    def allreduce(self, kept: Any, tensors: list[Tensor], op: int) -> int | None:
        """Queue an all-reduce of one tensor."""
        flat = self._flat(tensors[0])
        call = Call("all_reduce", tensors, tensors, lambda: self._reduced(flat, op), about=f"op {op}")
        return self._issue(kept, call)

    def allreduce_coalesced(self, kept: Any, tensors: list[Tensor], op: int) -> int | None:
        """Queue the all-reduces of several tensors as one launch."""

        def call(tensor: Tensor, flat: Tensor) -> Call:
            return Call("all_reduce", [tensor], [tensor], lambda: self._reduced(flat, op), about=f"op {op}")

        return self._launch(kept, [call(tensor, self._flat(tensor)) for tensor in tensors])

    def reduce(self, kept: Any, tensors: list[Tensor], root: int, op: int) -> int | None:
        """Queue a reduce to one rank."""
        flat = self._flat(tensors[0])

        def exchange() -> Exchange:
            copy = flat.clone()
            yield from self._reduced(copy, op)
            if self._rank == root:
                flat.copy_(copy)

        outputs = tensors if self._rank == root else []
        about = f"op {op} to {root} {list(tensors[0].shape)}"
        return self._issue(kept, Call("reduce", tensors, outputs, exchange, about=about))

    def allgather(self, kept: Any, outputs: list[Tensor], tensor: Tensor) -> int | None:
        """Queue an all-gather into a list; with uneven parts it is a broadcast per rank, as with NCCL."""
        own, parts = self._flat(tensor), [self._flat(t) for t in outputs]
        even = len({t.numel() for t in outputs}) == 1

        def exchange() -> Exchange:
            parts[self._rank].copy_(own)
            for root, part in enumerate(parts):
                yield from self._broadcast(part, root)

        count = 1 if even else len(outputs)
        return self._issue(kept, Call("all_gather", [tensor], outputs, exchange, operations=count))

    def allgather_base(self, kept: Any, outputs: list[Tensor], inputs: list[Tensor]) -> int | None:
        """Queue all-gathers into one tensor each."""

        def call(output: Tensor, tensor: Tensor) -> Call:
            if output.numel() != tensor.numel() * self._size:
                raise ValueError("output tensor size must be equal to world_size times input tensor size")
            whole, own = self._flat(output), self._flat(tensor)

            def exchange() -> Exchange:
                parts = list(whole.chunk(self._size)) if whole.numel() else []
                if parts:
                    yield self._gloo.allgather([parts], [own.clone()])

            return Call("all_gather_into_tensor", [tensor], [output], exchange)

        calls = [call(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._issue(kept, calls[0]) if len(calls) == 1 else self._launch(kept, calls)

    def _scattered(self, parts: list[Tensor], to: Tensor, op: int) -> Exchange:
        """Send each rank its part and reduce what arrives, in the order of the ranks."""
        counts = [part.numel() for part in parts]
        arrived = torch.empty(self._size * to.numel(), dtype=to.dtype)
        own = [to.numel()] * self._size
        if sum(counts) or arrived.numel():
            sent = torch.cat(parts)
            yield self._gloo.alltoall_base(arrived, sent, own, counts, dist.AllToAllOptions())
        rows = arrived.view(self._size, -1)
        result = rows[0].clone()
        for row in rows[1:]:
            if op in (SUM, AVG):
                result += row
            elif op == PRODUCT:
                result *= row
            else:
                result = torch.minimum(result, row) if op == MIN else torch.maximum(result, row)
        to.copy_(result / self._size if op == AVG else result)

    def reduce_scatter(self, kept: Any, output: Tensor, inputs: list[Tensor], op: int) -> int | None:
        """Queue a reduce-scatter of a list; with uneven parts it is a reduce per rank, as with NCCL."""
        parts, to = [self._flat(t) for t in inputs], self._flat(output)
        count = 1 if len({t.numel() for t in inputs}) == 1 else len(inputs)
        about = f"op {op} of parts {[t.numel() for t in inputs]}"
        call = Call("reduce_scatter", inputs, [output], lambda: self._scattered(parts, to, op), operations=count)
        call.description = f"reduce_scatter {output.dtype} {about}"
        return self._issue(kept, call)

    def reduce_scatter_base(self, kept: Any, outputs: list[Tensor], inputs: list[Tensor], op: int) -> int | None:
        """Queue reduce-scatters of one tensor each."""

        def call(output: Tensor, tensor: Tensor) -> Call:
            if output.numel() * self._size != tensor.numel():
                raise ValueError("input tensor must be the same size as output size times world size")
            to, whole = self._flat(output), self._flat(tensor)

            def exchange() -> Exchange:
                if whole.numel():
                    yield from self._scattered(list(whole.chunk(self._size)), to, op)

            return Call("reduce_scatter_tensor", [tensor], [output], exchange, about=f"op {op}")

        calls = [call(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return self._issue(kept, calls[0]) if len(calls) == 1 else self._launch(kept, calls)

    def alltoall_base(
        self, kept: Any, output: Tensor, tensor: Tensor, to_sizes: list[int], from_sizes: list[int]
    ) -> int | None:
        """Queue an all-to-all of one tensor."""
        to, source = self._flat(output), self._flat(tensor)
        row_to, row_from = math.prod(output.shape[1:]), math.prod(tensor.shape[1:])

        def exchange() -> Exchange:
            arriving = [n * row_to for n in to_sizes] or [to.numel() // self._size] * self._size
            leaving = [n * row_from for n in from_sizes] or [source.numel() // self._size] * self._size
            yield self._gloo.alltoall_base(to, source, arriving, leaving, dist.AllToAllOptions())

        call = Call("all_to_all", [tensor], [output], exchange, operations=self._size)
        call.description = f"all_to_all {tensor.dtype}"
        return self._issue(kept, call)

    def alltoall(self, kept: Any, outputs: list[Tensor], inputs: list[Tensor]) -> int | None:
        """Queue an all-to-all of lists."""
        to, source = [self._flat(t) for t in outputs], [self._flat(t) for t in inputs]

        def exchange() -> Exchange:
            arrived = torch.empty(sum(t.numel() for t in to), dtype=to[0].dtype)
            sizes = [t.numel() for t in to], [t.numel() for t in source]
            yield self._gloo.alltoall_base(arrived, torch.cat(source), *sizes, dist.AllToAllOptions())
            for tensor, part in zip(to, arrived.split(sizes[0]), strict=True):
                tensor.copy_(part)

        call = Call("all_to_all", inputs, outputs, exchange, operations=self._size)
        call.description = f"all_to_all {inputs[0].dtype}"
        return self._issue(kept, call)

    def gather(self, kept: Any, outputs: list[Tensor], tensor: Tensor, root: int) -> int | None:
        """Queue a gather to one rank: a message from each."""
        own, parts = self._flat(tensor), [self._flat(t) for t in outputs]

        def exchange() -> Exchange:
            rows = parts or [torch.empty_like(own) for _ in range(self._size)]
            yield self._gloo.allgather([rows], [own.clone()])

        call = Call("gather", [tensor], outputs, exchange, operations=self._size)
        call.description = f"gather {tensor.dtype} {list(tensor.shape)} to {root}"
        return self._issue(kept, call)

    def scatter(self, kept: Any, output: Tensor, inputs: list[Tensor], root: int) -> int | None:
        """Queue a scatter from one rank: a message to each."""
        to, parts = self._flat(output), [self._flat(t) for t in inputs]

        def exchange() -> Exchange:
            options = dist.ScatterOptions()
            options.rootRank = root
            yield self._gloo.scatter([to], [parts] if parts else [], options)

        call = Call("scatter", inputs, [output], exchange, operations=self._size)
        call.description = f"scatter {output.dtype} {list(output.shape)} from {root}"
        return self._issue(kept, call)

    def barrier(self, kept: Any) -> int | None:
        """Queue a barrier; its ``wait()`` blocks the host, as with NCCL."""
        return self._issue(kept, Call("barrier", [], [], lambda: self._reduced(torch.zeros(1), SUM)))

    # Messages between two ranks

    def send(self, kept: Any, tensor: Tensor, peer: int) -> int | None:
        """Queue a message to a rank, on the stream of the pair."""
        flat, batched = self._flat(tensor), self._coalesced is not None

        def exchange() -> Exchange:
            yield Message(self._gloo.send([flat], peer, int(batched)))

        return self._issue(kept, Call("send", [tensor], [], exchange, in_order=False), peer)

    def recv(self, kept: Any, tensor: Tensor, peer: int) -> int | None:
        """Queue the receipt of a message from a rank, on the stream of the pair."""
        flat, batched = self._flat(tensor), self._coalesced is not None

        def exchange() -> Exchange:
            yield Message(self._gloo.recv([flat], peer, int(batched)))

        return self._issue(kept, Call("recv", [], [tensor], exchange, in_order=False), peer)
