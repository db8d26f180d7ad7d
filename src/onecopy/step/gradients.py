"""Where a step finds its gradients: whole in ``param.grad``, or this rank's ranges of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.layout import Layout
from onecopy.step.owned_shards import OwnedShard


class Gradients(Protocol):
    """What drivers ask of either kind.

    Attributes:
        reduced: whether only owned ranges are reduced.
        accumulating: whether it is known that the last forward pass ran under ``no_sync()``.
    """

    is_reduce_scattered: bool
    accumulating: bool

    def forget(self) -> None:
        """Note that the gradients have been used or thrown away."""

    def forget_accumulated(self) -> None:
        """Note that they were zeroed."""

    def has_gradient(self) -> list[bool]:
        """Which parameters have a gradient now."""

    def owned_shards(self) -> Mapping[int, Tensor] | None:
        """This rank's flat ranges by parameter, or None if the inner optimizer finds them by itself."""

    def owned_gradients(self, owned: Sequence[OwnedShard], layout: Layout) -> dict[int, Tensor]:
        """This rank's part of the gradients that exist, by parameter."""

    def to_scale(self, owned: Sequence[OwnedShard], layout: Layout) -> list[Tensor]:
        """What clipping multiplies."""


class FullGradients:
    """``param.grad`` is the parameter's gradient, or at least the owned range of it is."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        # Set by a hook that reduces gradients to their owners: then only owned ranges of param.grad are reduced.
        self.is_reduce_scattered = False
        self.accumulating = False

    def forget(self) -> None:
        """Note that the gradients have been used or thrown away."""
        self.is_reduce_scattered = False

    def forget_accumulated(self) -> None:
        """Nothing to note: ``param.grad`` tells."""

    def has_gradient(self) -> list[bool]:
        """Which parameters have a gradient now."""
        return [param.grad is not None for param in self._params]

    def owned_shards(self) -> None:
        """Nothing: the inner optimizer finds them."""

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

    def to_scale(self, owned: Sequence[OwnedShard], layout: Layout) -> list[Tensor]:
        """Whole gradients; after a reduction to owners, the rest is not stepped on and stays as it is."""
        if self.is_reduce_scattered:
            return list(self.owned_gradients(owned, layout).values())
        return [param.grad for param in self._params if param.grad is not None]
