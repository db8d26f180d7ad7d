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
from torch.autograd.graph import increment_version

from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import version_of
from onecopy.layout import ParamSpec
from onecopy.step.batched_copies import CopiesToDevice, batches

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

    @classmethod
    def of_arguments(cls, master_weights: bool, offload: str | None) -> MasterWeightPolicy:
        """Return the policy for an optimizer's arguments."""
        if offload not in (None, "cpu"):
            raise ValueError(f"offload must be None or 'cpu', got {offload!r}")
        return cls(master_weights, offload == "cpu")

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
    """A copy, its parameter, and the view of the parameter's memory that the copy belongs to."""

    param: Tensor
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
        # Copies of one kind are written or read in one call.
        kinds: dict[object, list[MasterWeight]] = {}
        for each in master_weights:
            kind = (each.copy.device, each.copy.dtype, each.param_view.device, each.param_view.dtype)
            kinds.setdefault(kind, []).append(each)
        self._kinds = list(kinds.values())
        self._to_device = CopiesToDevice()
        # By id() of each parameter: the version counter that it has if only steps have written it.
        self._versions: dict[int, int | None] = {id(each.param): None for each in master_weights}

    def write_to_params(self, everything: bool) -> None:
        """Write the values of the copies that have a gradient, or of all, into the parameters."""
        for kind in self._kinds:
            stepped = [each for each in kind if everything or each.copy.grad is not None]
            if not stepped:
                continue
            targets, copies = [each.param_view for each in stepped], [each.copy for each in stepped]
            if copies[0].device != targets[0].device:
                self._to_device.start(targets, copies)
            else:
                torch._foreach_copy_(targets, copies)

    def increment_versions(self, params: Sequence[Tensor]) -> None:
        """Increment autograd's version counter of parameters that a step has written."""
        increment_version(params)
        if self._versions:
            for param in params:
                version = self._versions.get(id(param))
                if version is not None:
                    self._versions[id(param)] = version + 1

    def forget_versions(self) -> None:
        """Compare the values of all parameters in the next step, because parameters were moved."""
        self._versions = dict.fromkeys(self._versions)

    def refresh_from_params(self, everything: bool = False) -> None:
        """Copy values that the user has written into the parameters since the last step into the copies.

        An element whose parameter still is the rounded copy keeps the copy's precision. To compare all values takes too
        long, so only parameters are compared whose version counter tells of a write, unless ``everything`` is.
        """
        for kind in self._kinds:
            written = [each for each in kind if everything or self._versions[id(each.param)] != version_of(each.param)]
            for copies, params in zip(
                batches([flat_view(each.copy) for each in written]),
                batches([flat_view(each.param_view) for each in written]),
                strict=True,
            ):
                _refresh(copies, params)
            self._versions.update((id(each.param), version_of(each.param)) for each in written)


def _refresh(copies: list[Tensor], params: list[Tensor]) -> None:
    """Write parameters into their flat copies; an element that equals the rounded copy keeps the precise value."""
    if not copies:
        return
    kept = torch.cat(copies)
    written = torch.cat(params).to(kept.device)
    values = torch.where(kept.to(written.dtype) == written, kept, written.to(kept.dtype))
    torch._foreach_copy_(copies, list(values.split([copy.numel() for copy in copies])))
