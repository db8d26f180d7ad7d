"""Where a step finds its gradients: whole in ``param.grad``, or this rank's ranges of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from onecopy.engine.flat import flat_like
from onecopy.engine.owned import Owned
from onecopy.engine.shard_grad import ShardGrad
from onecopy.layout import Layout


class Gradients(Protocol):
    """What drivers ask of either kind.

    Attributes:
        reduced: whether only owned ranges are reduced.
        accumulating: whether it is known that the last forward pass ran under ``no_sync()``.
    """

    reduced: bool
    accumulating: bool

    def forget(self) -> None:
        """Note that the gradients have been used or thrown away."""

    def forget_accumulated(self) -> None:
        """Note that they were zeroed."""

    def has_gradient(self) -> list[bool]:
        """Which parameters have a gradient now."""

    def lent(self) -> Mapping[int, Tensor] | None:
        """This rank's flat ranges by parameter, or None if the inner optimizer finds them by itself."""

    def owned(self, owned: Sequence[Owned], layout: Layout) -> dict[int, Tensor]:
        """This rank's part of the gradients that exist, by parameter."""

    def to_scale(self, owned: Sequence[Owned], layout: Layout) -> list[Tensor]:
        """What clipping multiplies."""


class FullGradients:
    """``param.grad`` is the parameter's gradient, or at least the owned range of it is."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        # Set by a hook that reduces gradients to their owners: then only owned ranges of param.grad are reduced.
        self.reduced = False
        self.accumulating = False

    def forget(self) -> None:
        """Note that the gradients have been used or thrown away."""
        self.reduced = False

    def forget_accumulated(self) -> None:
        """Nothing to note: ``param.grad`` tells."""

    def has_gradient(self) -> list[bool]:
        """Which parameters have a gradient now."""
        return [param.grad is not None for param in self._params]

    def lent(self) -> None:
        """Nothing: the inner optimizer finds them."""

    def owned(self, owned: Sequence[Owned], layout: Layout) -> dict[int, Tensor]:
        """This rank's part of the gradients that exist, by parameter."""
        found = {}
        for entry in owned:
            gradient = entry.param.grad
            if gradient is None:
                continue
            if not entry.is_cut:
                found[entry.shard.param] = gradient
            elif gradient.layout is torch.strided and (gradient.stride() == entry.param.stride() or not self.reduced):
                found[entry.shard.param] = flat_like(gradient, entry.param)[entry.shard.start : entry.shard.stop]
            else:
                raise ValueError(
                    f"the gradient of parameter {layout.params[entry.shard.param].name!r} is sparse or has other "
                    "strides than the parameter, which is cut among ranks"
                )
        return found

    def to_scale(self, owned: Sequence[Owned], layout: Layout) -> list[Tensor]:
        """Whole gradients; after a reduction to owners, the rest is not stepped on and stays as it is."""
        if self.reduced:
            return list(self.owned(owned, layout).values())
        return [param.grad for param in self._params if param.grad is not None]


class ShardedGradients:
    """This rank's ranges, in ``param.grad`` and nowhere else. One for each optimizer."""

    reduced = True

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = list(params)
        self._layout = layout
        self.accumulating = False
        self.on_zero: Callable[[], None] = lambda: None

    def forget_accumulated(self) -> None:
        """Tell whoever has set gradients aside."""
        self.on_zero()

    def forget(self) -> None:
        """Nothing to note: ``param.grad`` tells."""

    def has_gradient(self) -> list[bool]:
        """Which parameters have a gradient now."""
        return [param.grad is not None for param in self._params]

    def lent(self) -> dict[int, Tensor]:
        """This rank's ranges by parameter."""
        found = {}
        for index, param in enumerate(self._params):
            gradient = param.grad
            if isinstance(gradient, ShardGrad):
                found[index] = gradient.local
            elif gradient is not None:
                raise RuntimeError(
                    f"the gradient of parameter {self._layout.params[index].name!r} was not reduced: the last backward "
                    "pass ran under no_sync(), or something has set param.grad; let the last pass before step() "
                    "synchronise"
                )
        return found

    def owned(self, owned: Sequence[Owned], layout: Layout) -> dict[int, Tensor]:
        """This rank's part of the gradients that exist, by parameter."""
        del layout
        lent = self.lent()
        return {entry.shard.param: lent[entry.shard.param] for entry in owned if entry.shard.param in lent}

    def to_scale(self, owned: Sequence[Owned], layout: Layout) -> list[Tensor]:
        """The same."""
        return list(self.owned(owned, layout).values())
