"""A shard that this rank owns, the tensor that the inner optimizer steps for it, and its range of a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.common.torch_private import sparse_parts
from onecopy.layout import Shard
from onecopy.step.batched_copies import converted_together, start_copies_to_host, wait_for_host_copies
from onecopy.step.sharded_gradient import ShardGrad


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

    The range of a sparse gradient is made dense.

    Args:
        shard: the range.
        param: the parameter.
        name: its name, for errors.
    """
    gradient = param.grad
    if gradient is None:
        return None
    if isinstance(gradient, ShardGrad):
        return gradient.reduced(name)
    if gradient.layout is not torch.strided:
        return _dense_range(gradient, shard, param)
    return flat_like(gradient, param)[shard.start : shard.stop]


def _dense_range(gradient: Tensor, shard: Shard, param: Tensor) -> Tensor:
    if not (gradient.is_sparse and gradient.sparse_dim() == 1 and param.is_contiguous()):
        return flat_like(gradient.to_dense(), param)[shard.start : shard.stop]
    # Only the rows of the range: an embedding may be large.
    width = max(1, param[0].numel())
    first, last = shard.start // width, -(-shard.stop // width)
    numbers, rows = sparse_parts(gradient)
    inside = (numbers >= first) & (numbers < last)
    dense = torch.zeros(last - first, width, dtype=gradient.dtype, device=gradient.device)
    dense.index_add_(0, numbers[inside] - first, rows[inside].view(-1, width))
    return dense.view(-1)[shard.start - first * width : shard.stop - first * width]


def set_gradients(owned: Sequence[OwnedShard], gradients: Sequence[Tensor | None]) -> None:
    """Set the gradients of the stepped tensors, in the data type and on the device of each.

    Gradients are converted together. For tensors in CPU memory (``offload="cpu"``) the host waits once, until the
    gradients have arrived.
    """
    kinds: dict[object, list[tuple[Tensor, Tensor]]] = {}
    for entry, gradient in zip(owned, gradients, strict=True):
        tensor = entry.tensor
        # Only a copy can be on another device than its parameter.
        if gradient is None or (
            gradient.dtype == tensor.dtype and (entry.param_view is None or gradient.device == tensor.device)
        ):
            tensor.grad = gradient
        elif gradient.layout is not torch.strided:
            tensor.grad = gradient.to(tensor.device, tensor.dtype)
        else:
            # Only tensors of one kind are copied in one kernel.
            same_strides = gradient.stride() == tensor.stride()
            kind = (gradient.device, gradient.dtype, tensor.device, tensor.dtype, same_strides)
            kinds.setdefault(kind, []).append((tensor, gradient))
    sources = set()
    for pairs in kinds.values():
        tensors, found = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        if tensors[0].device != found[0].device:
            sources.add(found[0].device)
            converted = start_copies_to_host(found, tensors)
        else:
            converted = converted_together(found, tensors)
        for tensor, gradient in zip(tensors, converted, strict=True):
            tensor.grad = gradient
    for device in sources:
        wait_for_host_copies(device)


def set_flat_gradients(owned: Sequence[OwnedShard], gradient_shards: Mapping[int, Tensor]) -> None:
    """Set the gradients of the stepped tensors: flat shards in storage order, by parameter, or None."""
    gradients = []
    for entry in owned:
        gradient = gradient_shards.get(entry.shard.param)
        if gradient is not None and entry.tensor.dim() != 1:
            gradient = gradient.as_strided(entry.tensor.shape, entry.tensor.stride())
        gradients.append(gradient)
    set_gradients(owned, gradients)
