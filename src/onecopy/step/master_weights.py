"""Where the inner optimizer keeps the values it steps: in the parameters, or in copies of its own.

A copy is needed where the parameter is too coarse (bf16 with fp32 master weights) or elsewhere (state in CPU memory).
It exists on the owner only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_view

CHUNK = 1 << 18
"""Elements that are compared at a time: they stay in the processor's cache."""

STATE_KEY = "master_weight"
"""The name of a copy among its parameter's state, on the way."""

STATE_DICT_KEY = "master_weights"
"""The entry of a state dict that holds the copies by parameter, beside ``state``, where plain optimizers ignore it."""


@dataclass(frozen=True, slots=True)
class MasterWeightPolicy:
    """Which parameters get a copy.

    Attributes:
        precise: keep float32 copies of parameters in bf16 or fp16.
        offload: keep copies, and with them all optimizer state, on the CPU.
    """

    fp32_copies: bool = False
    offload: bool = False

    @property
    def any(self) -> bool:
        """Whether some parameter might."""
        return self.fp32_copies or self.offload

    def applies_to(self, param: Tensor) -> bool:
        """Whether this parameter is stepped through a copy."""
        coarse = param.is_floating_point() and param.dtype.itemsize < 4
        return (self.fp32_copies and coarse) or (self.offload and param.device.type != "cpu")

    def copy_of(self, param_view: Tensor) -> Tensor:
        """A copy of an owned range."""
        dtype = (
            torch.float32
            if self.fp32_copies and param_view.is_floating_point() and param_view.dtype.itemsize < 4
            else param_view.dtype
        )
        return param_view.detach().to("cpu" if self.offload else param_view.device, dtype, copy=True)


@dataclass(frozen=True, slots=True)
class MasterWeight:
    """A copy, and the memory of the parameter whose values it refines."""

    copy: Tensor
    param_view: Tensor


def split_masters(state: dict[int, dict[Any, Any]]) -> tuple[dict[int, dict[Any, Any]], dict[int, Tensor]]:
    """State by parameter without the copies, and the copies: a plain optimizer would not know what they are."""
    masters = {index: value[STATE_KEY] for index, value in state.items() if STATE_KEY in value}
    without = {index: {key: item for key, item in value.items() if key != STATE_KEY} for index, value in state.items()}
    return {index: value for index, value in without.items() if value or index not in masters}, masters


class MasterWeights:
    """All copies of one rank, kept in step with what others write into the parameters."""

    def __init__(self, masters: Sequence[MasterWeight]) -> None:
        self.masters = list(masters)

    def write_to_params(self, everything: bool) -> None:
        """After a step: give the homes the copies' new values, rounded (those with a gradient, or all)."""
        stepped = [master for master in self.masters if everything or master.copy.grad is not None]
        if stepped:
            torch._foreach_copy_([master.param_view for master in stepped], [master.copy for master in stepped])

    def refresh_from_params(self) -> None:
        """Where someone has written into a parameter since the last step, its value replaces the copy's.

        Elements whose parameter is still the rounded copy keep the copy's precision. Values are compared, because
        writes through ``param.data`` leave no other trace.
        """
        for master in self.masters:
            copies, param_views = flat_view(master.copy).split(CHUNK), flat_view(master.param_view).split(CHUNK)
            for copy, param_view in zip(copies, param_views, strict=True):
                written = param_view.to(copy.device)
                rounded = copy.to(written.dtype)
                if copy.device.type != "cpu" or not torch.equal(rounded, written):
                    copy.copy_(torch.where(rounded == written, copy, written.to(copy.dtype)))
