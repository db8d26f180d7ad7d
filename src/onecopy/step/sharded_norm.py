"""Norms of tensors of which each rank has a part, or none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm.collectives import Collectives


def check_defined(order: float, numel: int, what: str) -> None:
    """Raise where a norm is not defined: one of infinite or negative order of a tensor without elements.

    torch raises there too. The check is made on the whole tensor's size, so that all ranks come to the same result.
    """
    if numel == 0 and (math.isinf(order) or order < 0):
        raise RuntimeError(
            f"the norm of order {order} of {what} is not defined, because it has no elements; use a finite positive "
            "norm_type, or set that gradient to None"
        )


def local_norms(parts: Sequence[Tensor | None], order: float, device: torch.device) -> Tensor:
    """The norm of each part on this rank, and for an empty part what leaves the norm of the whole as it is."""
    neutral = torch.full((), math.inf if order < 0 else 0.0, device=device)
    norms = [neutral if part is None or not part.numel() else _norm(part.detach(), order) for part in parts]
    return torch.stack([norm.to(device) for norm in norms]).to(torch.float64)


def _norm(part: Tensor, order: float) -> Tensor:
    # In its own type where that is precise enough, because a conversion takes many times as long as the norm.
    dtype = torch.float32 if part.dtype.itemsize < 4 else None
    norm: Tensor = torch.linalg.vector_norm(part, order, dtype=dtype)
    return norm


def combined_norms(collectives: Collectives, local: Tensor, order: float) -> Tensor:
    """The norms of the whole tensors, from the norms of each rank's parts; all ranks make this call together."""
    local = local.to(collectives.control_device)
    if math.isinf(order):
        # A largest number need not be NaN where one of the numbers is, so NaN is told beside it.
        unknown = local.isnan()
        sign = math.copysign(1.0, order)
        word = torch.stack([torch.where(unknown, -math.inf, sign * local), unknown.to(local.dtype)])
        collectives.all_reduce(word, largest=True).wait()
        return torch.where(word[1] > 0, math.nan, sign * word[0])
    word = local if order == 0 else local.pow(order)
    collectives.all_reduce(word).wait()
    return word if order == 0 else word.pow(1.0 / order)
