"""Every byte that onecopy sends goes through here: one class that knows a process group and its backends.

``comm/transports.py`` chooses between messages between pairs of ranks and the backend's collectives; both are made of
the calls here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm import limits, process_groups
from onecopy.comm.backend_errors import ExplainedErrors
from onecopy.comm.process_groups import DedicatedGroups
from onecopy.comm.side_stream import SideStream
from onecopy.comm.status_flags import flags_on
from onecopy.comm.work import ExplainedWork, Work, WorkGroup, WorkThenCopy, run_all
from onecopy.common.flat_views import as_bytes, flat_view, to_bytes
from onecopy.common.torch_private import counts_calls
from onecopy.errors import OnecopyError

MESSAGE_TAG = limits.TAG_BLOCKS * limits.TAGS
"""The tag of messages between two ranks: not 0, the tag of messages that a user has in flight in the same group."""

VOTE_TAG = MESSAGE_TAG + 1
"""The tag of votes between two ranks: ranks that are in different calls must not take them for other data."""


AVERAGING_BACKENDS = {"nccl"}
"""Backends whose reductions have the operation ``ReduceOp.AVG``."""


class Collectives:
    """A process group, seen by one of its members. Ranks in arguments are group ranks.

    Attributes:
        process_group: the group.
        world_size: the number of its ranks.
        group_rank: this rank in the group.
        global_rank: this rank among all.
        control_device: the device of status flags in a step and of staged messages. It is the device of the parameters,
            also in a group that has a CPU backend beside: copies to the CPU would make the host wait for the
            accelerator.
        host_device: the device of flags and bytes that the host reads at once: the CPU where the group has a CPU
            backend, else the control device.

    Args:
        process_group: the group, by default that of all ranks.
        device: the device of the parameters; by default :attr:`host_device`.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        group = process_groups.member_group(process_group)
        self.process_group: dist.ProcessGroup = group
        self.world_size = dist.get_world_size(group)
        self.group_rank = dist.get_rank(group)
        self.global_rank = dist.get_global_rank(group, self.group_rank)
        self._others = [(self.group_rank - turn) % self.world_size for turn in range(1, self.world_size)]
        self._backends = process_groups.backends_of(group)
        self.control_device = process_groups.control_device(self._backends, device)
        self.host_device = torch.device("cpu") if "cpu" in self._backends else self.control_device
        # TORCH_DISTRIBUTED_DEBUG=DETAIL counts calls and compares the counts in every collective. Messages between two
        # ranks would upset the counts, so there they get a group in which no collective runs.
        self._message_group = group
        if counts_calls():
            self._message_group = self._side_group("messages") or group

    @property
    def defers_host_reads(self) -> bool:
        """Whether status flags live on an accelerator, where reading them at once would make the host wait."""
        return self.control_device.type != "cpu"

    def uses_pairwise(self, device: torch.device) -> bool:
        """Whether memory on a device is sent between pairs of ranks: on the CPU with gloo."""
        return device.type == "cpu" and self._backends.get("cpu") == "gloo"

    @property
    def averages(self) -> bool:
        """Whether the backend of the control device can average in a reduction."""
        return self._backends.get(self.control_device.type) in AVERAGING_BACKENDS

    def dedicated_group(self) -> Collectives:
        """The same ranks on a group that no other living user has; all members make this call together."""
        groups = DedicatedGroups.of(self.process_group)
        # Ranks let go of a group at different times, so they agree on a number that is free everywhere.
        masks = [row[0] for row in self.all_gather_flags([groups.in_use], "making a process group")]
        number = next(number for number in range(63) if not any(mask >> number & 1 for mask in masks))
        group = self._side_group(f"dedicated {number}")
        if group is None:
            raise OnecopyError(
                f"rank {self.group_rank}: no process group of their own can be made for these ranks, because they "
                "belong to different numbers of groups already; construct the optimizer on a group before making "
                "others that only some of its members are in"
            )
        collectives = Collectives(group, self.control_device)
        groups.assign(number, collectives)
        return collectives

    def cpu_group(self, purpose: str, call: str) -> Collectives:
        """The same ranks on a gloo group for one purpose; all members make this call together.

        Args:
            purpose: the purpose; for each there is one group.
            call: the name of the user's call that needs the group, for errors.
        """
        group = self._side_group(purpose, "gloo", call)
        if group is None:
            raise OnecopyError(
                f"rank {self.group_rank}: no process group of their own can be made for these ranks, because they "
                f"belong to different numbers of groups already; make the first call for a {purpose} on a group "
                "before making others that only some of its members are in"
            )
        return Collectives(group)

    def _side_group(
        self, purpose: str, backend: str | None = None, call: str = "making a process group"
    ) -> dist.ProcessGroup | None:
        def gather_counts(count: int) -> list[int]:
            return [row[0] for row in self.all_gather_flags([count], call)]

        with self.explained_errors(call):
            return process_groups.side_group(self.process_group, purpose, self.control_device, gather_counts, backend)

    def reserve_tags(self) -> int:
        """The first of ``limits.TAGS`` message tags for one user; all ranks call this in the same order."""
        return process_groups.reserve_tags(self.process_group)

    def all_gather_flags(self, flags: Sequence[int], call: str) -> list[list[int]]:
        """Integers of every rank, in rank order, read on the host at once. The ranks have voted before."""
        with self.explained_errors(call):
            mine = flags_on(self.host_device, flags)
            rows = mine.new_empty(self.world_size, len(flags))
            self.all_gather_single(rows.view(-1), mine).wait()
            values: list[list[int]] = rows.tolist()
        return values

    def largest_row(self, row: Tensor) -> None:
        """Replace a row of the fixed length of a vote by the largest of each integer over all ranks.

        On gloo it is sent between pairs of ranks, with a tag of its own: a rank that is in a collective of the user's
        cannot take it for other data, and an all-reduce of two lengths would end its process.
        """
        if not self.uses_pairwise(row.device):
            self.all_reduce(row, largest=True).wait()
            return
        rows = row.new_empty(len(self._others), len(row))
        errors = run_all(
            [
                *(partial(self.receive, rows[turn], other, VOTE_TAG) for turn, other in enumerate(self._others)),
                *(partial(self.send, row, other, VOTE_TAG) for other in self._others),
            ]
        )
        for error in errors:
            if not isinstance(error, RuntimeError):
                raise error
        if errors:
            raise errors[0]
        if len(rows):
            torch.maximum(row, rows.amax(0), out=row)

    def explained_errors(self, call: str) -> ExplainedErrors:
        """A block that turns a backend's error, such as the timeout, into one that names the call and this rank."""
        return ExplainedErrors(call, self.group_rank)

    def explained_work(self, work: Work, call: str) -> Work:
        """Return work whose ``wait()`` raises such an error, for work that another call waits for."""
        return ExplainedWork(work, call, self.group_rank)

    def all_gather_bytes(self, payload: bytes, call: str) -> list[bytes]:
        """The bytes of every rank, of any length, in rank order."""
        sizes = [row[0] for row in self.all_gather_flags([len(payload)], call)]
        with self.explained_errors(call):
            return [
                self._broadcast_sized(payload if source == self.group_rank else None, size, source)
                for source, size in enumerate(sizes)
            ]

    def broadcast_bytes(self, payload: bytes | None, source: int, call: str) -> bytes:
        """The bytes of ``source``. The other ranks' arguments are ignored."""
        size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=self.host_device)
        with self.explained_errors(call):
            self.broadcast(size, source).wait()
            return self._broadcast_sized(payload if source == self.group_rank else None, int(size), source)

    def _broadcast_sized(self, payload: bytes | None, size: int, source: int) -> bytes:
        if size == 0:
            return b""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.host_device)
        if payload is not None:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(buffer, source).wait()
        return to_bytes(buffer) if payload is None else payload

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Start sending contiguous memory of ``source`` into the same memory of all other ranks."""
        if self.uses_pairwise(tensor.device):
            is_source = source == self.group_rank
            pairs = [(self.send, other) for other in self._others] if is_source else [(self.receive, source)]
            return WorkGroup(tuple(start(part, peer) for part in self._chunks(tensor) for start, peer in pairs))
        work: Work = dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
        return work

    def all_gather_single(self, output: Tensor, mine: Tensor) -> Work:
        """Start gathering equally long memory of all ranks; ``mine`` may be this rank's part of ``output``."""
        work: Work = dist.all_gather_single(output, mine, group=self.process_group, async_op=True)
        return work

    def all_gather_parts(self, parts: Sequence[Tensor]) -> Work:
        """Start gathering memory of all ranks, of any lengths: ``parts`` has one tensor for each rank.

        This rank's part is sent, and the others are received into.
        """
        if self._is_gloo(parts[0].device):  # its list form takes equal lengths only
            sources = [source for source, part in enumerate(parts) if part.numel()]
            return WorkGroup(tuple(self.broadcast(parts[source], source) for source in sources))
        work: Work = dist.all_gather(list(parts), parts[self.group_rank], group=self.process_group, async_op=True)
        return work

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, average: bool = False) -> Work:
        """Start adding up ``parts``, equally long for all ranks; this rank's part of the sum arrives in ``output``.

        Args:
            output: room for this rank's part.
            parts: the parts of all ranks, one after the other.
            average: divide the sum by the number of ranks; only if the backend :attr:`averages`.
        """
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work: Work = dist.reduce_scatter_single(output, parts, op=op, group=self.process_group, async_op=True)
        return work

    def reduce_scatter_parts(self, output: Tensor, parts: Sequence[Tensor], average: bool = False) -> Work:
        """As :meth:`reduce_scatter_single`, with one tensor for each rank, of any lengths."""
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if self._is_gloo(output.device):  # its list form takes equal lengths only
            works: list[Work] = [
                dist.reduce(part, group_dst=owner, op=op, group=self.process_group, async_op=True)
                for owner, part in enumerate(parts)
                if part.numel()
            ]
            return WorkThenCopy(WorkGroup(tuple(works)), parts[self.group_rank], output)
        work: Work = dist.reduce_scatter(output, list(parts), op=op, group=self.process_group, async_op=True)
        return work

    def _is_gloo(self, device: torch.device) -> bool:
        return self._backends.get(device.type) == "gloo"

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Work:
        """Start summing contiguous memory over all ranks in place, or with ``largest`` taking the maximum."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work: Work = dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True)
        return work

    def all_reduce_after(self, work: Work, tensor: Tensor, largest: bool = False) -> Work:
        """As :meth:`all_reduce`, of memory that ``work`` writes. The current stream waits for neither."""
        with _chain_stream(tensor.device).use():
            work.wait()
            return self.all_reduce(tensor, largest)

    def send(self, tensor: Tensor, destination: int, tag: int = MESSAGE_TAG) -> Work:
        """Start sending contiguous memory to one rank."""
        work: Work = self._message_group.send([tensor], destination, self._tag(tag, tensor.device))
        return work

    def receive(self, tensor: Tensor, source: int, tag: int = MESSAGE_TAG) -> Work:
        """Start receiving into contiguous memory; messages with one tag arrive in the order they were sent."""
        work: Work = self._message_group.recv([tensor], source, self._tag(tag, tensor.device))
        return work

    def _tag(self, tag: int, device: torch.device) -> int:
        return tag if self._is_gloo(device) else 0  # not all backends have so many

    def _chunks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Parts of contiguous memory as bytes, because sender and receiver may see it as different types."""
        if not tensor.numel():
            return ()
        chunk = limits.CHUNK_BYTES * max(1, self.world_size - 1)
        if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.numel() <= chunk:
            return (tensor,)  # most messages of a step: splitting them would take a third of the time of sending
        parts: tuple[Tensor, ...] = as_bytes(flat_view(tensor)).split(chunk)
        return parts


@lru_cache
def _chain_stream(device: torch.device) -> SideStream:
    """The stream on which a collective waits for the one before it."""
    return SideStream(device)
