"""What this rank owns of a parameter, and the tensor that the inner optimizer steps for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.layout import Shard


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard of this rank, its parameter, and the tensor that the inner optimizer steps for it.

    That tensor is the parameter itself, an alias of its memory (flat if only a range is owned), or a copy whose values
    go ``home``, to such an alias, after each step.
    """

    shard: Shard
    param: Tensor
    tensor: Tensor
    param_view: Tensor | None = None

    @property
    def is_alias(self) -> bool:
        """Whether the stepped tensor is another one than the parameter, with a gradient of its own."""
        return self.tensor is not self.param

    @property
    def is_cut(self) -> bool:
        """Whether the rank owns only a part."""
        return self.shard.numel != self.param.numel()

    def bind(self, range_: Tensor | None) -> None:
        """Give the stepped tensor a gradient, from a flat range in storage order, or none."""
        if range_ is not None and self.tensor.dim() != 1:
            range_ = range_.as_strided(self.tensor.shape, self.tensor.stride())
        if range_ is not None and (self.param_view is not None or range_.dtype != self.tensor.dtype):
            range_ = converted(range_, self.tensor)
        self.tensor.grad = range_


Stepped = Callable[[Shard, Tensor, Tensor], Tensor]
"""From a shard, its parameter and the parameter's flat memory to the tensor that the inner optimizer steps."""


def alias(shard: Shard, param: Tensor, flat: Tensor) -> Tensor:
    """Always another tensor over the owned memory. Its gradient is free to be set while autograd is running."""
    whole = shard.numel == param.numel()
    view = flat.as_strided(param.shape, param.stride()) if whole else flat[shard.start : shard.stop]
    # Not a view: that would keep the memory it was made from alive after the parameter has moved.
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def parameter_or_alias(shard: Shard, param: Tensor, flat: Tensor) -> Tensor:
    """The parameter itself where the rank owns all of it, so that its state is found where people look for it."""
    return param if shard.numel == param.numel() else alias(shard, param, flat)


def converted(gradient: Tensor, tensor: Tensor) -> Tensor:
    """A gradient of the type that the stepped tensor has (a master weight is finer than its parameter)."""
    return gradient.to(tensor.device, tensor.dtype)
