"""Mixed precision: the data types of parameters, gradients and inputs, and the conversion of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The types in which a model computes and communicates.

    Attributes:
        param_dtype: convert floating-point parameters to this type (default: leave them).
        reduce_dtype: the type in which gradients are sent and added up (default: the type of the parameters).
        master_weights: keep float32 copies of parameters in bf16 or fp16, on their owners only.
        cast_inputs: convert floating-point inputs of the model to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_weights: bool = True
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point type, got {dtype!r}")


def params_to_convert(module: nn.Module, mixed_precision: MixedPrecision) -> set[int]:
    """The identities of the parameters that get another type: floating-point ones, but not of batch normalisation.

    Batch normalisation has running averages in float32 buffers, and torch wants its parameters in the same type.
    """
    if mixed_precision.param_dtype is None:
        return set()
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    of_norms = {id(param) for part in module.modules() if isinstance(part, norms) for param in part.parameters()}
    return {
        id(param)
        for param in module.parameters()
        if param.is_floating_point() and param.dtype != mixed_precision.param_dtype and id(param) not in of_norms
    }


def convert_params(
    params: Iterable[Tensor], to_convert: set[int], mixed_precision: MixedPrecision
) -> dict[int, Tensor]:
    """Convert the parameters whose identities are in ``to_convert``; return their old values, by identity."""
    old_values = {}
    for param in params:
        if id(param) in to_convert:
            old_values[id(param)] = param.data
            param.grad = None
            param.data = param.data.to(mixed_precision.param_dtype)
    return old_values
