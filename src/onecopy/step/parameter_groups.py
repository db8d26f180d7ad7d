"""Parameter groups: the ``params`` argument is checked, put into groups and described, and options are copied.

The user's groups are the truth between calls. A call copies their options to the inner optimizer, and copies back the
options that the inner optimizer has written in that call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from onecopy.common.flat_views import is_dense
from onecopy.common.nested_tensors import map_tensors
from onecopy.common.tensor_subclasses import is_composed
from onecopy.common.torch_private import is_managed_by_fsdp
from onecopy.layout import ParamSpec

Group = dict[str, Any]


def normalise(params: object) -> list[Group]:
    """Return parameter groups, each a new dict with a list of tensors (and of names, if names were given)."""
    if isinstance(params, (Tensor, dict, str)) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be an iterable of tensors, of (name, tensor) pairs or of dicts of groups, "
            f"got {torch.typename(params)}; did you mean model.parameters()?"
        )
    if isinstance(params, (set, frozenset)):
        raise TypeError("params must be ordered, got a set: its order differs between ranks; pass a list")
    items = list(params)
    if not items:
        raise ValueError(f"params is empty: there is nothing to optimize{_consumed(params)}")
    if any(isinstance(item, dict) for item in items):
        for position, item in enumerate(items):
            if not isinstance(item, dict):
                raise TypeError(
                    f"params mixes dicts and tensors: entry {position} is {torch.typename(item)}; "
                    "put it into a dict of its own"
                )
        groups = [normalise_group(group, position) for position, group in enumerate(items)]
    else:
        groups = [normalise_group({"params": items}, 0)]
    if not any(group["params"] for group in groups):
        consumed = next((hint for item in items if (hint := _consumed(item.get("params")))), "")
        raise ValueError(f"params has groups but no parameter: there is nothing to optimize{consumed}")
    return groups


def _consumed(params: object) -> str:
    """Return a hint for an error about an empty iterator: it was probably read before."""
    if not isinstance(params, Iterator):
        return ""
    return (
        ". It is a generator, which can be read once, and something has probably read it before: call "
        "model.parameters() again, or keep list(model.parameters())"
    )


def device_of(groups: Sequence[Group]) -> torch.device | None:
    """The device of the first parameter that is on an accelerator, or the CPU; None if there are no parameters."""
    devices = [param.device for group in groups for param in group["params"]]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else None)


def normalise_group(group: object, position: int) -> Group:
    """Return one group as a new dict with a list of tensors."""
    if not isinstance(group, dict):
        raise TypeError(f"parameter group {position} must be a dict, got {torch.typename(group)}")
    if "params" not in group:
        raise ValueError(f"parameter group {position} has no 'params' entry (it has {sorted(group)})")
    members = group["params"]
    if isinstance(members, (set, frozenset)):
        raise TypeError(
            f"params of parameter group {position} must be ordered, got a set: its order differs between ranks"
        )
    if isinstance(members, Tensor):
        members = [members]
    elif not isinstance(members, Iterable):
        raise TypeError(f"params of parameter group {position} must be tensors, got {torch.typename(members)}")
    members = list(members)
    tensors: list[Tensor] = []
    names: list[str] = []
    for index, member in enumerate(members):
        label = f"parameter {index} of group {position}"
        if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str):
            names.append(member[0])
            label, member = f"parameter {member[0]!r}", member[1]
        if not isinstance(member, Tensor):
            raise TypeError(f"{label} is not a tensor but {torch.typename(member)}")
        tensors.append(member)
    if names and len(names) != len(tensors):
        raise ValueError(f"parameter group {position} mixes named and unnamed parameters; name all or none")
    result = {**group, "params": tensors}
    if names:
        result["param_names"] = names
    return result


def names_of(group: Group, position: int) -> list[str]:
    """The names of a group's parameters, for messages."""
    count = len(group["params"])
    names = list(group.get("param_names", ()))
    return names if len(names) == count else [f"group{position}[{index}]" for index in range(count)]


def shown_group(position: int, names: Sequence[str]) -> str:
    """A group in an error: its position and the first of its parameters' names."""
    return f"parameter group {position}" + (f" (with {names[0]!r})" if names else "")


