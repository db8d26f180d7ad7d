"""The norm of all gradients, and clipping by it, from what each rank owns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from onecopy.engine.agreement import agree
from onecopy.engine.core import Engine
from onecopy.engine.flat import flat_like


def total_norm(engines: Sequence[Engine], norm_type: float) -> Tensor:
    """The norm of all gradients of all engines; every rank makes this call and gets the same number."""
    collectives = engines[0].collectives
    mine: list[Tensor] = []
    failure: Exception | None = None
    try:
        mine = [gradient for engine in engines for gradient in owned_gradients(engine)]
    except Exception as error:
        failure = error
    agree(collectives, "the norm of the gradients", [], failure)
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
        # Where gradients were reduced to their owners, the rest of param.grad is not stepped on and stays as it is.
        gradients = (
            owned_gradients(engine)
            if engine.gradients_reduced
            else [param.grad for param in engine.params if param.grad is not None]
        )
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def owned_gradients(engine: Engine) -> list[Tensor]:
    """This rank's ranges of the gradients that exist."""
    found = []
    for owned in engine.local.owned:
        gradient = owned.param.grad
        if gradient is None:
            continue
        if not owned.is_cut:
            found.append(gradient)
        elif gradient.layout is torch.strided and (
            gradient.stride() == owned.param.stride() or not engine.gradients_reduced
        ):
            found.append(flat_like(gradient, owned.param)[owned.shard.start : owned.shard.stop])
        else:
            raise ValueError(
                f"the gradient of parameter {engine.layout.params[owned.shard.param].name!r} is sparse or has "
                "other strides than the parameter, which is cut among ranks"
            )
    return found
