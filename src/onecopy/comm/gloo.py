"""gloo: a reduce-scatter of pieces by owner, made of messages between pairs of ranks.

gloo runs its collectives one after the other. Its reduce-scatter is a whole all-reduce, and its all-gather takes equal
lengths only. Messages between pairs go in both directions at once, from and into the memory where the pieces are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.work import Work

Transfer = Callable[[Tensor, int, int], Work]
"""Starts to send memory to a rank, or to receive it from one, with a tag."""


class PairwiseReduction:
    """A reduce-scatter in flight: every rank sends each owner its pieces, and the owner takes the mean.

    Args:
        send: starts to send.
        receive: starts to receive.
        pieces: by owner, the contiguous pieces that it owns. Their lengths are equal on all ranks. They are only read,
            except for this rank's own ones where these are the targets.
        targets: where the mean of each of this rank's own pieces goes: the piece itself, or other memory.
        group_rank: this rank.
        scale: the factor from the sum to the mean.
        pool: gives memory for the pieces that arrive.
        tag: a tag that no other reduction in flight has.
    """

    def __init__(
        self,
        send: Transfer,
        receive: Transfer,
        pieces: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        group_rank: int,
        scale: float,
        pool: BufferPool,
        tag: int,
    ) -> None:
        self._group_rank, self._scale, self._pool = group_rank, scale, pool
        ranks = len(pieces)
        messages = [[part for piece in owned for part in _cut(piece)] for owned in pieces]
        self._own = messages[group_rank]
        self._targets = [part for target in targets for part in _cut(target)]
        # Targets with other memory than the pieces have room for what one other rank sends.
        into_targets = ranks > 1 and any(map(_differ, self._own, self._targets))
        staged = ranks - 1 - into_targets
        like = self._own[0] if self._own else torch.empty(0)
        self._staging = pool.take(staged * sum(map(Tensor.numel, self._own)), like.dtype, like.device)
        self._arriving: list[tuple[list[Tensor], list[Work]]] = []
        start = 0
        sources = [(group_rank - turn) % ranks for turn in range(1, ranks)]
        for own, target in zip(self._own, self._targets, strict=True):
            rows = [target] if into_targets else []
            for _ in range(staged):
                rows.append(self._staging[start : start + own.numel()])
                start += own.numel()
            works = [receive(rows[source - (source > group_rank)], source, tag) for source in sources]
            self._arriving.append((rows, works))
        # Every rank sends to another rank first.
        owners = [(group_rank + turn) % ranks for turn in range(1, ranks)]
        self._sent = messages  # referenced until they have left
        self._sends = [send(message, owner, tag) for owner in owners for message in messages[owner]]

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
