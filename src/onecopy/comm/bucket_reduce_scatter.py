"""The reduction of one bucket's gradients to their owners: planned once, run in every backward pass.

The two transports do it differently: ``pairwise_reduce_scatter.py`` between pairs of ranks,
``collective_reduce_scatter.py`` with the backend's reduce-scatter. In one backward pass:

1. ``put`` takes in one parameter's gradient, without a copy where possible.
2. ``start`` packs the gradients and starts the reduction.
3. ``add_up`` of the reduction in flight writes the mean over all ranks into this rank's shard, or adds it to the shard.
4. ``end`` waits until the messages of this rank have left; ``release`` frees the local gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.layout import BucketPlan


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """The gradients of one bucket: their places, their type, and the ranks over which the mean is taken.

    Attributes:
        plan: the parameters and the range of each rank.
        params: the parameters.
        dtype: the type in which gradients are sent.
        replicas: the ranks that own the same shards in other replicas (with a mesh), or None.
        scale: the factor from the sum over all ranks, those of other replicas included, to the mean.
    """

    plan: BucketPlan
    params: Sequence[Tensor]
    dtype: torch.dtype
    replicas: Collectives | None
    scale: float

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return self.params[0].device

    @property
    def scales_before(self) -> bool:
        """Whether gradients are scaled before they are added up, because the sum of many could overflow."""
        return self.dtype is torch.float16


class InFlightReduction(Protocol):
    """A reduction that a bucket has started."""

    def add_up(self, target: Tensor, keep: bool) -> None:
        """Write the mean over all ranks into ``target``, this rank's shard; with ``keep``, add it to ``target``."""

    def end(self) -> None:
        """Wait until this rank's messages have left, and release the buffers."""


class BucketReduceScatter(Protocol):
    """Reduces the gradients of one bucket, pass after pass."""

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in the gradient of the parameter at a position. It is only read.

        Args:
            position: the position of the parameter in the bucket.
            gradient: a dense gradient without a graph; another parameter may have the same memory.
            pool: the pool that gives buffers.
        """

    def start(self, pool: BufferPool, tag: int, is_last: bool, shard: Tensor | None) -> InFlightReduction:
        """Start the reduction of the pass's gradients; gradients that were not put count as zeros.

        Args:
            pool: the pool that gives buffers.
            tag: a message tag that no other bucket of the pass has.
            is_last: whether this is the last bucket of the pass.
            shard: this rank's part of the bucket, padding included, as a target that may be written before
                ``add_up``; None if it must not be written, or has another type.
        """

    def release(self, pool: BufferPool) -> None:
        """Release the local gradients of the pass."""


class ReplicatedReduction:
    """A reduction inside one replica, whose result is added up over all replicas of a mesh.

    Args:
        reduction: the reduction in this replica.
        replicas: the ranks that own the same shards.
    """

    def __init__(self, reduction: InFlightReduction, replicas: Collectives) -> None:
        self._reduction, self._replicas = reduction, replicas

    def add_up(self, target: Tensor, keep: bool) -> None:
        """Add up in this replica, then over the replicas."""
        # Zeros, because the gaps between parameters are not written.
        total = torch.zeros_like(target)
        self._reduction.add_up(total, keep=False)
        self._replicas.all_reduce(total).wait()
        target.add_(total) if keep else target.copy_(total)

    def end(self) -> None:
        """End the reduction in this replica."""
        self._reduction.end()


def across_replicas(reduction: InFlightReduction, replicas: Collectives | None) -> InFlightReduction:
    """The reduction itself, or with a mesh the reduction over all replicas."""
    return reduction if replicas is None else ReplicatedReduction(reduction, replicas)
