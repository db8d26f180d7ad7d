"""Norms of tensors that are divided among ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm.collectives import Collectives
from onecopy.common.torch_private import norms_of_each

CALL = "grad_norm() or clip_grad_norm_()"
"""The name of a call that computes norms, for errors."""


def check_defined(order: float, numel: int, what: str) -> None:
    """Raise if a norm is not defined: of infinite or negative order, for a tensor without elements.

    torch raises there, too. The size of the whole tensor decides, so that all ranks raise or none.
    """
    if numel == 0 and (math.isinf(order) or order < 0):
        raise RuntimeError(
            f"the norm of order {order} of {what} is not defined, because it has no elements; use a finite positive "
            "norm_type, or set that gradient to None"
        )


def local_norms(parts: Sequence[Tensor | None], order: float, device: torch.device) -> Tensor:
    """The norm of this rank's part of each tensor, as one tensor on ``device``; a neutral value for an empty part."""
    by_type: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for place, part in enumerate(parts):
        if part is not None and part.numel():
            by_type.setdefault((part.dtype, part.device), {})[place] = part.detach()
    neutral = math.inf if order < 0 else 0.0
    rows = []
    for (dtype, source), same in by_type.items():
        # In the parts' own dtype where it is precise enough: a conversion takes longer than the norm.
        found = norms_of_each(list(same.values()), order, torch.float32 if dtype.itemsize < 4 else None)
        by_place = dict(zip(same, found, strict=True))
        # A stack with neutral values at the other places. An index would have to be sent to the device, for which the
        # host would wait.
        missing = torch.full((), neutral, dtype=found[0].dtype, device=source)
        stacked = torch.stack([by_place.get(place, missing) for place in range(len(parts))])
        rows.append(stacked.to(device, torch.float64))
    if not rows:
        return torch.full((len(parts),), neutral, dtype=torch.float64, device=device)
    return functools.reduce(torch.minimum if order < 0 else torch.maximum, rows)


def combined_norms(collectives: Collectives, local: Tensor, order: float) -> Tensor:
    """The norms of the whole tensors, from the norms of each rank's parts. All ranks make this call together."""
    local = local.to(collectives.control_device)
    if math.isinf(order):
        # The maximum of several numbers need not be NaN where one of them is, so NaN has a row of its own.
        is_nan = local.isnan()
        sign = math.copysign(1.0, order)
        rows = torch.stack([torch.where(is_nan, -math.inf, sign * local), is_nan.to(local.dtype)])
        collectives.all_reduce(rows, CALL, largest=True).wait()
        return torch.where(rows[1] > 0, math.nan, sign * rows[0])
    powers = local if order == 0 else local.pow(order)
    collectives.all_reduce(powers, CALL).wait()
    return powers if order == 0 else powers.pow(1.0 / order)
