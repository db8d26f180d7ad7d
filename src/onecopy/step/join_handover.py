"""The header that an active rank sends to joined ranks: options of the groups, and which parameters have a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.common import tagged_json
from onecopy.step.group_options import options_of, replace_options
from onecopy.step.parameter_groups import Group


@dataclass(frozen=True, slots=True)
class Handover:
    """The content of a header.

    Attributes:
        options: the options of every group.
        has_gradient: whether each parameter has a gradient.
        is_reduce_scattered: whether the owners have their reduced gradients already.
    """

    options: tuple[Group, ...]
    has_gradient: tuple[bool, ...]
    is_reduce_scattered: bool

    def apply_options(self, groups: Sequence[Group]) -> None:
        """Set the options of the joined rank's groups."""
        for group, options in zip(groups, self.options, strict=True):
            # A tensor is written in place: the user may hold on to it, and it may be on an accelerator.
            kept = {key: value for key, value in group.items() if _both_tensors(value, options.get(key))}
            for key, tensor in kept.items():
                tensor.copy_(options[key])
            replace_options(group, {**options, **kept})


def write_handover(groups: Sequence[Group], has_gradient: Sequence[bool], is_reduce_scattered: bool) -> bytes:
    """Write a header as JSON. Tensors among the options, such as a learning rate, are written as values."""
    described = []
    for group in groups:
        tensors: list[Tensor] = []
        tree = tagged_json.encode(options_of(group), tensors, "an option of a parameter group")
        described.append([tree, [[tagged_json.describe_tensor(tensor)[0], tensor.tolist()] for tensor in tensors]])
    return tagged_json.dumps([described, [int(has) for has in has_gradient], is_reduce_scattered])


def read_handover(text: bytes) -> Handover:
    """Read a header that :func:`write_handover` wrote."""
    described, mask, is_reduce_scattered = tagged_json.loads(text)
    options = tuple(
        tagged_json.decode(tree, [torch.tensor(value, dtype=getattr(torch, name)) for name, value in values])
        for tree, values in described
    )
    return Handover(options, tuple(bool(has) for has in mask), is_reduce_scattered)


def _both_tensors(current: object, new: object) -> bool:
    return isinstance(current, Tensor) and isinstance(new, Tensor) and current.shape == new.shape
