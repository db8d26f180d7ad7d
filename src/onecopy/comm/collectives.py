"""Every byte that onecopy sends goes through here: one class that knows a process group and its backends.

Where the backend is gloo, what it cannot do well is made of messages between pairs of ranks (``comm/gloo.py``).

torch names a group that only its members make after the number of groups that each member is in. So all members must
be in equally many groups, and a side group is never destroyed before the group it belongs to.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm import gloo_threads, limits
from onecopy.comm.buffers import BufferPool
from onecopy.comm.gloo import Pairs, PairwiseReduction
from onecopy.comm.status_flags import flags_on
from onecopy.comm.streams import SideStream
from onecopy.comm.work import ExplainedErrors, Started, Work, WorkAfter
from onecopy.common.flat_views import to_bytes
from onecopy.common.torch_private import (
    all_gather_single,
    counts_calls,
    number_of_groups,
    reduce_scatter_single,
    timeout_of,
)
from onecopy.errors import OnecopyError

AVERAGING_BACKENDS = {"nccl"}
"""Backends whose reductions have the operation ``ReduceOp.AVG``."""

# Exit functions run in reverse order: those that are registered later, and may still communicate, run before this one.
atexit.register(gloo_threads.wait_for_idle_workers)

_side_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Side groups by their group and their purpose."""