def first_places(params: Sequence[Tensor]) -> list[int]:
    """The first position of each parameter of a group. torch allows a parameter several times in one group."""
    places: dict[int, int] = {}
    for place, tensor in enumerate(params):
        places.setdefault(id(tensor), place)
    return list(places.values())


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise ``ValueError`` if a parameter cannot be sharded."""
    problem = None
    dtensor = sys.modules.get("torch.distributed.tensor")
    if is_lazy(tensor):
        problem = "is not materialised yet; run a forward pass first"
    elif dtensor is not None and isinstance(tensor, dtensor.DTensor):
        problem = "is a DTensor (FSDP2 or tensor parallelism), which is sharded already"
    elif is_managed_by_fsdp(tensor):
        problem = "is managed by FSDP, which shards optimizer state itself; use one or the other"
    elif is_composed(tensor):
        problem = f"is a {type(tensor).__qualname__}, which consists of other tensors and cannot be sharded"
    elif tensor.is_meta:
        problem = "is on the meta device and has no memory; materialise the model first"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"is not a dense tensor (layout {tensor.layout}); sparse parameters are not supported"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "is a lazy conjugate or negative view; call resolve_conj() and resolve_neg() first"
    elif not tensor.is_leaf and not tensor.retains_grad:
        problem = "is not a leaf tensor: it was computed from others, so it gets no gradient"
    elif not is_dense(tuple(tensor.shape), tensor.stride()):
        problem = (
            f"does not fill its memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}): it is expanded or a "
            "slice; use .clone()"
        )
    if problem is not None:
        raise ValueError(f"parameter {name!r} {problem}")


def check_distinct(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ``ValueError`` if a tensor is in two groups or two of them share memory."""
    seen: dict[int, str] = {}
    for tensor, name in zip(tensors, names, strict=True):
        if id(tensor) in seen:
            raise ValueError(f"parameter {name!r} is in two groups (also as {seen[id(tensor)]!r})")
        seen[id(tensor)] = name
    ranges = sorted(
        (
            str(tensor.device),
            tensor.data_ptr(),
            tensor.data_ptr() + tensor.numel() * tensor.element_size(),
            name,
        )
        for tensor, name in zip(tensors, names, strict=True)
        if tensor.numel()
    )
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(ranges):
        if device == other_device and start < stop:
            raise ValueError(
                f"parameters {name!r} and {other!r} share memory; give one of them, as model.parameters() does for "
                "tied weights"
            )


def plan_params(groups: Sequence[Group]) -> tuple[list[Tensor], list[ParamSpec]]:
    """Check the parameters of all groups and describe each once, in order."""
    tensors: list[Tensor] = []
    specs: list[ParamSpec] = []
    devices: list[torch.device] = []
    for position, group in enumerate(groups):
        names = names_of(group, position)
        for place in first_places(group["params"]):
            tensor, name = group["params"][place], names[place]
            check_tensor(tensor, name)
            if tensor.device not in devices:
                devices.append(tensor.device)
            specs.append(
                ParamSpec(
                    index=len(specs),
                    name=name,
                    shape=tuple(tensor.shape),
                    stride=tensor.stride(),
                    dtype=tensor.dtype,
                    group=position,
                    device_ordinal=devices.index(tensor.device),
                )
            )
            tensors.append(tensor)
    check_distinct(tensors, [spec.name for spec in specs])
    return tensors, specs


NOT_OPTIONS = ("params", "param_names")
"""Entries of a parameter group that are not options."""


def options_of(group: Group) -> Group:
    """A new dict with the options of a group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def replace_options(group: Group, options: Group) -> None:
    """Replace all options of a group."""
    for key in [key for key in group if key not in options and key not in NOT_OPTIONS]:
        del group[key]
    group.update(options)


def apply_changes(group: Group, before: Group, after: Group) -> None:
    """Set the options of a group that differ between ``before`` and ``after``."""
    # Compared by identity: a tensor that was written in place is the same object in all three.
    group.update({key: value for key, value in after.items() if key not in before or value is not before[key]})
    for key in before.keys() - after.keys():
        group.pop(key, None)


@dataclass(frozen=True, slots=True)
class OptionsSnapshot:
    """The options of all groups at one time, and copies of the tensors among them."""

    options: list[Group]
    tensors: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> OptionsSnapshot:
        """A snapshot of the options that the groups have now."""
        options = [options_of(group) for group in groups]
        found: list[Tensor] = []
        map_tensors(options, found.append)
        return cls(options, [(tensor, tensor.clone()) for tensor in found])

    def restore(self, groups: Sequence[Group]) -> None:
        """Put the options back, so that a counter in the groups advances once in a step of several parts."""
        for group, options in zip(groups, self.options, strict=True):
            replace_options(group, options)
        for tensor, value in self.tensors:
            tensor.copy_(value)  # in place: a scheduler may refer to a tensor learning rate
