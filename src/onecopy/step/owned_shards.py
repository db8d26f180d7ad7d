"""A shard that this rank owns, the tensor that the inner optimizer steps for it, and its range of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.layout import Shard


@dataclass(frozen=True, slots=True)
class OwnedShard:
    """A shard of this rank, its parameter, and the tensor that the inner optimizer steps.

    The stepped tensor is the parameter itself, a view of its memory, or a copy (a master weight).

    Attributes:
        shard: the owned range.
        param: the parameter.
        tensor: the stepped tensor.
        param_view: for a copy, the view of the parameter into which its values are written after each step.
    """

    shard: Shard
    param: Tensor
    tensor: Tensor
    param_view: Tensor | None = None

    @property
    def is_separate(self) -> bool:
        """Whether the stepped tensor is not the parameter itself, and so has a gradient of its own."""
        return self.tensor is not self.param

    @property
    def is_cut(self) -> bool:
        """Whether the rank owns only a part of the parameter."""
        return self.shard.numel != self.param.numel()

    def bind_gradient(self, shard: Tensor | None) -> None:
        """Set the stepped tensor's gradient from a flat shard in storage order, or to None."""
        if shard is not None and self.tensor.dim() != 1:
            shard = shard.as_strided(self.tensor.shape, self.tensor.stride())
        if shard is not None and (self.param_view is not None or shard.dtype != self.tensor.dtype):
            shard = converted(shard, self.tensor)
        self.tensor.grad = shard


MakeSteppedTensor = Callable[[Shard, Tensor, Tensor], Tensor]
"""Makes the stepped tensor from a shard, its parameter and the parameter's flat memory."""


def separate_view(shard: Shard, param: Tensor, flat: Tensor) -> Tensor:
    """A new tensor over the owned memory. Its gradient can be set while autograd is running."""
    whole = shard.numel == param.numel()
    view = flat.as_strided(param.shape, param.stride()) if whole else flat[shard.start : shard.stop]
    # Not an autograd view: that would keep the old memory alive after the parameter has moved.
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def param_or_view(shard: Shard, param: Tensor, flat: Tensor) -> Tensor:
    """The parameter itself where the rank owns all of it, so that ``optim.state`` has it as its key; else a view."""
    return param if shard.numel == param.numel() else separate_view(shard, param, flat)


def gradient_range(shard: Shard, param: Tensor, name: str) -> Tensor | None:
    """The range of ``param.grad`` that belongs to a shard, flat and in storage order; None without a gradient.

    Raises:
        ValueError: for a sparse gradient; ``name`` is the parameter's name.
    """
    gradient = param.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"parameter {name!r} has a sparse gradient, of which the range of rank {shard.owner} cannot be taken: make "
            "the gradient dense, or, if the parameter is cut among ranks, keep parameters whole with elementwise=False "
            "(and shard_by='parameter')"
        )
    return flat_like(gradient, param)[shard.start : shard.stop]


def converted(gradient: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in the dtype and on the device of the stepped tensor."""
    return gradient.to(tensor.device, tensor.dtype)
