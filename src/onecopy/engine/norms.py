"""The norm of all gradients, and clipping by it, from what each rank owns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from onecopy.engine.agreement import agree
from onecopy.engine.core import Engine


def total_norm(engines: Sequence[Engine], norm_type: float) -> Tensor:
    """The norm of all gradients of all engines; every rank makes this call and gets the same number."""
    collectives = engines[0].collectives
    mine: list[Tensor] = []
    failure: Exception | None = None
    try:
        mine = [
            gradient for engine in engines for gradient in engine.gradients.owned(engine.local.owned, engine.layout)
        ]
    except Exception as error:
        failure = error
    if not collectives.reads_late:
        agree(collectives, "the norm of the gradients", [], failure)
    elif failure is not None:
        raise failure
    local = get_total_norm(mine, norm_type).to(collectives.control_device, torch.float64)
    double = any(spec.dtype.itemsize >= 8 for engine in engines for spec in engine.layout.params)
    dtype = torch.float64 if double else torch.float32
    if math.isinf(norm_type):
        word = local.reshape(1)
        collectives.all_reduce(word, largest=True).wait()
        return word[0].to(dtype)
    word = local.pow(norm_type).reshape(1)
    collectives.all_reduce(word).wait()
    return word[0].pow(1.0 / norm_type).to(dtype)


def clip(engines: Sequence[Engine], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; return the norm they had."""
    norm = total_norm(engines, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {norm.item()}, not finite")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for engine in engines:
        for gradient in engine.gradients.to_scale(engine.local.owned, engine.layout):
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        engine.note_scaled()
    return norm
