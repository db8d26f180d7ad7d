"""Every byte onecopy sends goes through here: one class that knows a process group and its backend."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.engine.flat import as_bytes, flat_view, to_bytes
from onecopy.engine.torch_private import counts_calls, number_of_groups, timeout_of
from onecopy.engine.words import Rows, word_on
from onecopy.errors import OnecopyError, PeerFailedError, RanksDisagreeError


class Work(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> object:
        """Wait until it is done (on an accelerator: make the current stream wait)."""


@dataclass(frozen=True, slots=True)
class _Holding:
    """Work, and memory that it reads: freed with it, and not before."""

    work: Work
    memory: Tensor

    def wait(self) -> object:
        """Wait for the work."""
        return self.work.wait()


@dataclass(frozen=True, slots=True)
class Several:
    """Works that are waited for together."""

    works: tuple[Work, ...]

    def wait(self) -> object:
        """Wait for all of them."""
        for work in self.works:
            work.wait()
        return None


def _run_all(starts: Sequence[Callable[[], Work]]) -> list[BaseException]:
    """Start all and wait for all, whatever goes wrong with some: the others must neither miss nor keep a message."""
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:  # of a signal's handler, too
            errors.append(error)

    for work in [attempt(start) for start in starts]:
        if work is not None:
            attempt(work.wait)
    return errors


CHUNK_BYTES = 4 << 20
"""Long messages between two ranks go in parts of this size, so that both directions and all pairs make progress.

Times the number of other ranks, so that there are not more messages for the same bytes with more ranks.
"""


_companions: dict[tuple[str, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Groups made beside others, by purpose and the other's name; with the other itself, because names come again."""


TAGS = 1 << 16
"""How many tags a user of a group gets."""

TAG_BLOCKS = 1 << 14
"""How many such users there are before tags come again."""

STREAM_TAG = TAG_BLOCKS * TAGS
"""Messages between two ranks have it: not 0, as the messages have that a user has under way in the same group."""

WORD_TAG = STREAM_TAG + 1
"""Words between two ranks have it, so that they are not taken for memory where ranks are at different calls."""


