"""The options of parameter groups, which are copied between the user's groups and the inner optimizer's groups.

The user's groups are the truth between calls. A call copies their options to the inner optimizer, and copies back the
options that the inner optimizer has written in that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from onecopy.common.nested_tensors import map_tensors
from onecopy.step.parameter_groups import Group

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
