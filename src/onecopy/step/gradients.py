"""The shards that this rank owns, and where a step finds their gradients: in ``param.grad``, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.common.torch_private import sparse_parts
from onecopy.layout import Layout, Shard
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
        is_cut: whether the rank owns only a part of the parameter.
    """

    shard: Shard
    param: Tensor
    tensor: Tensor
    param_view: Tensor | None = None
    is_cut: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_cut", self.shard.numel != self.param.numel())

    @property
    def is_separate(self) -> bool:
        """Whether the stepped tensor is not the parameter itself, and so has a gradient of its own."""
        return self.tensor is not self.param


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

    The range of a sparse gradient is made dense. The name of the parameter is for errors.
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


class Gradients:
    """The gradients of one optimizer's parameters.

    They are whole without a reduction of ours, sharded under ``ShardedDataParallel``, and either under DDP with the
    reduce-scatter hook: whole before the reduction, sharded after it.

    Attributes:
        are_sharded: whether they are always sharded. Then a whole gradient was not reduced.
        without_inputs: this rank's reduced gradients by parameter, after a reduction in which it had run out of inputs.
        on_zero: a function to call when gradients are zeroed.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout, are_sharded: bool = False) -> None:
        self._params = params
        self.layout = layout
        self.are_sharded = are_sharded
        self.without_inputs: dict[int, Tensor] = {}
        self.on_zero: Callable[[], None] = lambda: None

    @property
    def is_reduce_scattered(self) -> bool:
        """Whether only the owned ranges are reduced."""
        return bool(self.without_inputs) or any(isinstance(param.grad, ShardGrad) for param in self._params)

    def has_gradient(self) -> list[bool]:
        """Whether each parameter has a gradient now."""
        return [param.grad is not None for param in self._params]

    def owned(self, owned: Sequence[OwnedShard]) -> dict[int, Tensor]:
        """This rank's part of each gradient that exists, by parameter: a flat range, or a whole sparse gradient."""
        for spec, param in zip(self.layout.params, self._params, strict=True) if self.are_sharded else ():
            if param.grad is not None and not isinstance(param.grad, ShardGrad):
                raise RuntimeError(
                    f"the gradient of parameter {spec.name!r} was not reduced: the last backward pass ran under "
                    "no_sync(), or something has set param.grad; let the last pass before step() synchronise"
                )
        found = {}
        for entry in owned:
            gradient, name = entry.param.grad, self.layout.params[entry.shard.param].name
            if entry.is_cut or (gradient is not None and gradient.layout is torch.strided):
                gradient = gradient_range(entry.shard, entry.param, name)
            if gradient is not None:
                found[entry.shard.param] = gradient
        return found
