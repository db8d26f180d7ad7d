"""Forms of optimizer state: parameters by name or by position, and the state of a parameter with its master weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from torch import Tensor

from onecopy.step import master_weights
from onecopy.step.parameter_groups import Group, first_places, options_of

Item = TypeVar("Item")


def split_by_group(groups: Sequence[Group], items: Sequence[Item]) -> list[list[Item]]:
    """Divide a list with one item per parameter into one list per parameter group.

    A parameter that is several times in its group counts once.
    """
    remaining = iter(items)
    return [list(islice(remaining, len(first_places(group["params"])))) for group in groups]


def named_groups(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """Return the options of each parameter group, with the names of its parameters under ``params``."""
    members = split_by_group(groups, names)
    return [{**options_of(group), "params": part} for group, part in zip(groups, members, strict=True)]


def plain_state_dict(state: Mapping[str, Mapping[Any, Any]], groups: Sequence[Group]) -> dict[str, Any]:
    """Return a plain optimizer's state dict, with parameters by position, from state and groups by name."""
    names = chain.from_iterable(group["params"] for group in groups)
    position_of = {name: position for position, name in enumerate(names)}
    by_position = dict(sorted((position_of[name], dict(values)) for name, values in state.items()))
    by_position, masters = master_weights.split_master_weights(by_position)
    numbered = [{**group, "params": [position_of[name] for name in group["params"]]} for group in groups]
    form: dict[str, Any] = {"state": by_position, "param_groups": numbered}
    return {**form, master_weights.STATE_DICT_KEY: masters} if masters else form


def state_with_master(state: Mapping[Any, Any], tensor: Tensor, param_view: Tensor | None) -> dict[Any, Any]:
    """Return the state of one parameter, with its master weight as one more entry if it has one.

    Args:
        state: the inner optimizer's state of the parameter.
        tensor: the tensor that the inner optimizer steps.
        param_view: the parameter's own memory if ``tensor`` is a master weight, else None.
    """
    return {**state, master_weights.STATE_KEY: tensor.detach()} if param_view is not None else dict(state)
