"""Parameters in flat buckets that are divided among all ranks: nothing is packed, neither to reduce nor to share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.common.flat_views import as_bytes
from onecopy.layout import BucketPlan, Layout
from onecopy.step.parameter_storage import InPlaceStorage, OwnedMemory


class ParameterBuckets(InPlaceStorage):
    """Every parameter lives in the bucket that its plan says; a rank's range of a bucket is one piece."""

    direct_bytes = 1
    convertible = False

    def __init__(self, params: Sequence[Tensor], layout: Layout, plans: Sequence[BucketPlan]) -> None:
        self.buckets = [_move_in(params, plan) for plan in plans]
        super().__init__(params, layout)
        self.pieces_of = [_pieces(plan, bucket, layout) for plan, bucket in zip(plans, self.buckets, strict=True)]
        # What a forward pass reads first lies in the last buckets, so these are sent first.
        self.ranges = tuple(piece for pieces in reversed(self.pieces_of) for piece in pieces)


def _move_in(params: Sequence[Tensor], plan: BucketPlan) -> Tensor:
    first = params[plan.params[0]]
    # Zeroed, because the gaps between parameters travel too.
    flat = torch.zeros(plan.numel, dtype=first.dtype, device=first.device)
    for index, offset in zip(plan.params, plan.offsets, strict=True):
        param = params[index]
        home = flat.as_strided(param.shape, param.stride(), offset)
        home.copy_(param.detach())
        param.data = home
    return flat


def _pieces(plan: BucketPlan, bucket: Tensor, layout: Layout) -> list[OwnedMemory]:
    pieces = []
    for owner in range(layout.world_size):
        start, stop = plan.range_of(owner)
        members = tuple(
            index
            for index, offset in zip(plan.params, plan.offsets, strict=True)
            if offset < stop and offset + layout.params[index].numel > start
        )
        if members:
            pieces.append(OwnedMemory(owner, members, as_bytes(bucket[start:stop])))
    return pieces
