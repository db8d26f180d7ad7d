"""Where a step finds its gradients: whole in ``param.grad``, or as the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from onecopy.layout import Layout
from onecopy.step.owned_shards import OwnedShard, gradient_range


class Gradients(Protocol):
    """The gradients of one optimizer's parameters.

    Attributes:
        are_sharded: whether ``param.grad`` has memory for the owned range only.
        is_reduce_scattered: whether only the owned ranges are reduced.
    """

    are_sharded: bool
    is_reduce_scattered: bool

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

    are_sharded = False

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self.is_reduce_scattered = False  # the reduce-scatter hook sets it

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
            name, gradient = layout.params[entry.shard.param].name, entry.param.grad
            if entry.is_cut and gradient is not None:
                owned_range = gradient_range(entry.shard, entry.param, name)
                if self.is_reduce_scattered and gradient.stride() != entry.param.stride():
                    # A range would be a copy, and clipping would change the copy only.
                    raise ValueError(
                        f"the gradient of parameter {name!r}, which is cut among ranks, has other strides than the "
                        "parameter: do not replace param.grad after the reduce-scatter hook"
                    )
                gradient = owned_range
            if gradient is not None:
                found[entry.shard.param] = gradient
        return found

    def tensors_to_clip(self, owned: Sequence[OwnedShard], layout: Layout) -> list[Tensor]:
        """Whole gradients. After the reduce-scatter hook only the owned ranges, because a step uses no others."""
        if self.is_reduce_scattered:
            return list(self.owned_gradients(owned, layout).values())
        return [param.grad for param in self._params if param.grad is not None]
