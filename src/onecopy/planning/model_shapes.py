"""Models as a planner sees them: parameter specs and the way in which an optimizer may divide them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from onecopy.layout import ParamSpec, ShardBy


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of a model, and the arguments that decide how they are divided among ranks.

    Attributes:
        specs: the parameters, in the order of the module. Gradients are assumed to be ready in the opposite order.
        splittable: whether the optimizer works element by element; False for Muon, Shampoo and the like.
        shard_by: ``"parameter"``, ``"element"`` or None, as in ``ZeroRedundancyOptimizer``.
        bucket_bytes: the size of a bucket of ``ShardedDataParallel``, or None for the transport's default.
    """

    specs: tuple[ParamSpec, ...]
    splittable: bool = True
    shard_by: ShardBy | None = None
    bucket_bytes: int | None = None

    @property
    def order(self) -> list[int]:
        """The indices of the parameters in the order in which their gradients are ready."""
        return list(reversed(range(len(self.specs))))

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(spec.numel for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest parameter."""
        return max((spec.nbytes for spec in self.specs), default=0)


Shapes = dict[str, tuple[int, ...]]


def specs_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[ParamSpec, ...]:
    """Return the specs of contiguous parameters with these names and shapes."""
    return tuple(
        ParamSpec(index, name, shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))), dtype)
        for index, (name, shape) in enumerate(shapes.items())
    )


def gpt_shapes(blocks: int, width: int, vocabulary: int, positions: int) -> Shapes:
    """Return the parameter shapes of a GPT with biases whose head is tied to its embedding."""
    block: Shapes = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "out.weight": (width, width),
        "out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "up.weight": (4 * width, width),
        "up.bias": (4 * width,),
        "down.weight": (width, 4 * width),
        "down.bias": (width,),
    }
    return {
        "embedding": (vocabulary, width),
        "positions": (positions, width),
        **_in_blocks(block, blocks),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }


def llama_shapes(blocks: int, width: int, inner: int, key_width: int, vocabulary: int) -> Shapes:
    """Return the parameter shapes of a Llama with grouped keys and values and a head of its own."""
    block: Shapes = {
        "norm1.weight": (width,),
        "q.weight": (width, width),
        "k.weight": (key_width, width),
        "v.weight": (key_width, width),
        "out.weight": (width, width),
        "norm2.weight": (width,),
        "gate.weight": (inner, width),
        "up.weight": (inner, width),
        "down.weight": (width, inner),
    }
    return {
        "embedding": (vocabulary, width),
        **_in_blocks(block, blocks),
        "norm.weight": (width,),
        "head": (vocabulary, width),
    }


def _in_blocks(block: Shapes, blocks: int) -> Shapes:
    return {f"blocks.{number}.{name}": shape for number in range(blocks) for name, shape in block.items()}


def wrapped_units(specs: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    """Return the parameters of each unit if every block and the root module are wrapped, as is usual with FSDP.

    A block is a module with a number as its name, as those of an ``nn.ModuleList`` have.
    """
    units: dict[str, list[ParamSpec]] = {"": []}
    for spec in specs:
        block = re.match(r"(?:.*?\.)?\d+\.", spec.name)
        units.setdefault(block.group() if block else "", []).append(spec)
    return [unit for unit in units.values() if unit]


def gpt2_small(splittable: bool = True) -> Model:
    """Return GPT-2 small in float32: 12 blocks, 148 parameters, 124M elements."""
    return Model(specs_of(gpt_shapes(12, 768, 50257, 1024)), splittable)


def gpt_xl(splittable: bool = True) -> Model:
    """Return a GPT of 1.3B elements in bf16: 24 blocks, 292 parameters."""
    return Model(specs_of(gpt_shapes(24, 2048, 50257, 2048), torch.bfloat16), splittable)


def llama_70b(splittable: bool = True) -> Model:
    """Return Llama 2 70B in bf16: 80 blocks, 723 parameters, 69B elements."""
    return Model(specs_of(llama_shapes(80, 8192, 28672, 1024, 32000), torch.bfloat16), splittable)
