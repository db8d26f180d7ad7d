"""Embeddings whose gradients travel by rows: only those that the batch has used.

1. Autograd gives a sparse gradient. Its rows are put in order, each once; if most of the matrix is among them, it is
   made dense instead.
2. Every rank tells every owner how many rows it has for it, and sends their numbers and values; or dense values.
3. An owner adds them up in its range, rank by rank, as it would dense gradients.

Dense values, and rows, are kept until the end of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.work import Work, WorkGroup
from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import embedding_backward, sparse_parts
from onecopy.data_parallel.gradient_buckets import Bucket, OwnerMessage, Policy
from onecopy.layout import BucketPlan

DENSE = -1
"""Told instead of a number of rows."""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Some rows of a matrix, in order, each once: their numbers, and their values side by side."""

    numbers: Tensor
    values: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """What travels."""
        return [self.numbers, flat_view(self.values)] if len(self.numbers) else []


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of a matrix's elements, which may begin and end inside a row.

    Attributes:
        start: the first element.
        stop: the one behind the last.
        width: how many elements a row has.
    """

    start: int
    stop: int
    width: int

    def part_of(self, rows: EmbeddingRows) -> EmbeddingRows:
        """Those rows of which something is in the range."""
        return self._between(rows, self.start // self.width, -(-self.stop // self.width))

    def add(self, total: Tensor, rows: EmbeddingRows) -> None:
        """Add rows to the range's elements ``total``."""
        low, high = self._whole
        inside = self._between(rows, low, high)
        if len(inside.numbers):
            self._matrix(total).index_add_(0, inside.numbers - low, inside.values.to(total.dtype))
        for edge in self._edges:
            for values in self._between(rows, edge, edge + 1).values:
                self._seen(total, edge).add_(values[self._columns(edge)])

    def scale(self, total: Tensor, numbers: Tensor, factor: float) -> None:
        """Multiply some rows of ``total``, given in order and each once; the others are zero."""
        low, high = self._whole
        first, last = torch.searchsorted(numbers, numbers.new_tensor([low, high])).tolist()
        inside = numbers[first:last] - low
        if len(inside):
            matrix = self._matrix(total)
            matrix.index_copy_(0, inside, matrix.index_select(0, inside).mul_(factor))
        for edge in self._edges:
            self._seen(total, edge).mul_(factor)

    @property
    def _whole(self) -> tuple[int, int]:
        """Rows that are in the range from their first element to their last."""
        low = -(-self.start // self.width)
        return low, max(low, self.stop // self.width)

    @property
    def _edges(self) -> list[int]:
        """Rows of which only a part is in the range."""
        if self.start == self.stop:
            return []
        low, high = self._whole
        return [
            row for row in sorted({self.start // self.width, (self.stop - 1) // self.width}) if not low <= row < high
        ]

    def _matrix(self, total: Tensor) -> Tensor:
        low, high = self._whole
        return total[low * self.width - self.start : high * self.width - self.start].view(-1, self.width)

    def _columns(self, row: int) -> slice:
        """What of a row is in the range."""
        begin = row * self.width
        return slice(max(self.start - begin, 0), min(self.stop - begin, self.width))

    def _seen(self, total: Tensor, row: int) -> Tensor:
        """The elements of a row in ``total``."""
        offset, columns = row * self.width - self.start, self._columns(row)
        return total[offset + columns.start : offset + columns.stop]

    @staticmethod
    def _between(rows: EmbeddingRows, low: int, high: int) -> EmbeddingRows:
        first, last = torch.searchsorted(rows.numbers, rows.numbers.new_tensor([low, max(low, high)])).tolist()
        return EmbeddingRows(rows.numbers[first:last], rows.values[first:last])


class RowBucket(Bucket):
    """A bucket of one matrix, of whose gradient only the rows that are not zero need to travel."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor], names: Sequence[str], policy: Policy) -> None:
        super().__init__(plan, params, names, policy)
        (param,) = params
        self._count, self.width = param.shape[0], param.numel() // param.shape[0]
        self.rows: EmbeddingRows | None = None  # of the pass; None if its gradient is dense

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in the gradient, by rows if it is sparse and most of them are zero."""
        found = self._merged(gradient.detach())
        if not isinstance(found, EmbeddingRows):
            super().put(position, found, pool)
            return
        self.check_first(position)
        values = found.values.to(self.wire_dtype)
        if self.wire_dtype is torch.float16:
            values = values * self.policy.scale  # a sum of many could leave its narrow range
        self.rows = EmbeddingRows(found.numbers, values)
        self.note_arrival(position)

    def _merged(self, gradient: Tensor) -> EmbeddingRows | Tensor:
        """The rows of a sparse gradient in order and each once, in memory of their own; all of it if most are used."""
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            return gradient
        used, found = sparse_parts(gradient)
        numbers, places = torch.unique(used, return_inverse=True)
        # What autograd does for dense gradients, so that repeated rows are added up in the same way.
        if 2 * len(numbers) <= self._count:
            return EmbeddingRows(numbers, embedding_backward(found, places, len(numbers)))
        return embedding_backward(found, used, self._count)

    def leave(self, position: int) -> None:
        """Remember a gradient that a pass without synchronising has left, its rows merged.

        torch would keep those of all passes one behind the other, the first in memory that others may write to.
        """
        param = self.params[position]
        assert param.grad is not None
        found = self._merged(param.grad.detach())
        if isinstance(found, EmbeddingRows):
            found = torch.sparse_coo_tensor(
                found.numbers.unsqueeze(0), found.values, param.shape, is_coalesced=True, check_invariants=False
            )
        param.grad = found
        super().leave(position)

    def close(self, pool: BufferPool) -> None:
        """The end of collecting. If nothing came, there are no rows."""
        if self.arrived[0] and self.rows is None:
            super().close(pool)
            return
        self.note_missing()
        if self.rows is None:
            nothing = torch.empty(0, self.width, dtype=self.wire_dtype, device=self.device)
            self.rows = EmbeddingRows(torch.empty(0, dtype=torch.int64, device=self.device), nothing)

    def range_of(self, rank: int) -> RowRange:
        """What a rank owns of the matrix."""
        return RowRange(*self.plan.range_of(rank), self.width)

    def give_back(self, pool: BufferPool) -> None:
        """Let go of the pass's gradients."""
        super().give_back(pool)
        self.rows = None


class RowExchange:
    """The rows of one pass, or dense values, between all pairs of ranks.

    How many rows come is known only when the others have said so, so they are received in :meth:`add_up`. That what is
    sent has gone is waited for in :meth:`end`, when all ranks have come to the end of the pass: before, one of them may
    be waiting for something else.
    """

    def __init__(self, bucket: RowBucket, collectives: Collectives, pool: BufferPool, tag: int) -> None:
        self._bucket, self._collectives, self._pool, self._tag = bucket, collectives, pool, tag
        here, ranks = collectives.group_rank, collectives.world_size
        others = [(here + turn) % ranks for turn in range(1, ranks)]
        self._told = {rank: torch.empty(1, dtype=torch.int64, device=bucket.device) for rank in others}
        self._hearing = {rank: collectives.receive(self._told[rank], rank, tag) for rank in others}
        self._sent: list[Tensor] = []  # kept until it has gone
        self._departures: list[Work] = []
        for rank in others:
            for part in self._outgoing(rank):
                self._sent.append(part)
                self._departures.append(collectives.send(part, rank, tag))

    def _outgoing(self, rank: int) -> list[Tensor]:
        bucket = self._bucket
        part = None if bucket.rows is None else bucket.range_of(rank).part_of(bucket.rows)
        told = torch.tensor([DENSE if part is None else len(part.numbers)], device=bucket.device)
        return [told, *([message.values for message in bucket.messages[rank]] if part is None else part.tensors)]

    def add_up(self, target: Tensor, scale: float, keep: bool) -> None:
        """Write (or, with ``keep``, add) the sum over all ranks, times ``scale``, into this rank's range."""
        bucket, here = self._bucket, self._collectives.group_rank
        mine = bucket.range_of(here)
        arriving = {rank: self._receive(rank) for rank in self._hearing}
        total = torch.zeros_like(target) if keep else target.zero_()
        touched, dense = [], False
        for rank in range(self._collectives.world_size):
            if rank == here:
                rows = None if bucket.rows is None else mine.part_of(bucket.rows)
            else:
                rows, work = arriving[rank]
                work.wait()
            if rows is not None:
                mine.add(total, rows)
                touched.append(rows.numbers)
                continue
            dense = True
            for message, values in self._dense_from(rank):
                total[message.owner_slice].add_(values)
        if dense:
            total.mul_(scale)
        elif scale != 1.0:
            mine.scale(total, torch.cat(touched).unique(), scale)
        if keep:
            target.add_(total)

    def _receive(self, rank: int) -> tuple[EmbeddingRows | None, Work]:
        """Start receiving the rows that a rank has, if it has said that they are rows."""
        self._hearing[rank].wait()
        count, bucket = int(self._told[rank].item()), self._bucket
        if count == DENSE:
            return None, WorkGroup(())
        values = torch.empty(count, bucket.width, dtype=bucket.wire_dtype, device=bucket.device)
        rows = EmbeddingRows(torch.empty(count, dtype=torch.int64, device=bucket.device), values)
        return rows, WorkGroup(tuple(self._collectives.receive(part, rank, self._tag) for part in rows.tensors))

    def _dense_from(self, rank: int) -> Iterator[tuple[OwnerMessage, Tensor]]:
        """A rank's dense values, message by message: each while the next one arrives."""
        bucket, here = self._bucket, self._collectives.group_rank
        messages = bucket.messages[here]
        if rank == here:
            yield from ((message, message.values) for message in messages)
            return
        lengths = [message.owner_slice.stop - message.owner_slice.start for message in messages]
        longest = max(lengths, default=0)
        memory = self._pool.take(2 * longest, bucket.wire_dtype, bucket.device)
        parts = [memory[number % 2 * longest :][:length] for number, length in enumerate(lengths)]
        works = [self._collectives.receive(part, rank, self._tag) for part in parts[:2]]
        for number, (message, part) in enumerate(zip(messages, parts, strict=True)):
            works[number].wait()
            yield message, part
            if number + 2 < len(parts):
                works.append(self._collectives.receive(parts[number + 2], rank, self._tag))
        self._pool.give_back(memory)

    def end(self) -> None:
        """Wait until what this rank sends has gone, and let go of it."""
        for work in self._departures:
            work.wait()
        self._sent.clear()
        self._bucket.give_back(self._pool)
