"""A bucket's reduce-scatter by the backend: one copy into a flat buffer, one collective, at most one kernel more.

Gradients are kept by reference until the bucket is full. Then one call copies all of them into a buffer of the pool,
in the type in which they are sent, and they are released. The sum arrives in the shard itself where nothing else is
there. The buffer is reused by a stream that has waited for the collective.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from onecopy.comm.bucket_reduce_scatter import BucketGradients, InFlightReduction
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.side_stream import UsedStreams
from onecopy.comm.work import Work, WorkGroup
from onecopy.common.flat_views import flat_like
from onecopy.common.profiler_ranges import profile_range
from onecopy.common.torch_private import zero_each


class CollectiveReduceScatter:
    """Reduces one bucket by the backend's reduce-scatter.

    Args:
        collectives: the ranks among which the bucket is sharded.
        bucket: the gradients of the bucket.
    """

    def __init__(self, collectives: Collectives, bucket: BucketGradients) -> None:
        self._collectives, self._bucket = collectives, bucket
        # The backend's mean is over the ranks of one replica only.
        self._averages = collectives.averages and bucket.replicas is None
        self._scales_before = bucket.scales_before and not self._averages
        self._gradients: dict[int, Tensor] = {}  # of the current pass, by position, flat
        self._streams = UsedStreams(bucket.device)  # on which the gradients were computed
        # A buffer is cut into parameters and gaps; the piece of each parameter that has elements, by position.
        self._pieces: list[int] = []
        self._piece_of: dict[int, int] = {}
        end = 0
        for position, (param, offset) in enumerate(zip(bucket.params, bucket.plan.offsets, strict=True)):
            self._pieces += [offset - end, param.numel()]
            if param.numel():
                self._piece_of[position] = len(self._pieces) - 1
            end = offset + param.numel()
        self._pieces.append(bucket.plan.padded_numel - end)

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Keep a gradient by reference; a gradient with other strides than its parameter is copied."""
        del pool
        if gradient.is_conj() or gradient.is_neg():
            gradient = gradient.resolve_conj().resolve_neg()
        self._gradients[position] = flat_like(gradient, self._bucket.params[position])
        self._streams.note()

    def start(self, pool: BufferPool, tag: int, is_last: bool, shard: Tensor | None) -> InFlightReduction:
        """Copy the gradients into one buffer, release them, and start the collective."""
        del tag, is_last  # collectives run in the order of their launch
        bucket, plan, collectives = self._bucket, self._bucket.plan, self._collectives
        buffer = self._pack(pool)
        result = shard
        if result is None or bucket.replicas is not None:
            result = pool.take(plan.padded_part(collectives.group_rank), bucket.dtype, bucket.device)
        work: Work = WorkGroup(())
        if plan.equal and buffer.numel():
            work = collectives.reduce_scatter_single(result, buffer, self._averages)
        elif buffer.numel():
            parts = buffer.split([stop - start for start, stop in pairwise(plan.bounds)])
            work = collectives.reduce_scatter_parts(result, parts, self._averages)
        if bucket.replicas is not None:
            work = bucket.replicas.all_reduce_after(work, result)
        scale = 1.0 if self._averages or self._scales_before else bucket.scale
        return CollectiveReduction(work, buffer, result, scale, pool)

    def _pack(self, pool: BufferPool) -> Tensor:
        """A buffer with all gradients, and zeros for missing ones. Nothing reads the gaps between them."""
        bucket = self._bucket
        buffer = pool.take(bucket.plan.padded_numel, bucket.dtype, bucket.device)
        pieces = buffer.split(self._pieces)
        present = [position for position in self._piece_of if position in self._gradients]
        missing = [pieces[piece] for position, piece in self._piece_of.items() if position not in self._gradients]
        self._streams.join()
        if present:
            torch._foreach_copy_(
                [pieces[self._piece_of[position]] for position in present],
                [self._gradients[position] for position in present],
            )
        if missing:
            zero_each(missing)
        if self._scales_before:
            buffer.mul_(bucket.scale)
        self._streams.release()
        self._gradients.clear()
        return buffer

    def release(self, pool: BufferPool) -> None:
        """Release gradients of a pass that was interrupted."""
        del pool
        self._streams.release()
        self._gradients.clear()


class CollectiveReduction:
    """The backend's reduce-scatter of one bucket in one backward pass.

    Args:
        work: the collective.
        buffer: the buffer that it reads.
        result: the memory that it writes: this rank's shard itself, or a buffer of the pool.
        scale: the factor that is still missing in the result.
        pool: the pool of the buffers.
    """

    def __init__(self, work: Work, buffer: Tensor, result: Tensor, scale: float, pool: BufferPool) -> None:
        self._work, self._buffer, self._result, self._scale, self._pool = work, buffer, result, scale, pool

    def add_up(self, target: Tensor, keep: bool) -> None:
        """Make the current stream wait, and scale the result where the backend has not done it."""
        self._work.wait()
        with profile_range("onecopy.add"):
            result = self._result[: target.numel()]
            if keep:
                target.add_(result, alpha=self._scale)
                return
            if result.data_ptr() != target.data_ptr():
                target.copy_(result)
            if self._scale != 1.0:
                target.mul_(self._scale)

    def end(self) -> None:
        """Give the buffers back to the pool; the shard itself is not one of them."""
        self._pool.give_back(self._buffer, self._result)
