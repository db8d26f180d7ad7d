"""Takes apart and rebuilds tensor subclasses that consist of other tensors, such as quantised optimizer state.

Such a class defines ``__tensor_flatten__`` and ``__tensor_unflatten__``. Only classes among torch's safe globals are
rebuilt, as in ``torch.load(weights_only=True)``: a file or another rank cannot make this process use any other class.
torchao adds its classes to the safe globals when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from onecopy.common.nested_tensors import tensors_in

PROVIDER = "torchao.optim"
"""The only module that is imported for a class that is not a safe global yet, if the class is from its package."""

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def is_composed(tensor: Tensor) -> bool:
    """Return whether a tensor consists of other tensors, of which it has a name for each."""
    return hasattr(type(tensor), "__tensor_flatten__") and tensor.layout is torch.strided


def parts_of(tensor: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of which a tensor consists, by name, and the rest of it as plain data."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}, context


def map_parts(tensor: AnyTensor, function: Callable[[Tensor], Tensor]) -> AnyTensor:
    """Return a tensor of the same class with ``function`` applied to each part, or to a tensor without parts."""
    if not is_composed(tensor):
        return function(tensor)  # type: ignore[return-value]
    parts, context = parts_of(tensor)
    changed = {name: map_parts(part, function) for name, part in parts.items()}
    made: AnyTensor = type(tensor).__tensor_unflatten__(changed, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors with memory of which a tensor consists; for an ordinary tensor, itself."""
    found: list[Tensor] = []
    if is_composed(tensor):
        for part in parts_of(tensor)[0].values():
            found += leaves_of(part)
    return found or [tensor]


def class_name(tensor_class: type[Tensor], where: str) -> str:
    """Return the full name of a subclass by which :func:`rebuilt` finds it; raise if it would not be found."""
    name = f"{tensor_class.__module__}.{tensor_class.__qualname__}"
    if _safe_globals().get(name) is not tensor_class:
        raise TypeError(
            f"{where} is a tensor of class {name}, which cannot be gathered or saved: call "
            f"torch.serialization.add_safe_globals([{tensor_class.__qualname__}]) on every rank to allow it"
        )
    return name


def rebuilt(name: str, context: Any, parts: Mapping[str, Tensor], shape: list[int], stride: list[int]) -> Tensor:
    """Return a tensor of the class of this name; raise a TypeError if it is not among torch's safe globals."""
    found = _safe_globals().get(name)
    package = PROVIDER.partition(".")[0]
    if found is None and name.startswith(f"{package}.") and importlib.util.find_spec(package) is not None:
        importlib.import_module(PROVIDER)
        found = _safe_globals().get(name)
    if found is None:
        raise TypeError(
            f"there is a tensor of class {name}, which is not among torch's safe globals: install and import the "
            "package that defines it, and call torch.serialization.add_safe_globals([...]) if the package does not"
        )
    made: Tensor = found.__tensor_unflatten__(parts, context, torch.Size(shape), tuple(stride))
    return made


def check_not_cut(values: Mapping[Any, Any], name: str) -> None:
    """Raise if the state of a parameter that is cut among ranks has a tensor that consists of others."""
    for tensor in tensors_in(values):
        if is_composed(tensor):
            raise TypeError(
                f"parameter {name!r} is cut among ranks, but its state is a {type(tensor).__qualname__}, of which a "
                "rank cannot have a range; keep parameters whole with elementwise=False"
            )


def _safe_globals() -> dict[str, Any]:
    """Return the tensor subclasses among torch's safe globals that consist of other tensors, by full name."""
    found = {}
    for each in torch.serialization.get_safe_globals():
        entry = each[0] if isinstance(each, tuple) else each
        if isinstance(entry, type) and issubclass(entry, Tensor) and hasattr(entry, "__tensor_unflatten__"):
            found[f"{entry.__module__}.{entry.__qualname__}"] = entry
    return found
