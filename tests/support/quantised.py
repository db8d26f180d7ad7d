"""A tensor subclass that consists of other tensors, and an optimizer with state of this class, as torchao has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BLOCK = 64
SMALL = 256
"""Parameters with fewer elements are kept in 32 bit."""


class Int8Blocks(Tensor):
    """A tensor of int8 codes with one scale per block. No operator works on it."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Int8Blocks:
        made: Int8Blocks = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.shape, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: list[Any], _size: Any, _stride: Any) -> Int8Blocks:
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} on {cls.__name__}")

    @classmethod
    def of(cls, values: Tensor) -> Int8Blocks:
        """Quantise a tensor."""
        blocks = values.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-12) / 127
        return cls((blocks / scale[:, None]).round().to(torch.int8), scale, values.shape, values.dtype)

    def values(self) -> Tensor:
        """The values as an ordinary tensor."""
        return (self.codes.to(self.scale.dtype) * self.scale[:, None]).reshape(self.shape)


class UnregisteredBlocks(Int8Blocks):
    """A class that is not among torch's safe globals."""


torch.serialization.add_safe_globals([Int8Blocks])


class BlockMomentum(Optimizer):
    """SGD with a momentum that is quantised in blocks, except for small parameters."""

    kind: type[Int8Blocks] = Int8Blocks

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                old = state.get("momentum", torch.zeros_like(param))
                new = (old.values() if isinstance(old, Int8Blocks) else old) * 0.9 + param.grad
                state["step"] = state.get("step", 0) + 1
                quantised = param.numel() >= SMALL and param.numel() % BLOCK == 0
                state["momentum"] = self.kind.of(new) if quantised else new
                param.sub_(new, alpha=group["lr"])


class UnregisteredMomentum(BlockMomentum):
    """Has state of a class that is not among torch's safe globals."""

    kind = UnregisteredBlocks


class Momentum8bit(BlockMomentum):
    """Has the name of a class with quantised state."""
