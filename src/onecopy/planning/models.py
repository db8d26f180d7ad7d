"""Models as a planner sees them: from a Python function, a Hugging Face config, or a number of parameters.

Nothing is downloaded, and no memory is allocated for parameters: modules are made on the meta device.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onecopy.layout import ParamSpec, ShardBy

Shapes = dict[str, tuple[int, ...]]

PIECES = 96
"""The number of parameters besides the largest one, if only the number of elements is known."""


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of a model, and the arguments that decide how they are divided among ranks."""

    # The parameters, in the order of the module. Gradients are assumed to be ready in the opposite order.
    specs: tuple[ParamSpec, ...]
    splittable: bool = True  # whether the optimizer works element by element; False for Muon, Shampoo and the like
    shard_by: ShardBy | None = None  # ``"parameter"``, ``"element"`` or None, as in ``ZeroRedundancyOptimizer``
    # The size of a bucket of ``ShardedDataParallel``, or None for the transport's default.
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


def specs_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[ParamSpec, ...]:
    """Return the specs of contiguous parameters with these names and shapes."""
    return tuple(
        ParamSpec(index, name, shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))), dtype)
        for index, (name, shape) in enumerate(shapes.items())
    )


@dataclass(frozen=True, slots=True)
class Source:
    """A model to plan for: how it is called in the output, and the shapes of its parameters by name."""

    title: str
    shapes: Shapes


def from_counts(params: float, largest: float | None) -> Source:
    """Return a model with this many elements, of which the largest parameter has ``largest`` (default: a twentieth)."""
    total = int(params)
    if largest is not None and not 1 <= largest <= total:
        raise ValueError(f"--largest must be from 1 to the number of parameters, {total}, got {largest:g}")
    most = int(largest) if largest is not None else max(1, total // 20)
    left = total - most
    piece = min(most, -(-left // PIECES)) if left else 0
    lengths = [piece] * (left // piece) + [left % piece] if piece else []
    rest: Shapes = {f"blocks.{number}.weight": (length,) for number, length in enumerate(lengths) if length}
    return Source(f"{total / 1e9:.3g}B parameters, the largest with {most / 1e9:.3g}B", {"largest": (most,), **rest})


def from_path(path: str) -> Source:
    """Return the model of a Hugging Face config, given as a file or its directory, or of ``module:function``."""
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    if file.suffix == ".json":
        return _from_config(file)
    return _from_factory(path)


def _from_factory(path: str) -> Source:
    """Import ``package.module:function`` and call the function on the meta device."""
    name, colon, function = path.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"{path!r} is neither a config.json nor a function such as my_package.models:make_model")
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        factory: Any = importlib.import_module(name)
        for part in function.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path!r} cannot be imported: {error}") from error
    finally:
        sys.path.pop(0)
    try:
        with torch.device("meta"):
            module = factory()
    except Exception as error:
        raise ValueError(
            f"{path!r} is called without arguments, on the meta device, and raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise TypeError(f"{path!r} returned {type(module).__name__}, not a torch.nn.Module")
    return Source(path, _shapes(module))


def _from_config(file: Path) -> Source:
    """Construct the causal language model, or else the base model, of a Hugging Face config on the meta device."""
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"{file} is no Hugging Face config: it has no model_type")
    try:
        import transformers
    except ImportError:
        raise RuntimeError(f"{file}: a Hugging Face config needs transformers: pip install transformers") from None
    config: Any = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        try:
            module: Any = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # not a language model
            module = transformers.AutoModel.from_config(config)
    return Source(str(file), _shapes(module))


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(param.shape) for name, param in module.named_parameters()}
