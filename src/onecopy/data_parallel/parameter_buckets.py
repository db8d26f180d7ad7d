"""Parameters in flat buckets that are sharded among all ranks, so that nothing is packed to share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm.parameter_sharing import OwnedMemory
from onecopy.common.flat_views import as_bytes
from onecopy.layout import BucketPlan, Layout
from onecopy.step.parameter_storage import InPlaceStorage


class ParameterBuckets(InPlaceStorage):
    """Every parameter is a view into the flat bucket of its plan; a rank's range of a bucket is sent in place.

    Attributes:
        buckets: the flat memory of each bucket.
        ranges_by_bucket: for each bucket, the range of each owner.
    """

    direct_bytes = 1
    convertible = False

    def __init__(self, params: Sequence[Tensor], layout: Layout, plans: Sequence[BucketPlan]) -> None:
        self.buckets = [_move_into_bucket(params, plan) for plan in plans]
        super().__init__(params, layout)
        self.ranges_by_bucket = [
            _owned_ranges(plan, bucket, layout) for plan, bucket in zip(plans, self.buckets, strict=True)
        ]
        # The forward pass reads the parameters of the last buckets first, so these are sent first.
        self.ranges = tuple(owned for ranges in reversed(self.ranges_by_bucket) for owned in ranges)


def _move_into_bucket(params: Sequence[Tensor], plan: BucketPlan) -> Tensor:
    first = params[plan.params[0]]
    # Zeroed, because the gaps between parameters are sent too.
    flat = torch.zeros(plan.numel, dtype=first.dtype, device=first.device)
    for index, offset in zip(plan.params, plan.offsets, strict=True):
        param = params[index]
        view = flat.as_strided(param.shape, param.stride(), offset)
        view.copy_(param.detach())
        param.data = view
    return flat


def _owned_ranges(plan: BucketPlan, bucket: Tensor, layout: Layout) -> list[OwnedMemory]:
    """Each owner's range of a bucket, with the parameters in it; owners without parameters are left out."""
    ranges = []
    for owner in range(layout.world_size):
        start, stop = plan.range_of(owner)
        members = tuple(
            index
            for index, offset in zip(plan.params, plan.offsets, strict=True)
            if offset < stop and offset + layout.params[index].numel > start
        )
        if members:
            ranges.append(OwnedMemory(owner, members, as_bytes(bucket[start:stop]), bucket.element_size()))
    return ranges
