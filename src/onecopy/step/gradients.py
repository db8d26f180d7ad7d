"""Where a step finds its gradients: in ``param.grad``, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onecopy.layout import Layout
from onecopy.step.owned_shards import OwnedShard, gradient_range
from onecopy.step.sharded_gradient import ShardGrad


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

    def have_own_memory(self) -> bool:
        """Whether the memory of gradients is that of the owned ranges only, and not that of DDP's buckets."""
        found = [param.grad.local for param in self._params if isinstance(param.grad, ShardGrad)]
        own = [local.untyped_storage().nbytes() == local.nbytes for local in found if local.numel()]
        return self.are_sharded or (bool(own) and all(own))
