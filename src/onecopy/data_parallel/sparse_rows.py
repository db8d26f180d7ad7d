"""Embeddings whose gradients are reduced by rows: only the rows that a batch has used are sent.

1. Autograd produces a sparse gradient. Its rows are merged: sorted, each once. If the batch has used most rows, the
   gradient is made dense instead.
2. Every rank tells every owner the number of its rows in the owner's range, and sends their indices and values. A rank
   with a dense gradient sends dense values.
3. The owner adds them up in its shard, rank by rank, in the order in which dense gradients are added up.

The gradients are released at the end of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecopy.comm.bucket_reduce_scatter import (
    BucketGradients,
    BucketReduceScatter,
    InFlightReduction,
    across_replicas,
)
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.pairwise_reduce_scatter import OwnerMessage, PairwiseReduceScatter
from onecopy.comm.transports import transport_for
from onecopy.comm.work import Work, WorkGroup
from onecopy.common.flat_views import flat_view
from onecopy.common.profiler_ranges import profile_range
from onecopy.common.torch_private import embedding_backward, sparse_parts
from onecopy.data_parallel.gradient_buckets import GradientBucket, GradState, ReductionPolicy
from onecopy.layout import BucketPlan

SPARSE_BYTES = 1 << 20
"""Embeddings of at least this size can send their gradients by rows."""

DENSE = -1
"""Sent in place of a number of rows by a rank that sends dense values."""


def embeddings_to_send_by_rows(module: nn.Module, collectives: Collectives) -> list[nn.Embedding]:
    """The embeddings whose gradients can be sent by rows: large ones, whose weights no other module has.

    torch has no sparse gradients with ``scale_grad_by_freq``. Sparse gradients of ``nn.EmbeddingBag`` are rounded
    otherwise than its dense ones, so they stay dense. Not every transport sends rows.
    """
    users = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        and part.weight.requires_grad
        and part.weight.numel() * part.weight.element_size() >= SPARSE_BYTES
        and part.weight.is_contiguous()
        and users[id(part.weight)] == 1
        and not part.scale_grad_by_freq
        and transport_for(collectives, part.weight.device).sends_rows
    ]


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Some rows of a matrix, sorted, each once.

    Attributes:
        numbers: the row indices.
        values: the rows, one below the other.
    """

    numbers: Tensor
    values: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are sent: none if there are no rows."""
        return [self.numbers, flat_view(self.values)] if len(self.numbers) else []


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of a matrix's elements, which may begin and end inside a row.

    Attributes:
        start: the first element.
        stop: the element behind the last one.
        width: the number of elements of a row.
    """

    start: int
    stop: int
    width: int

    def part_of(self, rows: EmbeddingRows) -> EmbeddingRows:
        """The rows that overlap the range."""
        return self._between(rows, self.start // self.width, -(-self.stop // self.width))

    def add(self, total: Tensor, rows: EmbeddingRows) -> None:
        """Add rows to ``total``, which holds the elements of the range."""
        low, high = self._whole_rows
        inside = self._between(rows, low, high)
        if len(inside.numbers):
            self._as_matrix(total).index_add_(0, inside.numbers - low, inside.values.to(total.dtype))
        for row in self._partial_rows:
            for values in self._between(rows, row, row + 1).values:
                self._elements_of(total, row).add_(values[self._columns(row)])

    def scale(self, total: Tensor, numbers: Tensor, factor: float) -> None:
        """Multiply the rows ``numbers`` of ``total``, sorted, each once; all other rows must be zero."""
        low, high = self._whole_rows
        first, last = torch.searchsorted(numbers, numbers.new_tensor([low, high])).tolist()
        inside = numbers[first:last] - low
        if len(inside):
            matrix = self._as_matrix(total)
            matrix.index_copy_(0, inside, matrix.index_select(0, inside).mul_(factor))
        for row in self._partial_rows:
            self._elements_of(total, row).mul_(factor)

    @property
    def _whole_rows(self) -> tuple[int, int]:
        """The first row that is completely in the range, and the row behind the last one."""
        low = -(-self.start // self.width)
        return low, max(low, self.stop // self.width)

    @property
    def _partial_rows(self) -> list[int]:
        """The rows that are only partly in the range: at most two."""
        if self.start == self.stop:
            return []
        low, high = self._whole_rows
        return [
            row for row in sorted({self.start // self.width, (self.stop - 1) // self.width}) if not low <= row < high
        ]

    def _as_matrix(self, total: Tensor) -> Tensor:
        """The whole rows in ``total``, as a matrix."""
        low, high = self._whole_rows
        return total[low * self.width - self.start : high * self.width - self.start].view(-1, self.width)

    def _columns(self, row: int) -> slice:
        """The columns of a row that are in the range."""
        begin = row * self.width
        return slice(max(self.start - begin, 0), min(self.stop - begin, self.width))

    def _elements_of(self, total: Tensor, row: int) -> Tensor:
        """The elements of a row in ``total``."""
        offset, columns = row * self.width - self.start, self._columns(row)
        return total[offset + columns.start : offset + columns.stop]

    @staticmethod
    def _between(rows: EmbeddingRows, low: int, high: int) -> EmbeddingRows:
        first, last = torch.searchsorted(rows.numbers, rows.numbers.new_tensor([low, max(low, high)])).tolist()
        return EmbeddingRows(rows.numbers[first:last], rows.values[first:last])


class RowBucket(GradientBucket):
    """A bucket of one embedding matrix, whose gradient is sent by rows where most rows are zero.

    Attributes:
        width: the number of elements of a row.
        rows: the rows of the current pass; None if the gradient is dense or has not arrived.
        dense: the reduction of a dense gradient. Rows are sent between pairs of ranks, and so are dense gradients here,
            because ranks may have either.
    """

    dense: PairwiseReduceScatter

    def __init__(
        self, plan: BucketPlan, params: Sequence[Tensor], names: Sequence[str], policy: ReductionPolicy
    ) -> None:
        super().__init__(plan, params, names, policy)
        (param,) = params
        self._row_count, self.width = param.shape[0], param.numel() // param.shape[0]
        self.rows: EmbeddingRows | None = None

    def plan_reduction(self, gradients: BucketGradients) -> BucketReduceScatter:
        """Plan the reduction of a dense gradient."""
        self.dense = PairwiseReduceScatter(self.policy.collectives, gradients)
        return self.dense

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in the gradient, by rows if it is sparse and most of its rows are zero."""
        merged = self._merge_rows(gradient.detach())
        if not isinstance(merged, EmbeddingRows):
            super().put(position, merged, pool)
            return
        self.check_not_arrived(position)
        values = merged.values.to(self.wire_dtype)
        if self.wire_dtype is torch.float16:
            values = values * self.policy.scale  # the sum of many could overflow
        self.rows = EmbeddingRows(merged.numbers, values)
        self.mark_arrived(position)

    def _merge_rows(self, gradient: Tensor) -> EmbeddingRows | Tensor:
        """The merged rows of a sparse gradient, in new memory, or a dense gradient if most rows are used."""
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            return gradient
        used, values = sparse_parts(gradient)
        numbers, places = torch.unique(used, return_inverse=True)
        # Autograd's own function for dense gradients, so that repeated rows are added up in the same order.
        if 2 * len(numbers) <= self._row_count:
            return EmbeddingRows(numbers, embedding_backward(values, places, len(numbers)))
        return embedding_backward(values, used, self._row_count)

    def note_no_sync_grad(self, position: int) -> None:
        """Note a gradient that a ``no_sync()`` pass has left, and merge its rows.

        torch would store the rows of all passes one behind the other. The rows of the first pass would be in memory
        that other tensors may share.
        """
        param = self.params[position]
        assert param.grad is not None
        merged = self._merge_rows(param.grad.detach())
        if isinstance(merged, EmbeddingRows):
            merged = torch.sparse_coo_tensor(
                merged.numbers.unsqueeze(0), merged.values, param.shape, is_coalesced=True, check_invariants=False
            )
        param.grad = merged
        super().note_no_sync_grad(position)

    def start_reduction(self, pool: BufferPool, tag: int, is_last: bool) -> InFlightReduction:
        """Start sending the rows, no rows if no gradient has arrived, or dense values."""
        del is_last  # rows are received in add_up, whichever bucket this is
        if self.rows is None and self.states[0] is GradState.ARRIVED:
            self.dense.pack(pool)
        elif self.rows is None:
            values = torch.empty(0, self.width, dtype=self.wire_dtype, device=self.device)
            self.rows = EmbeddingRows(torch.empty(0, dtype=torch.int64, device=self.device), values)
        return across_replicas(RowReduction(self, self.policy.collectives, pool, tag), self.policy.replicas)

    def range_of(self, group_rank: int) -> RowRange:
        """The range of the matrix that a rank owns."""
        return RowRange(*self.plan.range_of(group_rank), self.width)

    def release_gradients(self, pool: BufferPool) -> None:
        """Release the local gradients of the pass."""
        super().release_gradients(pool)
        self.rows = None


class RowReduction:
    """The rows of one pass, or dense values, between all pairs of ranks.

    The number of rows is not known before the other ranks have sent it, so rows are received in :meth:`add_up`. The
    messages of this rank are waited for in :meth:`end`, when all ranks have reached the end of the pass. Before that,
    another rank may wait for something else.
    """

    ends_with_pass = True

    def __init__(self, bucket: RowBucket, collectives: Collectives, pool: BufferPool, tag: int) -> None:
        self._bucket, self._collectives, self._pool, self._tag = bucket, collectives, pool, tag
        here, ranks = collectives.group_rank, collectives.world_size
        others = [(here + turn) % ranks for turn in range(1, ranks)]
        self._counts = {rank: torch.empty(1, dtype=torch.int64, device=bucket.device) for rank in others}
        self._count_works = {rank: collectives.receive(self._counts[rank], rank, tag) for rank in others}
        self._sent: list[Tensor] = []  # referenced until the messages have left
        self._sends: list[Work] = []
        for rank in others:
            for part in self._outgoing(rank):
                self._sent.append(part)
                self._sends.append(collectives.send(part, rank, tag))

    def _outgoing(self, group_rank: int) -> list[Tensor]:
        """The tensors for one rank: the number of rows, then indices and values, or dense values."""
        bucket = self._bucket
        if bucket.rows is None:
            count = torch.tensor([DENSE], device=bucket.device)
            return [count, *(message.values for message in bucket.dense.messages[group_rank])]
        rows = bucket.range_of(group_rank).part_of(bucket.rows)
        return [torch.tensor([len(rows.numbers)], device=bucket.device), *rows.tensors]

    def add_up(self, target: Tensor, keep: bool) -> None:
        """Receive the other ranks' rows and add them up, rank by rank."""
        # Rows in float16 are scaled when they are put.
        scale = 1.0 if self._bucket.wire_dtype is torch.float16 else self._bucket.policy.scale
        with profile_range("onecopy.add"):
            self._add_up(target, scale, keep)

    def _add_up(self, target: Tensor, scale: float, keep: bool) -> None:
        bucket, here = self._bucket, self._collectives.group_rank
        owned = bucket.range_of(here)
        receives = {rank: self._receive_rows(rank) for rank in self._counts}
        total = torch.zeros_like(target) if keep else target.zero_()
        touched, any_dense = [], False
        for rank in range(self._collectives.world_size):
            if rank == here:
                rows = None if bucket.rows is None else owned.part_of(bucket.rows)
            else:
                rows, work = receives[rank]
                work.wait()
            if rows is not None:
                owned.add(total, rows)
                touched.append(rows.numbers)
                continue
            any_dense = True
            for message, values in self._dense_values(rank):
                total[message.owner_slice].add_(values)
        if any_dense:
            total.mul_(scale)
        elif scale != 1.0:
            owned.scale(total, torch.cat(touched).unique(), scale)
        if keep:
            target.add_(total)

    def _receive_rows(self, group_rank: int) -> tuple[EmbeddingRows | None, Work]:
        """Start receiving a rank's rows; None if the rank sends dense values."""
        self._count_works[group_rank].wait()
        count, bucket = int(self._counts[group_rank].item()), self._bucket
        if count == DENSE:
            return None, WorkGroup(())
        values = torch.empty(count, bucket.width, dtype=bucket.wire_dtype, device=bucket.device)
        rows = EmbeddingRows(torch.empty(count, dtype=torch.int64, device=bucket.device), values)
        return rows, WorkGroup(tuple(self._collectives.receive(part, group_rank, self._tag) for part in rows.tensors))

    def _dense_values(self, group_rank: int) -> Iterator[tuple[OwnerMessage, Tensor]]:
        """A rank's dense values, message by message: the next message arrives while one is added up."""
        bucket, here = self._bucket, self._collectives.group_rank
        messages = bucket.dense.messages[here]
        if group_rank == here:
            yield from ((message, message.values) for message in messages)
            return
        longest = max((message.numel for message in messages), default=0)
        memory = self._pool.take(2 * longest, bucket.wire_dtype, bucket.device)
        parts = [memory[number % 2 * longest :][: message.numel] for number, message in enumerate(messages)]
        works = [self._collectives.receive(part, group_rank, self._tag) for part in parts[:2]]
        for number, (message, part) in enumerate(zip(messages, parts, strict=True)):
            works[number].wait()
            yield message, part
            if number + 2 < len(parts):
                works.append(self._collectives.receive(parts[number + 2], group_rank, self._tag))
        self._pool.give_back(memory)

    def end(self) -> None:
        """Wait until this rank's messages have left."""
        for work in self._sends:
            work.wait()
        self._sent.clear()
