"""Where a step finds its gradients: whole in ``param.grad``, or as the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.layout import Layout
from onecopy.step.owned_shards import OwnedShard


class Gradients(Protocol):
    """The gradients of one optimizer's parameters.

    Attributes:
        is_reduce_scattered: whether only the owned ranges are reduced.
        accumulating: whether the last forward pass is known to have run under ``no_sync()``.
    """

    is_reduce_scattered: bool
    accumulating: bool

    def clear(self) -> None:
        """Note that a step has used the gradients, or that they were zeroed."""

    def clear_accumulated(self) -> None:
        """Note that the gradients were zeroed."""

    def has_gradient(self) -> list[bool]:
        """Whether each parameter has a gradient now."""

    def owned_shards(self) -> Mapping[int, Tensor] | None:
        """The flat gradient of each owned shard by parameter, or None if the step uses ``param.grad``."""

    def owned_gradients(self, owned: Sequence[OwnedShard], layout: Layout) -> dict[int, Tensor]:
        """This rank's part of the gradients that exist, by parameter."""

    def tensors_to_clip(self, owned: Sequence[OwnedShard], layout: Layout) -> list[Tensor]:
        """The tensors that clipping multiplies."""


class FullGradients:
    """``param.grad`` is the whole gradient. After the reduce-scatter hook only its owned range is reduced."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self.is_reduce_scattered = False  # the reduce-scatter hook sets it
        self.accumulating = False

    def clear(self) -> None:
        """Note that a step has used the gradients, or that they were zeroed."""
        self.is_reduce_scattered = False

    def clear_accumulated(self) -> None:
        """Do nothing: ``param.grad`` shows whether gradients were zeroed."""

    def has_gradient(self) -> list[bool]:
        """Whether each parameter has a gradient now."""
        return [param.grad is not None for param in self._params]

    def owned_shards(self) -> None:
        """None: the step uses ``param.grad``."""

    def owned_gradients(self, owned: Sequence[OwnedShard], layout: Layout) -> dict[int, Tensor]:
        """This rank's part of the gradients that exist, by parameter."""
        found = {}
        for entry in owned:
            gradient = entry.param.grad
            if gradient is None:
                continue
            if not entry.is_cut:
                found[entry.shard.param] = gradient
            elif gradient.layout is torch.strided and (
                gradient.stride() == entry.param.stride() or not self.is_reduce_scattered
            ):
                found[entry.shard.param] = flat_like(gradient, entry.param)[entry.shard.start : entry.shard.stop]
            else:
                raise ValueError(
                    f"the gradient of parameter {layout.params[entry.shard.param].name!r} is sparse or has other "
                    "strides than the parameter, which is cut among ranks"
                )
        return found

    def tensors_to_clip(self, owned: Sequence[OwnedShard], layout: Layout) -> list[Tensor]:
        """Whole gradients. After the reduce-scatter hook only the owned ranges, because a step uses no others."""
        if self.is_reduce_scattered:
            return list(self.owned_gradients(owned, layout).values())
        return [param.grad for param in self._params if param.grad is not None]
