"""Tensors in nested containers: the inputs and outputs of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The same nested containers with floating-point tensors converted to ``dtype``."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if type(tree) is dict:
        return {key: cast_floating(value, dtype) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(cast_floating(value, dtype) for value in tree)
    return tree
