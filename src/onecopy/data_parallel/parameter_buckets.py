"""Parameters in flat buckets that are sharded among all ranks, so that nothing is packed to share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm.collectives import Collectives
from onecopy.comm.parameter_sharing import ParameterSharing
from onecopy.comm.transports import BucketSharing, SharedBucket
from onecopy.layout import BucketPlan, Layout
from onecopy.step.storage import InPlaceStorage


class ParameterBuckets(InPlaceStorage):
    """Every parameter is a view into the flat bucket of its plan; a rank's range of a bucket is sent in place.

    Attributes:
        buckets: the buckets, in the order in which the backward pass computes their gradients.
    """

    convertible = False

    def __init__(self, params: Sequence[Tensor], layout: Layout, plans: Sequence[BucketPlan]) -> None:
        self.buckets = [SharedBucket(_move_into_bucket(params, plan), plan.bounds, plan.params) for plan in plans]
        super().__init__(params, layout)

    def plan_sharing(self, collectives: Collectives) -> ParameterSharing:
        """Plan to share bucket by bucket. The forward pass reads the last buckets first, so these are sent first."""
        return BucketSharing(collectives, self.buckets[::-1])


def _move_into_bucket(params: Sequence[Tensor], plan: BucketPlan) -> Tensor:
    first = params[plan.params[0]]
    # Zeroed, because gaps between parameters and padding are sent, too.
    flat = torch.zeros(plan.padded_numel, dtype=first.dtype, device=first.device)
    for index, offset in zip(plan.params, plan.offsets, strict=True):
        param = params[index]
        view = flat.as_strided(param.shape, param.stride(), offset)
        view.copy_(param.detach())
        param.data = view
    return flat
