"""The two transports behind one interface. No other module asks which of them it has.

- ``PairwiseTransport``, for gloo and the CPU: messages between pairs of ranks, in both directions at once. gloo runs
  its own collectives one after the other, and its reduce-scatter is a whole all-reduce.
- ``CollectiveTransport``, everywhere else: the backend's all-gather and reduce-scatter, as few and as large as the
  layout allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.broadcast_sharing import BroadcastSharing
from onecopy.comm.bucket_reduce_scatter import BucketGradients, BucketReduceScatter
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collective_range_reduction import CollectiveRangeReduction
from onecopy.comm.collective_reduce_scatter import CollectiveReduceScatter
from onecopy.comm.collectives import Collectives
from onecopy.comm.gather_sharing import GatherSharing
from onecopy.comm.packing import InFlight
from onecopy.comm.pairwise_range_reduction import PairwiseRangeReduction
from onecopy.comm.pairwise_reduce_scatter import PairwiseReduceScatter
from onecopy.comm.parameter_sharing import OwnedMemory, PackBuffers, ParameterSharing
from onecopy.comm.range_reduction import GradientRange, RangeReduction
from onecopy.comm.work import Work, WorkGroup


class Transport(Protocol):
    """How parameters and gradients on one device are sent among the ranks of one group.

    Attributes:
        bucket_bytes: the default size of a bucket of ``ShardedDataParallel``.
        gradient_bytes_in_flight: another bucket of gradients is launched only while fewer bytes are in flight.
    """

    bucket_bytes: int
    gradient_bytes_in_flight: int

    def segment_bytes(self, before: int, total: int) -> int:
        """The size from which a segment of buckets, which are updated and sent together, is full.

        Args:
            before: the bytes of all segments before it, which are sent first.
            total: the bytes of all segments.
        """

    def plan_sharing(self, ranges: Sequence[OwnedMemory], direct_bytes: int, buffers: PackBuffers) -> ParameterSharing:
        """Plan the messages that share memory ranges which lie anywhere.

        Args:
            ranges: the memory that each owner sends.
            direct_bytes: memory ranges from this size on are sent in place, where the transport can do that.
            buffers: buffers for packed messages, which several plans may use in turns.
        """

    def share_bucket(self, bucket: Tensor, bounds: Sequence[int]) -> Work:
        """Start sharing a flat bucket in place: rank r sends ``[bounds[r], bounds[r + 1])`` to all others.

        Args:
            bucket: the bucket. If all ranges but the last ones are equally long, the bucket is padded so that it can be
                divided into equal parts.
            bounds: the limits of the ranks' ranges, in elements.
        """

    def plan_reduce_scatter(self, bucket: BucketGradients) -> BucketReduceScatter:
        """Plan the reduction of a bucket's gradients to their owners."""

    def plan_range_reduction(
        self, ranges: Sequence[GradientRange], dtype: torch.dtype, reduce_dtype: torch.dtype, pool: BufferPool
    ) -> RangeReduction:
        """Plan the reduce-scatter of ranges of a flat buffer, which lie anywhere.

        Args:
            ranges: the ranges, in the order of the buffer; every rank gives the same.
            dtype: the type of the buffer.
            reduce_dtype: the type in which gradients are sent and summed.
            pool: gives the buffers of reductions in flight.
        """


class PairwiseTransport:
    """Messages between pairs of ranks."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.bucket_bytes = limits.BUCKET_BYTES
        self.gradient_bytes_in_flight = limits.GRADIENT_BYTES_IN_FLIGHT

    def segment_bytes(self, before: int, total: int) -> int:
        """The first buckets go alone; then segments grow up to a fixed size."""
        del total
        return min(limits.SEGMENT_BYTES, before)

    def plan_sharing(self, ranges: Sequence[OwnedMemory], direct_bytes: int, buffers: PackBuffers) -> ParameterSharing:
        """Plan broadcasts, of large ranges in place and of small ones packed."""
        return BroadcastSharing(self._collectives, ranges, direct_bytes, buffers)

    def share_bucket(self, bucket: Tensor, bounds: Sequence[int]) -> Work:
        """Start one broadcast for each owner."""
        owners = [owner for owner in range(self._collectives.world_size) if bounds[owner] < bounds[owner + 1]]
        return WorkGroup(
            tuple(self._collectives.broadcast(bucket[bounds[owner] : bounds[owner + 1]], owner) for owner in owners)
        )

    def plan_reduce_scatter(self, bucket: BucketGradients) -> BucketReduceScatter:
        """Plan messages between pairs of ranks, of large gradients from autograd's own memory."""
        return PairwiseReduceScatter(self._collectives, bucket)

    def plan_range_reduction(
        self, ranges: Sequence[GradientRange], dtype: torch.dtype, reduce_dtype: torch.dtype, pool: BufferPool
    ) -> RangeReduction:
        """Plan the messages of every rank to every owner."""
        return PairwiseRangeReduction(self._collectives, ranges, dtype, reduce_dtype, pool)


