"""Sharded gradients: ``param.grad`` has the parameter's shape, but holds only this rank's range.

Code that tests ``param.grad`` for None, zeroes it, scales it, unscales it with a GradScaler or takes its norm works as
with a whole gradient (all ranks must take a norm and unscale together). Every other operation raises, because a rank
has only a part of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.collectives import Collectives
from onecopy.common.torch_private import (
    ALIASING,
    FOREACH_NORM,
    NORM,
    SCALING,
    UNSCALING,
    no_torch_function,
    tensor_without_memory,
)
from onecopy.layout import Layout
from onecopy.step.owned_shards import OwnedShard
from onecopy.step.sharded_norm import check_defined, combined_norms, local_norms


class ShardGrad(Tensor):
    """A gradient that holds only this rank's range, in :attr:`local`.

    Attributes:
        local: the reduced values of the range that this rank owns, flat, in storage order (possibly empty).
        collectives: the ranks that own the other ranges.
    """

    local: Tensor
    collectives: Collectives

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, param: Tensor, collectives: Collectives) -> ShardGrad:
        """Make a tensor with the parameter's shape, type and device, without memory of its own."""
        tensor = tensor_without_memory(cls, param)
        tensor.local = local
        tensor.collectives = collectives
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardGrad({self.local.numel()} of {self.numel()} elements, {self.local})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation leaves the function out
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise RuntimeError(
                f"{func} on the gradient of a parameter under ShardedDataParallel: only this rank's range of it is "
                "here (param.grad.local). Clip with optimizer.clip_grad_norm_(), read norms with "
                "optimizer.grad_norm(), or compute what you need before backward(); move or convert a model before "
                "wrapping it"
            )
        return handler(func, args, kwargs or {})


def _local(value: Any) -> Any:
    if isinstance(value, ShardGrad):
        return value.local
    return [_local(item) for item in value] if isinstance(value, (list, tuple)) else value


def _on_locals(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation that treats all elements alike on the local ranges."""
    func(*(_local(arg) for arg in args), **kwargs)
    return None if isinstance(args[0], (list, tuple)) else args[0]


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardGrad:
    del func, kwargs
    gradient = args[0]
    return ShardGrad(gradient.local, gradient, gradient.collectives)


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the local ranges, and set ``found_inf`` on all ranks if one rank has found an infinity."""
    gradients, found_inf, inverse_scale = args
    func([gradient.local for gradient in gradients], found_inf, inverse_scale, **kwargs)
    collectives: Collectives = gradients[0].collectives
    flag = found_inf.to(collectives.control_device)
    collectives.all_reduce(flag, "GradScaler.unscale_()", largest=True).wait()
    found_inf.copy_(flag)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    del func
    gradient, order, dim = args[0], *(*args[1:], 2.0)[:1], (args[2] if len(args) > 2 else None)
    if dim is not None:
        raise RuntimeError("a norm over some dimensions of a sharded gradient is not supported")
    return _norms([gradient], float(order), kwargs.get("dtype"))[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    del func
    order = float(args[1]) if len(args) > 1 else 2.0
    return _norms(args[0], order, kwargs.get("dtype"))


def _norms(gradients: Sequence[ShardGrad], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each gradient over all ranks."""
    first, collectives = gradients[0], gradients[0].collectives
    for number, gradient in enumerate(gradients):
        check_defined(order, gradient.numel(), f"gradient {number}, of shape {tuple(gradient.shape)},")
    local = local_norms([gradient.local for gradient in gradients], order, first.device)
    norms = combined_norms(collectives, local, order)
    return list(norms.to(first.device, dtype or first.dtype))


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(SCALING, _on_locals),
    **dict.fromkeys(ALIASING, _alias),
    UNSCALING: _unscale,
    NORM: _norm,
    FOREACH_NORM: _foreach_norm,
}


class ShardedGradients:
    """The gradients of one optimizer under ``ShardedDataParallel``: this rank's ranges, in ``param.grad``.

    Attributes:
        on_zero: a function to call when gradients are zeroed.
    """

    are_sharded = True
    is_reduce_scattered = True

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = list(params)
        self._layout = layout
        self.on_zero: Callable[[], None] = lambda: None

    def clear_accumulated(self) -> None:
        """Tell the backward pass that the gradients were zeroed."""
        self.on_zero()

    def clear(self) -> None:
        """Do nothing: ``param.grad`` says whether there is a gradient."""

    def has_gradient(self) -> list[bool]:
        """Which parameters have a gradient now."""
        return [param.grad is not None for param in self._params]

    def owned_shards(self) -> dict[int, Tensor]:
        """This rank's range of each gradient, by parameter."""
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

    def owned_gradients(self, owned: Sequence[OwnedShard], layout: Layout) -> dict[int, Tensor]:
        """This rank's ranges of the gradients that exist, by parameter."""
        del layout
        gradient_shards = self.owned_shards()
        return {
            entry.shard.param: gradient_shards[entry.shard.param]
            for entry in owned
            if entry.shard.param in gradient_shards
        }

    def tensors_to_clip(self, owned: Sequence[OwnedShard], layout: Layout) -> list[Tensor]:
        """The gradients that clipping multiplies: this rank's ranges."""
        return list(self.owned_gradients(owned, layout).values())
