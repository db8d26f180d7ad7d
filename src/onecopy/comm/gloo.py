"""gloo: broadcasts and reduce-scatters of pieces that lie anywhere, made of messages between pairs of ranks.

gloo runs its collectives one after the other. Its reduce-scatter is a whole all-reduce, its all-gather takes equal
lengths only, and all-reduces of unequal lengths end a process. Messages between pairs go in both directions at once,
from and into the memory where the pieces lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffers import BufferPool
from onecopy.comm.work import Work
from onecopy.common.flat_views import as_bytes, flat_view


class Pairs:
    """Messages between pairs of the ``ranks`` ranks of a group with gloo, on the CPU."""

    def __init__(self, group: dist.ProcessGroup, group_rank: int, ranks: int) -> None:
        self._group, self.group_rank, self.ranks = group, group_rank, ranks
        # Every rank sends to another rank first.
        self.sources = [(group_rank - turn) % ranks for turn in range(1, ranks)]
        self.destinations = [(group_rank + turn) % ranks for turn in range(1, ranks)]

    def send(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Start sending contiguous memory to one rank."""
        work: Work = self._group.send([tensor], destination, tag)
        return work

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start receiving into contiguous memory; messages with one tag arrive in the order they were sent."""
        work: Work = self._group.recv([tensor], source, tag)
        return work

    def broadcast(self, tensor: Tensor, source: int) -> list[Work]:
        """Start sending contiguous memory of ``source`` into the same memory of all other ranks."""
        tag = limits.MESSAGE_TAG
        if source != self.group_rank:
            return [self.receive(part, source, tag) for part in self._chunks(tensor)]
        return [self.send(part, other, tag) for part in self._chunks(tensor) for other in self.destinations]

    def take_largest(self, row: Tensor) -> None:
        """Replace a row by the largest of each number over all ranks.

        Its messages have a tag of their own: a rank that is in another collective cannot take them for other data.
        """
        tag = limits.VOTE_TAG
        rows = row.new_empty(self.ranks - 1, len(row))
        errors = _run_all(
            [
                *(partial(self.receive, rows[turn], source, tag) for turn, source in enumerate(self.sources)),
                *(partial(self.send, row, other, tag) for other in self.destinations),
            ]
        )
        for error in errors:
            if not isinstance(error, RuntimeError):
                raise error
        if errors:
            raise errors[0]
        if len(rows):
            torch.maximum(row, rows.amax(0), out=row)

    def _chunks(self, tensor: Tensor) -> Sequence[Tensor]:
        """Parts of contiguous memory as bytes, because sender and receiver may see it as different types."""
        if not tensor.numel():
            return ()
        chunk = limits.CHUNK_BYTES * max(1, self.ranks - 1)
        if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.numel() <= chunk:
            return (tensor,)  # most messages of a step: splitting them would take a third of the time of sending
        parts: Sequence[Tensor] = as_bytes(flat_view(tensor)).split(chunk)
        return parts


class PairwiseReduction:
    """A reduce-scatter in flight: every rank sends each owner its pieces, and the owner takes the mean."""

    def __init__(
        self,
        pairs: Pairs,
        # By owner, the contiguous pieces that it owns. Their lengths are equal on all ranks. They are only read, except
        # for this rank's own ones where these are the targets.
        pieces: Sequence[Sequence[Tensor]],
        # Where the mean of each of this rank's own pieces goes: the piece itself, or other memory.
        targets: Sequence[Tensor],
        scale: float,  # the factor from the sum to the mean
        pool: BufferPool,  # gives memory for the pieces that arrive
        tag: int,  # a tag that no other reduction in flight has
    ) -> None:
        self._group_rank, self._scale, self._pool = pairs.group_rank, scale, pool
        ranks, here = pairs.ranks, pairs.group_rank
        messages = [[part for piece in owned for part in _cut(piece)] for owned in pieces]
        self._own = messages[here]
        self._targets = [part for target in targets for part in _cut(target)]
        # Targets with other memory than the pieces have room for what one other rank sends.
        into_targets = ranks > 1 and any(map(_differ, self._own, self._targets))
        staged = ranks - 1 - into_targets
        like = self._own[0] if self._own else torch.empty(0)
        self._staging = pool.take(staged * sum(map(Tensor.numel, self._own)), like.dtype, like.device)
        self._arriving: list[tuple[list[Tensor], list[Work]]] = []
        start = 0
        for own, target in zip(self._own, self._targets, strict=True):
            rows = [target] if into_targets else []
            for _ in range(staged):
                rows.append(self._staging[start : start + own.numel()])
                start += own.numel()
            works = [pairs.receive(rows[source - (source > here)], source, tag) for source in pairs.sources]
            self._arriving.append((rows, works))
        self._sent = messages  # referenced until they have left
        self._sends = [pairs.send(message, owner, tag) for owner in pairs.destinations for message in messages[owner]]

    def wait(self) -> None:
        """Write the means message by message, while later messages arrive; wait until this rank's have left."""
        for own, target, (rows, works) in zip(self._own, self._targets, self._arriving, strict=True):
            for work in works:
                work.wait()
            rows.insert(self._group_rank, own)
            write_mean(target, rows, self._scale)
        for work in self._sends:
            work.wait()
        self._pool.give_back(self._staging)
        self._arriving, self._sends, self._sent = [], [], []


def _run_all(starts: Sequence[Callable[[], Work]]) -> list[BaseException]:
    """Start all works and wait for all of them, also if some fail; return the exceptions.

    Other ranks count on every message: none may be left out, and none may be left behind for a later receive.
    """
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:  # also of a signal's handler
            errors.append(error)

    for work in [attempt(start) for start in starts]:
        if work is not None:
            attempt(work.wait)
    return errors


def write_mean(target: Tensor, rows: Sequence[Tensor], scale: float) -> None:
    """Write the sum of all ``rows``, each times ``scale`` first, into ``target``, which may be one of them.

    They are added in the order of the ranks, so that the result does not depend on who owns it.
    """
    if len(rows) == 1:
        torch.mul(rows[0], scale, out=target)
        return
    if math.frexp(scale)[0] != 0.5:
        # Not a power of two: every row is rounded before it is added, as in DDP. add_() with a factor may not round it.
        rows, scale = [row * scale for row in rows], 1.0
    first, second, *others = rows
    others = [row if _differ(row, target) else row.clone() for row in others]
    if not _differ(second, target):
        first, second = second, first  # the sum of two is the same in either order
    torch.mul(first, scale, out=target)
    for row in (second, *others):
        target.add_(row, alpha=scale)


def _cut(piece: Tensor) -> tuple[Tensor, ...]:
    """A piece as messages, so that one is added up while the next one arrives."""
    parts: tuple[Tensor, ...] = piece.split(limits.REDUCE_MESSAGE_BYTES // piece.element_size())
    return parts if piece.numel() else ()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two messages have different memory."""
    return one.data_ptr() != other.data_ptr()