_tag_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The next blocks of message tags, by group."""


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
        group = self.process_group = _member_group(process_group)
        self.world_size = dist.get_world_size(group)
        self.group_rank = dist.get_rank(group)
        self.global_rank = dist.get_global_rank(group, self.group_rank)
        self._backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self.control_device = _control_device(self._backends, device)
        self.host_device = torch.device("cpu") if "cpu" in self._backends else self.control_device
        # TORCH_DISTRIBUTED_DEBUG=DETAIL counts calls and compares the counts in every collective. Messages between two
        # ranks would upset the counts, so there they get a group in which no collective runs.
        self._message_group = group
        self._pairs: Pairs | None = None  # on the CPU with gloo
        if counts_calls():
            backend = dist.get_backend_config(group)
            self._message_group = self._side_group("messages", backend, "making a process group") or group
        if self._backends.get("cpu") == "gloo":
            self._pairs = Pairs(self._message_group, self.group_rank, self.world_size)

    @property
    def defers_host_reads(self) -> bool:
        """Whether status flags live on an accelerator, where reading them at once would make the host wait."""
        return self.control_device.type != "cpu"

    def sends_in_place(self, device: torch.device) -> bool:
        """Whether pieces on a device are sent from where they lie, between pairs of ranks: on the CPU with gloo.

        Elsewhere they are packed, because a copy costs less than another collective.
        """
        return self._backends.get(device.type) == "gloo" and device.type == "cpu"

    def bucket_bytes(self, device: torch.device) -> int:
        """The default size of a bucket, and the most bytes of a packed all-gather, on a device."""
        return limits.bucket_bytes(self.world_size, pairwise=self.sends_in_place(device))

    def segment_bytes(self, device: torch.device, before: int, total: int) -> int:
        """The size from which a segment of buckets, which are updated and sent together, is full.

        ``before`` is the bytes of all segments before it, which are sent first, and ``total`` those of all segments.
        """
        largest = self.bucket_bytes(device)
        if not self.sends_in_place(device):
            largest = max(largest, total // limits.LARGEST_SEGMENTS)  # few all-gathers, and few updates
        return min(largest, limits.SEGMENT_GROWTH * before)

    @property
    def averages(self) -> bool:
        """Whether the backend of the control device can average in a reduction."""
        return self._backends.get(self.control_device.type) in AVERAGING_BACKENDS

    def cpu_group(self, call: str) -> Collectives:
        """The same ranks on a gloo group for checkpoints, made once; all members make this call together."""
        group = self._side_group("checkpoint", "gloo", call)
        if group is None:
            raise OnecopyError(
                f"rank {self.group_rank}: no process group of their own can be made for these ranks, because they "
                "belong to different numbers of groups already; make the first call for a checkpoint on a group "
                "before making others that only some of its members are in"
            )
        return Collectives(group)

    def _side_group(self, purpose: str, backend: str, call: str) -> dist.ProcessGroup | None:
        """Another group of the same ranks, made once for each purpose; None if torch cannot make one."""
        group = self.process_group
        known = _side_groups.setdefault(group, {})
        if purpose not in known:
            all_ranks = dist.get_world_size(group) == dist.get_world_size()
            counts = self.all_gather_flags([0 if all_ranks else number_of_groups()], call)
            if any(count != counts[0] for count in counts):
                return None
            with ExplainedErrors(call, self.group_rank):
                made = dist.new_group(
                    dist.get_process_group_ranks(group),
                    timeout=timeout_of(group, self.control_device),
                    backend=backend,
                    use_local_synchronization=not all_ranks,
                )
            assert isinstance(made, dist.ProcessGroup)
            known[purpose] = made
        return known[purpose]

    def reserve_tags(self) -> int:
        """The first of ``limits.TAGS`` message tags for one user; all ranks call this in the same order."""
        blocks = _tag_blocks.setdefault(self.process_group, itertools.cycle(range(1, limits.TAG_BLOCKS)))
        return next(blocks) * limits.TAGS

    def all_gather_flags(self, flags: Sequence[int], call: str) -> list[list[int]]:
        """Integers of every rank, in rank order, read on the host at once. The ranks have voted before."""
        with ExplainedErrors(call, self.group_rank):
            mine = flags_on(self.host_device, flags)
            rows = mine.new_empty(self.world_size, len(flags))
            all_gather_single(rows.view(-1), mine, group=self.process_group)
            values: list[list[int]] = rows.tolist()
        return values

    def largest_row(self, row: Tensor, call: str) -> None:
        """Replace a row of the fixed length of a vote by the largest of each integer over all ranks."""
        with ExplainedErrors(call, self.group_rank):
            if self._pairs is not None and self.sends_in_place(row.device):
                self._pairs.take_largest(row)
            else:
                dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.process_group)

    def all_gather_bytes(self, payload: bytes, call: str) -> list[bytes]:
        """The bytes of every rank, of any length, in rank order."""
        sizes = [row[0] for row in self.all_gather_flags([len(payload)], call)]
        return [
            self._broadcast_sized(payload if source == self.group_rank else None, size, source, call)
            for source, size in enumerate(sizes)
        ]

    def broadcast_bytes(self, payload: bytes | None, source: int, call: str) -> bytes:
        """The bytes of ``source``. The other ranks' arguments are ignored."""
        size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=self.host_device)
        self.broadcast(size, source, call).wait()
        return self._broadcast_sized(payload if source == self.group_rank else None, int(size), source, call)

    def _broadcast_sized(self, payload: bytes | None, size: int, source: int, call: str) -> bytes:
        if size == 0:
            return b""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.host_device)
        if payload is not None:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(buffer, source, call).wait()
        return to_bytes(buffer) if payload is None else payload

    def explained_errors(self, call: str) -> ExplainedErrors:
        """A block around communication that is not made here: a backend's error in it names the call and this rank."""
        return ExplainedErrors(call, self.group_rank)

    # Each of these starts a collective, and names the user's call in the error of a backend that has lost a rank.

    def broadcast(self, tensor: Tensor, source: int, call: str) -> Work:
        """Start sending contiguous memory of ``source`` into the same memory of all other ranks."""
        with ExplainedErrors(call, self.group_rank):
            if self._pairs is not None and self.sends_in_place(tensor.device):
                works = self._pairs.broadcast(tensor, source)
            else:
                works = [dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)]
        return Started(works, call, self.group_rank, tensor)

    def all_gather(self, memory: Tensor, lengths: Sequence[int], call: str) -> Work:
        """Start gathering, in place, the parts of all ranks, of these lengths, which lie one behind the other."""
        parts, works = list(memory.split(list(lengths))), []
        mine = parts[self.group_rank]
        with ExplainedErrors(call, self.group_rank):
            if self._pairs is not None and self.sends_in_place(memory.device):
                works = [work for source, part in enumerate(parts) for work in self._pairs.broadcast(part, source)]
            elif memory.numel() and len(set(lengths)) == 1:
                works = [all_gather_single(memory, mine, group=self.process_group, async_op=True)]
            elif memory.numel():
                works = [dist.all_gather(parts, mine, group=self.process_group, async_op=True)]
        return Started(works, call, self.group_rank, memory)

    def reduce_scatter(self, mean: Tensor, memory: Tensor, lengths: Sequence[int], scale: float, call: str) -> Work:
        """Start adding up, over all ranks, the parts of all ranks, of these lengths, which lie one behind the other.

        The sum of this rank's part arrives in ``mean``. Values are multiplied by ``scale`` first: 1 / the number of
        ranks, or less with a mesh. The memory is overwritten where the backend cannot average.
        """
        works: list[Work] = []
        op = dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM
        with ExplainedErrors(call, self.group_rank):
            if memory.numel() and not self.averages:
                memory.mul_(scale)
            if memory.numel() and len(set(lengths)) == 1:
                works = [reduce_scatter_single(mean, memory, op=op, group=self.process_group, async_op=True)]
            elif memory.numel():
                parts = list(memory.split(list(lengths)))
                works = [dist.reduce_scatter(mean, parts, op=op, group=self.process_group, async_op=True)]
        return Started(works, call, self.group_rank, mean, memory)

    def reduce_scatter_in_place(
        self,
        pieces: Sequence[Sequence[Tensor]],  # by owner, its pieces
        means: Sequence[Tensor],  # room for the sum of each piece of this rank, which may be the piece itself
        scale: float,
        pool: BufferPool,  # gives memory for what arrives
        tag: int,  # a number that no other reduction in flight between these ranks has
        call: str,
    ) -> Work:
        """As :meth:`reduce_scatter`, of pieces that lie anywhere; only where this class :meth:`sends_in_place`."""
        assert self._pairs is not None
        with ExplainedErrors(call, self.group_rank):
            reduction = PairwiseReduction(self._pairs, pieces, means, scale, pool, tag)
        return Started([reduction], call, self.group_rank)

    def all_reduce(self, tensor: Tensor, call: str, largest: bool = False, average: bool = False) -> Work:
        """Start summing contiguous memory over all ranks in place.

        Take the ``largest`` value in place of the sum, or the ``average`` where the backend :attr:`averages`.
        """
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.AVG if average and self.averages else dist.ReduceOp.SUM
        with ExplainedErrors(call, self.group_rank):
            work = dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True)
        return Started([work], call, self.group_rank, tensor)

    def all_reduce_after(
        self, work: Work, tensor: Tensor, call: str, largest: bool = False, average: bool = False
    ) -> Work:
        """As :meth:`all_reduce`, of memory that ``work`` writes. The current stream waits for neither."""
        if tensor.device.type == "cpu":
            return WorkAfter(work, partial(self.all_reduce, tensor, call, largest, average))
        with _chain_stream(tensor.device).use():
            work.wait()
            return self.all_reduce(tensor, call, largest, average)

    def send(self, tensor: Tensor, destination: int, call: str) -> Work:
        """Start sending contiguous memory to one rank."""
        with ExplainedErrors(call, self.group_rank):
            work = self._message_group.send([tensor], destination, self._tag(tensor))
        return Started([work], call, self.group_rank, tensor)

    def receive(self, tensor: Tensor, source: int, call: str) -> Work:
        """Start receiving into contiguous memory; messages arrive in the order they were sent."""
        with ExplainedErrors(call, self.group_rank):
            work = self._message_group.recv([tensor], source, self._tag(tensor))
        return Started([work], call, self.group_rank, tensor)

    def _tag(self, tensor: Tensor) -> int:
        return limits.MESSAGE_TAG if self._backends.get(tensor.device.type) == "gloo" else 0  # others have no tags


def _member_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, by default the group of all ranks; raise if this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group is initialised: call torch.distributed.init_process_group() first "
            "(torchrun sets what it needs), also when there is only one process; with Accelerate or transformers, "
            "construct the Accelerator or the TrainingArguments before the optimizer, or give Trainer "
            "optimizer_cls_and_kwargs=(ZeroRedundancyOptimizer, {'optimizer_class': AdamW, ...})"
        )
    group = dist.group.WORLD if process_group is None else process_group
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the process group it was given; "
            "only the members may construct this object"
        )
    return group


def _control_device(backends: dict[str, str], device: torch.device | None) -> torch.device:
    """The device of status flags in a group, for parameters on ``device``.

    gloo is used from the CPU only: it has few collectives for other devices.
    """
    if device is not None and backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, backends
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@lru_cache
def _chain_stream(device: torch.device) -> SideStream:
    """The stream on which a collective waits for the one before it."""
    return SideStream(device)
