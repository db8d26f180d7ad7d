"""Tensors in nested containers: state, options, and the inputs and outputs of a module."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

DICT_TYPES: dict[str, Callable[..., dict[Any, Any]]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
}
"""The types of dicts that are kept, by name."""


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


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a copy of nested containers with ``function`` applied to every tensor in them."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped if type(value) is dict else DICT_TYPES.get(type(value).__name__, dict)(mapped)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def copy_tree(value: Any) -> Any:
    """Return a copy of nested containers that contains the same tensors and other leaves."""
    return map_tensors(value, lambda tensor: tensor)