_tag_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The numbers of the blocks of tags that are given out next, by group."""


_twins: dict[str, tuple[dist.ProcessGroup, list[Callable[[], Collectives | None]]]] = {}
"""Who uses the twins of a group, by its name."""


def _nobody() -> None:
    """Stands for a twin that nobody uses."""


class Collectives:
    """A process group, seen by one of its members.

    Control data (words, descriptions, headers) lives on ``control_device``: the CPU where the group has a CPU backend,
    else the accelerator. Ranks in the arguments are group ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "no process group is initialised: call torch.distributed.init_process_group() first "
                "(torchrun sets what it needs), also when there is only one process"
            )
        group = dist.group.WORLD if process_group is None else process_group
        if group is None or dist.get_rank(group) < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not a member of the process group it was given; "
                "only the members may construct this object"
            )
        self.process_group: dist.ProcessGroup = group
        self.world_size = dist.get_world_size(group)
        self.group_rank = dist.get_rank(group)
        self.global_rank = dist.get_global_rank(group, self.group_rank)
        self._others = [(self.group_rank - turn) % self.world_size for turn in range(1, self.world_size)]
        backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        # gloo's own collectives run one after the other on threads of their own, and its reduce-scatter is a full
        # all-reduce. Messages between pairs, in both directions at once, move the same bytes faster.
        self.exchanges_fast = set(backends.values()) == {"gloo"}
        self.control_device = torch.device("cpu")
        if "cpu" not in backends:
            accelerator = torch.accelerator.current_accelerator()
            assert accelerator is not None, backends
            self.control_device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        self._rows: Rows | None = None
        # TORCH_DISTRIBUTED_DEBUG=DETAIL counts calls and compares the counts in every collective. What only some ranks
        # send to each other would upset that, so there it gets a group in which nothing else happens.
        self._peers = group
        if counts_calls():
            self._peers = self._companion("peers") or group

    @property
    def reads_late(self) -> bool:
        """Whether control data lives on an accelerator, where reading it at once would make the host wait for it."""
        return self.control_device.type != "cpu"

    def twin(self) -> Collectives:
        """The same ranks with a process group that no other living twin uses; all members make this call together."""
        name = self.process_group.group_name
        known = _twins.get(name)
        if known is None or known[0] is not self.process_group:
            known = _twins[name] = (self.process_group, [])
        holders = known[1]
        # Ranks let go of a twin at different times, so they agree on one that is free everywhere.
        in_use = sum(1 << slot for slot, holder in enumerate(holders) if holder() is not None)
        masks = [row[0] for row in self.all_gather_words([in_use], "making a group")]
        slot = next(slot for slot in range(63) if not any(mask >> slot & 1 for mask in masks))
        group = self._companion(f"twin {slot}")
        if group is None:
            raise OnecopyError(
                f"rank {self.group_rank}: no process group of their own can be made for these ranks, because they "
                "belong to different numbers of groups already; construct the optimizer on a group before making "
                "others that only some of its members are in"
            )
        twin = Collectives(group)
        while len(holders) <= slot:
            holders.append(_nobody)
        holders[slot] = weakref.ref(twin)
        return twin

    def apart(self, purpose: str) -> Collectives:
        """The same ranks on a group for the CPU that nothing else uses; all members make this call together."""
        group = self._companion(purpose, "gloo")
        if group is None:
            raise OnecopyError(
                f"rank {self.group_rank}: no process group of their own can be made for these ranks, because they "
                f"belong to different numbers of groups already; make the first call for a {purpose} on a group "
                "before making others that only some of its members are in"
            )
        return Collectives(group)

    def _companion(self, purpose: str, backend: str | None = None) -> dist.ProcessGroup | None:
        """Another group of the same ranks, made once for each purpose; None if torch cannot make one.

        torch names a group that is made by its members alone after how many groups each of them is in. So all of them
        must be in as many, and a group is never destroyed before its parent. A group of all processes needs no such
        name.
        """
        key = (purpose, self.process_group.group_name)
        known = _companions.get(key)
        if known is None or known[0] is not self.process_group:
            everyone = self.world_size == dist.get_world_size()
            counts = self.all_gather_words([0 if everyone else number_of_groups()], f"making a group ({purpose})")
            if any(count != counts[0] for count in counts):
                return None
            group = dist.new_group(
                dist.get_process_group_ranks(self.process_group),
                timeout=timeout_of(self.process_group, self.control_device),
                backend=backend or dist.get_backend_config(self.process_group),
                use_local_synchronization=not everyone,
            )
            assert isinstance(group, dist.ProcessGroup)
            known = _companions[key] = (self.process_group, group)
        return known[1]

    def all_gather_words(self, word: Sequence[int], call: str) -> list[list[int]]:
        """Every rank's word of integers, in rank order, read on the host at once.

        Where words go between pairs of ranks, all raise if a rank is at another ``call``.
        """
        if not self.exchanges(self.control_device):
            return [row.tolist() for row in self.start_all_gather_words(word)]
        words = self._exchange_words(word, call)
        if words is None:
            calls = [name.decode() for name in self.all_gather_bytes(call.encode(), "telling where they are")]
            places = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(calls))
            raise RanksDisagreeError(
                f"rank {self.group_rank}: the ranks are at different calls. {places}. Make the same calls in the same "
                "order on every rank."
            )
        return words

    def _exchange_words(self, word: Sequence[int], call: str) -> list[list[int]] | None:
        """Every rank's word, sent between pairs of ranks; None if they are at different calls."""
        rows, self._rows = self._rows or Rows(self.world_size), None
        rows.write(self.group_rank, call, word)
        mine = rows.tensors[self.group_rank]
        errors = _run_all(
            [
                *(partial(self.receive, rows.tensors[rank], rank, WORD_TAG) for rank in self._others),
                *(partial(self.send, mine, rank, WORD_TAG) for rank in self._others),
            ]
        )
        for error in errors:
            if not isinstance(error, RuntimeError):
                raise error
        with self.naming(call):
            if errors:
                raise errors[0]
        self._rows = rows  # not after a failure, when a word may still come
        return rows.read(len(word))

    @contextlib.contextmanager
    def naming(self, call: str) -> Iterator[None]:
        """Let an error of sending or receiving, such as the group's timeout, name a call that all ranks make."""
        try:
            yield
        except RuntimeError as error:
            raise PeerFailedError(
                f"rank {self.group_rank}: {call} has waited for the other ranks in vain. Either one of them does not "
                "make this call, which all ranks must make (not inside `if rank == 0:`), or its process has died. "
                f"{error}"
            ) from error

    def start_all_gather_words(self, word: Sequence[int]) -> list[Tensor]:
        """Every rank's word of integers, in rank order, on the control device."""
        mine = word_on(self.control_device, word)
        rows = list(mine.new_empty(self.world_size, len(word)))
        self.process_group.allgather([rows], [mine]).wait()
        return rows

    def all_gather_bytes(self, payload: bytes, call: str) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        sizes = [row[0] for row in self.all_gather_words([len(payload)], call)]
        return [
            self._broadcast_sized(payload if source == self.group_rank else None, size, source)
            for source, size in enumerate(sizes)
        ]

    def broadcast_bytes(self, payload: bytes | None, source: int) -> bytes:
        """The bytes of ``source``; only its own argument counts."""
        size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=self.control_device)
        self.broadcast(size, source).wait()
        return self._broadcast_sized(payload if source == self.group_rank else None, int(size), source)

    def _broadcast_sized(self, payload: bytes | None, size: int, source: int) -> bytes:
        if size == 0:
            return b""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.control_device)
        if payload is not None:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(buffer, source).wait()
        return to_bytes(buffer) if payload is None else payload

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Start sending contiguous memory of ``source`` into the same memory everywhere else."""
        if self.exchanges(tensor.device):
            mine = source == self.group_rank
            pairs = [(self.send, rank) for rank in self._others] if mine else [(self.receive, source)]
            return Several(tuple(start(part, rank) for part in self._chunks(tensor) for start, rank in pairs))
        work: Work = dist.broadcast(tensor, group=self.process_group, group_src=source, async_op=True)
        return work

    def exchanges(self, device: torch.device) -> bool:
        """Whether memory on this device is best sent between pairs of ranks (gloo's own send is for the CPU only)."""
        return self.exchanges_fast and device.type == "cpu"

    def reduce_scatter(self, packed: Tensor, sizes: Sequence[int], part: Tensor) -> Work:
        """Start adding up over ranks what ``packed`` has for each rank, and receiving this rank's sum into ``part``.

        ``sizes[r]`` is rank r's; ``part`` is as long as the longest, to which all are padded.
        """
        if packed.numel() == self.world_size * part.numel():
            whole: Work = dist.reduce_scatter_single(part, packed, group=self.process_group, async_op=True)
            return _Holding(whole, packed)
        padded = packed.new_zeros(self.world_size, part.numel())
        for row, values in zip(padded, packed.split(list(sizes)), strict=True):
            row[: values.numel()].copy_(values)
        work: Work = dist.reduce_scatter_single(part, padded.view(-1), group=self.process_group, async_op=True)
        return _Holding(work, padded)

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Work:
        """Start adding up contiguous memory over all ranks in place (or taking the largest of each element)."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work: Work = dist.all_reduce(tensor, op=op, group=self.process_group, async_op=True)
        return work

    def send(self, tensor: Tensor, destination: int, tag: int = STREAM_TAG) -> Work:
        """Start sending contiguous memory to one rank."""
        work: Work = self._peers.send([tensor], destination, self._tag(tag))
        return work

    def receive(self, tensor: Tensor, source: int, tag: int = STREAM_TAG) -> Work:
        """Start receiving into contiguous memory from one rank what it sends with the same tag, in that order."""
        work: Work = self._peers.recv([tensor], source, self._tag(tag))
        return work

    def _tag(self, tag: int) -> int:
        return tag if self.exchanges_fast else 0  # not all backends have so many

    def new_tags(self) -> int:
        """The first of ``TAGS`` tags that nobody else uses in this group; all ranks call this in the same order."""
        blocks = _tag_blocks.setdefault(self.process_group, itertools.cycle(range(1, TAG_BLOCKS)))
        return next(blocks) * TAGS

    def _chunks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Parts of contiguous memory, none if it is empty: the two ends of a message may see it as different types."""
        if not tensor.numel():
            return ()
        chunk = CHUNK_BYTES * max(1, self.world_size - 1)
        if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.numel() <= chunk:
            return (tensor,)  # as most messages of a step are: these calls would take a third of its sending
        parts: tuple[Tensor, ...] = as_bytes(flat_view(tensor)).split(chunk)
        return parts
