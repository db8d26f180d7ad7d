"""Plain data and tensors are encoded as tagged JSON and decoded to equal values of the same types, without pickle.

JSON alone would turn tuples into lists and integer keys into strings, and has no non-finite floats. So every container
is written with the name of its type. Tensors are replaced by positions in a list and are sent or saved separately. A
tensor of a subclass that consists of other tensors (quantised state) is written as its class, its plain data and parts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.common.nested_tensors import DICT_TYPES
from onecopy.common.tensor_subclasses import class_name, is_composed, parts_of, rebuilt


def encode(value: object, tensors: list[Tensor], where: str) -> Any:
    """Return ``value`` as JSON data; tensors are appended to ``tensors`` and replaced by their position.

    Args:
        value: None, bool, int, float, str, a tensor, a dtype, a torch.Size, or tuples, lists, dicts and Counters of
            these. A number of NumPy, such as a learning rate, is decoded as the equal plain number.
        tensors: receives the tensors in the order of their positions.
        where: a description of the value for the error message.

    Raises:
        TypeError: if the value contains another type; the message says where.
    """
    # Exact types only: a subclass (a named tuple, an IntEnum) would be decoded as another type.
    kind = type(value)
    if kind.__module__ == "numpy":
        value = _plain_number(value)
        kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Tensor) and is_composed(value):
        parts, context = parts_of(value)
        content = [context, parts, list(value.shape), list(value.stride())]
        return ["subclass", [class_name(type(value), where), *(encode(item, tensors, where) for item in content)]]
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, torch.dtype):
        return ["dtype", [dtype_name(value)]]
    if isinstance(value, (tuple, list)) and kind in (tuple, list, torch.Size):
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
        "bool, int, float, str, tensors, dtypes, and tuples, lists, dicts and Counters of these can"
    )


def _plain_number(value: Any) -> Any:
    numpy = sys.modules["numpy"]
    kinds = (numpy.bool_, numpy.integer, numpy.float16, numpy.float32, numpy.float64)
    return value.item() if isinstance(value, kinds) else value


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
    if kind == "subclass":
        return rebuilt(*items)
    if kind == "dtype":
        return _dtype_of(*items)
    return {"tuple": tuple, "Size": torch.Size}.get(kind, list)(items)


def dumps(data: Any) -> bytes:
    """Return JSON data as bytes."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def loads(text: bytes) -> Any:
    """Return the JSON data in some bytes."""
    return json.loads(text)


def describe_tensor(tensor: Tensor) -> list[Any]:
    """Return the data type, shape and strides of a tensor as JSON data, for :func:`empty_from`."""
    return [dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride())]


def empty_from(description: list[Any]) -> Tensor:
    """Return an uninitialized CPU tensor as :func:`describe_tensor` described it."""
    name, shape, stride = description
    return torch.empty_strided(shape, stride, dtype=_dtype_of(name))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)  # getattr() would import modules that torch imports when they are used
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype
