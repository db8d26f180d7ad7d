"""Plain data and tensors are encoded as tagged JSON and decoded to equal values of the same types, without pickle.

JSON alone would turn tuples into lists and integer keys into strings, and has no non-finite floats. So every container
is written with the name of its type. Tensors are replaced by positions in a list and are sent or saved separately.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.common.nested_tensors import DICT_TYPES


def encode(value: object, tensors: list[Tensor], where: str) -> Any:
    """Return ``value`` as JSON data; tensors are appended to ``tensors`` and replaced by their position.

    Args:
        value: None, bool, int, float, str, a tensor, or tuples, lists, dicts and Counters of these.
        tensors: receives the tensors in the order of their positions.
        where: a description of the value for the error message.

    Raises:
        TypeError: if the value contains another type; the message says where.
    """
    # Exact types only: a subclass (a named tuple, an IntEnum) would be decoded as another type.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, (tuple, list)) and kind in (tuple, list):
        items = [encode(item, tensors, f"{where}[{position}]") for position, item in enumerate(value)]
        return [kind.__name__, items]
    if isinstance(value, dict) and kind in DICT_TYPES.values():
        return [
            kind.__name__,
            [
                [encode(key, tensors, f"a key of {where}"), encode(item, tensors, f"{where}[{key!r}]")]
                for key, item in value.items()
            ],
        ]
    raise TypeError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which cannot be gathered or saved: only None, "
        "bool, int, float, str, tensors, and tuples, lists, dicts and Counters of these can"
    )


def decode(data: Any, tensors: Sequence[Any]) -> Any:
    """Return the value that :func:`encode` was given, with ``tensors[i]`` in the place of the i-th tensor."""
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind in DICT_TYPES:
        pairs = {decode(key, tensors): decode(item, tensors) for key, item in content}
        return pairs if kind == "dict" else DICT_TYPES[kind](pairs)
    items = [decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def dumps(data: Any) -> bytes:
    """Return JSON data as bytes."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def loads(text: bytes) -> Any:
    """Return the JSON data in some bytes."""
    return json.loads(text)


def describe_tensor(tensor: Tensor) -> list[Any]:
    """Return the data type, shape and strides of a tensor as JSON data, for :func:`empty_from`."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]


def empty_from(description: list[Any]) -> Tensor:
    """Return an uninitialized CPU tensor as :func:`describe_tensor` described it."""
    name, shape, stride = description
    return torch.empty_strided(shape, stride, dtype=getattr(torch, name))