class CollectiveTransport:
    """The backend's collectives."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.bucket_bytes = limits.bucket_bytes(collectives.world_size, pairwise=False)
        self.gradient_bytes_in_flight = 2 * self.bucket_bytes

    def segment_bytes(self, before: int, total: int) -> int:
        """Segments grow quickly, because every one is a step of the inner optimizer, with kernels of its own."""
        largest = max(self.bucket_bytes, total // limits.LARGEST_SEGMENTS)
        return min(largest, limits.COLLECTIVE_SEGMENT_GROWTH * before)

    def plan_sharing(self, ranges: Sequence[OwnedMemory], direct_bytes: int, buffers: PackBuffers) -> ParameterSharing:
        """Plan rounds of all-gathers."""
        del direct_bytes  # a copy costs less than further collectives
        return GatherSharing(self._collectives, ranges, self.bucket_bytes, buffers)

    def share_bucket(self, bucket: Tensor, bounds: Sequence[int]) -> Work:
        """Start one all-gather in place: of equal parts, or of parts with different lengths."""
        here, ranks = self._collectives.group_rank, self._collectives.world_size
        if not bucket.numel():
            return WorkGroup(())
        if bucket.numel() > bounds[-1] or are_equal(bounds):
            return self._collectives.all_gather_single(bucket, bucket.view(ranks, -1)[here])
        return self._collectives.all_gather_parts([bucket[bounds[owner] : bounds[owner + 1]] for owner in range(ranks)])

    def plan_reduce_scatter(self, bucket: BucketGradients) -> BucketReduceScatter:
        """Plan one reduce-scatter of a flat buffer."""
        return CollectiveReduceScatter(self._collectives, bucket)

    def plan_range_reduction(
        self, ranges: Sequence[GradientRange], dtype: torch.dtype, reduce_dtype: torch.dtype, pool: BufferPool
    ) -> RangeReduction:
        """Plan one reduce-scatter."""
        del dtype  # nothing is sent in place
        return CollectiveRangeReduction(self._collectives, ranges, reduce_dtype, pool)


def are_equal(bounds: Sequence[int]) -> bool:
    """Whether all ranges between the bounds are equally long."""
    return all(bound == number * bounds[1] for number, bound in enumerate(bounds))


def transport_for(collectives: Collectives, device: torch.device) -> Transport:
    """The transport for memory on a device: pairs of ranks for gloo and the CPU, else the backend's collectives."""
    return (PairwiseTransport if collectives.uses_pairwise(device) else CollectiveTransport)(collectives)


class SharingByDevice:
    """The messages for memory ranges on several devices, each planned by the transport of its device."""

    def __init__(
        self,
        collectives: Collectives,
        ranges: Sequence[OwnedMemory],
        direct_bytes: int,
        buffers: PackBuffers | None = None,
    ) -> None:
        self._buffers = PackBuffers() if buffers is None else buffers
        self._plans = [
            transport_for(collectives, device).plan_sharing(
                [each for each in ranges if each.memory.device == device], direct_bytes, self._buffers
            )
            for device in dict.fromkeys(each.memory.device for each in ranges)
        ]

    def start(self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None) -> InFlight:
        """Start sending the parameters of all owners to all ranks, and return the messages in flight."""
        in_flight = in_flight or InFlight()
        for plan in self._plans:
            plan.start(changed, in_flight)
        return in_flight

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(plan.messages for plan in self._plans)

    @property
    def staging_bytes(self) -> int:
        """The extra memory for packed messages."""
        return self._buffers.nbytes


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A flat bucket of parameters that is sharded among all ranks.

    Attributes:
        memory: the bucket, padded if its ranges are equally long.
        bounds: rank r owns ``[bounds[r], bounds[r + 1])``.
        params: the indices of the parameters.
    """

    memory: Tensor
    bounds: tuple[int, ...]
    params: tuple[int, ...]


class BucketSharing:
    """Shares flat buckets in place, each by the transport of its device."""

    staging_bytes = 0

    def __init__(self, collectives: Collectives, buckets: Sequence[SharedBucket]) -> None:
        self._buckets = [(transport_for(collectives, each.memory.device), each) for each in buckets]

    def start_works(self, changed: Sequence[bool] | None = None) -> list[Work]:
        """Start sending the buckets that have a changed parameter, or all; all ranks must choose the same."""
        return [
            transport.share_bucket(each.memory, each.bounds)
            for transport, each in self._buckets
            if changed is None or any(changed[index] for index in each.params)
        ]

    def start(self, changed: Sequence[bool] | None = None, in_flight: InFlight | None = None) -> InFlight:
        """Start sending the buckets to all ranks, and return the messages in flight."""
        in_flight = in_flight or InFlight()
        for work in self.start_works(changed):
            in_flight.add(work, self._buckets[0][1].memory, staged=False)
        return in_flight

    @property
    def messages(self) -> int:
        """The number of buckets."""
        return len(self._buckets)
