"""Master weights: copies that the inner optimizer steps in place of parameters.

A copy is needed if the parameter is in bf16 or fp16 (fp32 master weights), or if the state is to be in CPU memory. Only
the owner of a shard has a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_view
from onecopy.layout import ParamSpec

CHUNK = 1 << 18
"""Number of elements that are compared at a time: they stay in the processor's cache."""

STATE_KEY = "master_weight"
"""The key of a copy in the state of its parameter, when state is gathered or saved."""

STATE_DICT_KEY = "master_weights"
"""The entry of a state dict with the copies by parameter. Plain optimizers ignore it."""


@dataclass(frozen=True, slots=True)
class MasterWeightPolicy:
    """Which parameters are stepped through a copy.

    Attributes:
        fp32_copies: keep fp32 copies of parameters in bf16 or fp16.
        offload: keep copies, and with them all optimizer state, in CPU memory.
    """

    fp32_copies: bool = False
    offload: bool = False

    @property
    def any(self) -> bool:
        """Whether some parameter may have a copy."""
        return self.fp32_copies or self.offload

    def applies_to(self, param: Tensor) -> bool:
        """Whether this parameter is stepped through a copy."""
        return (self.fp32_copies and _is_half(param.dtype)) or (self.offload and param.device.type != "cpu")

    def stepped_dtypes(self, params: Iterable[ParamSpec]) -> list[tuple[int, torch.dtype]]:
        """The group of each parameter, and the dtype in which it is stepped."""
        return [(param.group, self._dtype_of(param.dtype)) for param in params]

    def copy_of(self, param_view: Tensor) -> Tensor:
        """A copy of an owned range, in the dtype and on the device of the policy."""
        dtype = self._dtype_of(param_view.dtype)
        return param_view.detach().to("cpu" if self.offload else param_view.device, dtype, copy=True)

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.fp32_copies and _is_half(dtype) else dtype


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


@dataclass(frozen=True, slots=True)
class MasterWeight:
    """A copy, and the view of the parameter's memory that it belongs to."""

    copy: Tensor
    param_view: Tensor


def split_master_weights(state: dict[int, dict[Any, Any]]) -> tuple[dict[int, dict[Any, Any]], dict[int, Tensor]]:
    """State by parameter without the copies, which a plain optimizer does not know, and the copies."""
    copies = {index: value[STATE_KEY] for index, value in state.items() if STATE_KEY in value}
    without = {index: {key: item for key, item in value.items() if key != STATE_KEY} for index, value in state.items()}
    return {index: value for index, value in without.items() if value or index not in copies}, copies


class MasterWeights:
    """All copies of one rank."""

    def __init__(self, master_weights: Sequence[MasterWeight]) -> None:
        self._master_weights = list(master_weights)

    def write_to_params(self, everything: bool) -> None:
        """Write the values of the copies that have a gradient, or of all, into the parameters."""
        stepped = [each for each in self._master_weights if everything or each.copy.grad is not None]
        if stepped:
            torch._foreach_copy_([each.param_view for each in stepped], [each.copy for each in stepped])

    def refresh_from_params(self) -> None:
        """Copy values that the user has written into the parameters since the last step into the copies.

        An element whose parameter still is the rounded copy keeps the copy's precision. The values are compared,
        because writes through ``param.data`` leave no other trace.
        """
        for each in self._master_weights:
            copies, params = flat_view(each.copy).split(CHUNK), flat_view(each.param_view).split(CHUNK)
            for copy, param in zip(copies, params, strict=True):
                written = param.to(copy.device)
                rounded = copy.to(written.dtype)
                if copy.device.type != "cpu" or not torch.equal(rounded, written):
                    copy.copy_(torch.where(rounded == written, copy, written.to(copy.dtype)))
