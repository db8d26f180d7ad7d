"""Training at every level with the guards of a step, and gradients or parameters that are spoiled on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, hook_with_zero_step, reduce_scatter_hook
from tests.support.models import small_inputs, small_model

NAME, INDEX = "2.weight", 2
"""The parameter of the small model that is spoiled, and its position among all."""

OURS: dict[str, dict[str, Any]] = {
    "level 1": {"shard_by": "parameter"},
    "level 1 by element": {"shard_by": "element"},
    "level 1 master weights": {"master_weights": True},
    "level 1 closure": {},
    "level 2": {},
    "level 3": {},
    "level 3 overlap": {},
    "overlap hook": {"overlap_with_ddp": True},
}
"""The further arguments of the optimizer at each level."""


class Training:
    """A small model, wrapped as a level needs it, and its optimizer with guards."""

    def __init__(self, level: str, mesh: Any = None, **guards: Any) -> None:
        self.closure = "closure" in level
        self.module = small_model()
        if "master weights" in level:
            self.module.to(torch.bfloat16)
        self.dtype = next(self.module.parameters()).dtype
        self.zero = ZeroRedundancyOptimizer(
            self.module.named_parameters(),
            torch.optim.AdamW,
            process_group=None if mesh is None else mesh.get_group(1),
            lr=0.01,
            **OURS[level],
            **guards,
        )
        self.model: Any
        if "level 3" in level:
            options: dict[str, Any] = {"bucket_bytes": 1000, "overlap_forward": "overlap" in level, "mesh": mesh}
            self.model = ShardedDataParallel(self.module, self.zero, **options)
        else:
            self.model = DistributedDataParallel(self.module)
        if level == "level 2":
            self.model.register_comm_hook(self.zero, reduce_scatter_hook)
        if level == "overlap hook":
            hook = hook_with_zero_step(allreduce_hook, self.model, self.zero)
            self.model.register_comm_hook(self.model.process_group, hook)

    @property
    def param(self) -> Tensor:
        """The parameter that is spoiled."""
        self.zero.wait()
        return self.module.get_parameter(NAME)

    @property
    def owner(self) -> int:
        """The group rank that owns the last element of this parameter."""
        end = self.param.numel()
        return next(shard.owner for shard in self.zero.layout.shards_of(INDEX) if shard.numel and shard.stop == end)

    def loss(self, step: int) -> Tensor:
        """This rank's loss in one step."""
        loss: Tensor = self.model(small_inputs(dist.get_rank(), step).to(self.dtype)).float().square().mean()
        return loss

    def backward(self, step: int) -> Tensor:
        self.zero.zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss

    def step(self, step: int) -> Any:
        """Make a step after a backward pass, which a closure repeats."""
        return self.zero.step(lambda: self.backward(step).item()) if self.closure else self.zero.step()

    def iterate(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.step(step)

    def values(self) -> list[Tensor]:
        """The bits of all parameters."""
        self.zero.wait()
        return [bits(param) for param in self.module.parameters()]

    def gradients(self) -> list[Tensor]:
        """The bits of this rank's gradients."""
        gradients = [getattr(param.grad, "local", param.grad) for param in self.module.parameters()]
        return [bits(gradient) for gradient in gradients if gradient is not None]

    def snapshot(self) -> list[Any]:
        """Everything that a step which is not made must leave alone."""
        state = [
            (name, bits(value) if isinstance(value, Tensor) else value)
            for param in self.module.parameters()
            for name, value in self.zero.state[param].items()
        ]
        masters = [bits(owned.tensor) for owned in self.zero.engine.inner.owned]
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in (*self.zero.param_groups, *self.zero.optim.param_groups)
        ]
        return [self.values(), self.gradients(), state, masters, groups]


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor as bytes, of which NaN are equal, too."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Spoiled:
    """Inside, a backward pass on the last rank writes a value into the last elements of two parameters' gradients."""

    def __init__(self, training: Training, value: float) -> None:
        self._params = [training.module.get_parameter(name) for name in (NAME, "2.bias")]
        self._value = value
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            self._handles = [param.register_hook(self._spoil) for param in self._params]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _spoil(self, gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[-1] = self._value
        return spoiled
