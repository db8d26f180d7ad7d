"""Loads a full state dict, or exactly this rank's shards of one, into a sharded optimizer.

Everything is checked before anything is changed. ``gather.py`` makes the full state dict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.common import nested_tensors
from onecopy.common.flat_views import flat_like
from onecopy.common.tensor_subclasses import check_not_cut, map_parts
from onecopy.common.torch_private import run_load_post_hooks, run_load_pre_hooks
from onecopy.layout import Layout, ParamSpec
from onecopy.step import averages, master_weights
from onecopy.step import engine as step_engine
from onecopy.step.consistency import group_facts
from onecopy.step.engine import Engine
from onecopy.step.gradients import OwnedShard
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import NOT_OPTIONS, Group, options_of
from onecopy.step.several_classes import match_classes

StateDict = dict[str, Any]

CALL = "load_state_dict()"


def load(engine: Engine, optimizer: Optimizer, given: object) -> None:
    """Load a full state dict into a sharded optimizer, on all ranks together.

    1. Each rank runs the pre-hooks of ``optimizer``, checks the state dict ``given`` and copies its shards; nothing has
       changed yet.
    2. All ranks raise if a rank failed or if their state dicts differ.
    3. Each rank loads into its inner optimizer. If one rank fails, all ranks restore the state they had, and raise.
    4. Each rank sets options and master weights, which cannot fail, and runs the post-hooks. If a hook fails on a rank,
       all ranks raise.
    """
    local, groups = engine.inner, optimizer.param_groups
    with FailTogether(engine.collectives, CALL) as together:
        state_dict = run_load_pre_hooks(optimizer, _shallow_copy(given))
        saved_groups = deepcopy(state_dict["param_groups"])
        match_classes(saved_groups, groups, local.kind)
        states, others = _state_by_index(state_dict, groups)
        for index, master in state_dict.get(master_weights.STATE_DICT_KEY, {}).items():
            states.setdefault(index, {})[master_weights.STATE_KEY] = master
        for name, average in state_dict.get(averages.STATE_DICT_KEY, {}).items():
            for index in range(len(engine.params)):
                states.setdefault(index, {})[averages.PREFIX + name + averages.STEPS] = average["steps"]
            for index, values in average["values"].items():
                states[index][averages.PREFIX + name] = values
        has_state = bool(states or others)
        _check_shapes(states, engine.layout, local.classes.splittable(groups))
        together.facts = _load_facts(state_dict, states, others, engine.layout)
        owned_states, saved_masters = _owned_states(states, engine.layout, local)
        others = nested_tensors.map_tensors(others, _clone)
    with restored_on_failure(engine, CALL):
        load_inner(local, owned_states, saved_groups, others)
    finish_load(engine, groups, saved_groups, saved_masters, has_state=has_state)
    engine.allow_steps()
    with FailTogether(engine.collectives, CALL):
        run_load_post_hooks(optimizer)


@contextmanager
def restored_on_failure(engine: Engine, call: str) -> Iterator[None]:
    """Run a block that loads into the inner optimizer; if it fails on one rank, all restore the state and raise."""
    with step_engine.restored_on_failure([engine]), FailTogether(engine.collectives, call):
        yield


def load_inner(
    local: InnerOptimizer,
    states: Mapping[int, dict[Any, Any]],
    options: Sequence[Mapping[str, Any]],
    others: Mapping[Any, Any] | None = None,
    as_saved: bool = False,
) -> None:
    """Load into the inner optimizer through its own method, because a class may upgrade old state there.

    Args:
        local: this rank's inner optimizer.
        states: the state of this rank's shards, by parameter.
        options: the options of every group.
        others: state under keys that are not parameters.
        as_saved: whether tensors keep their dtypes; torch's ``load_state_dict`` rounds them to the parameter's.
    """
    inner = local.optim
    split = {index: averages.split_averages(state) for index, state in states.items()}
    states = {index: state for index, (state, _) in split.items() if state}
    tensors = list(chain.from_iterable(group["params"] for group in inner.param_groups))
    positions = {id(tensor): position for position, tensor in enumerate(tensors)}
    owned_states = [(owned.tensor, states[owned.shard.param]) for owned in local.owned if owned.shard.param in states]
    param_groups = [
        {**options_of(dict(values)), "params": [positions[id(tensor)] for tensor in group["params"]]}
        for values, group in zip(options, inner.param_groups, strict=True)
    ]
    state = {positions[id(tensor)]: values for tensor, values in owned_states}
    inner.load_state_dict({"state": {**state, **(others or {})}, "param_groups": param_groups})
    local.averages = local.averages.loaded({index: found for index, (_, found) in split.items()}, local.owned)
    for tensor, values in owned_states:
        if as_saved:
            keep_as_saved(inner.state[tensor], values)
        # torch's load_state_dict turns a string into a generator's name.
        for key, value in values.items():
            if _holds_text(value) and key in inner.state[tensor]:
                inner.state[tensor][key] = value


def finish_load(
    engine: Engine,
    groups: Sequence[Group],
    saved_groups: Sequence[Mapping[str, Any]],
    saved_masters: Mapping[int, Tensor],
    has_state: bool,
    written_masters: Collection[int] = (),
) -> None:
    """After a load into the inner optimizer, set options and master weights; this cannot fail.

    The caller allows steps again, once it knows that no rank has failed.

    Args:
        engine: its inner optimizer was loaded.
        groups: the user's parameter groups.
        saved_groups: the saved options of every group.
        saved_masters: this rank's part of saved master weights, by parameter; others are set from their parameters.
        has_state: whether any rank has loaded state.
        written_masters: parameters whose master weights are written already.
    """
    for group, saved in zip(groups, saved_groups, strict=True):
        members = {key: group[key] for key in NOT_OPTIONS if key in group}
        group.clear()
        group.update({**members, **saved, "params": members["params"]})
    engine.inner.pull_all_options(groups)
    engine.inner.note_loaded(has_state)
    for owned in engine.inner.owned:
        if owned.param_view is not None and owned.shard.param not in written_masters:
            owned.tensor.detach().copy_(saved_masters.get(owned.shard.param, owned.param_view))


def keep_as_saved(state: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Undo changes that torch's ``load_state_dict`` makes: it rounds to the parameter's dtype, and breaks text."""
    for key, value in saved.items():
        current = state.get(key)
        if isinstance(value, Tensor) and isinstance(current, Tensor):
            if value.dtype != current.dtype:
                state[key] = value.to(current.device)
        elif key in state and not isinstance(value, Tensor):
            state[key] = value


def _shallow_copy(state_dict: object) -> StateDict:
    """Return a copy of an optimizer's state dict that hooks may change; raise ``TypeError`` for any other object."""
    if not isinstance(state_dict, Mapping) or "state" not in state_dict or "param_groups" not in state_dict:
        raise TypeError(
            "load_state_dict() takes an optimizer's state dict, with 'state' and 'param_groups', the whole of it on "
            f"every rank; got {type(state_dict).__qualname__}"
        )
    return dict(state_dict)


def _state_by_index(state_dict: StateDict, groups: Sequence[Group]) -> tuple[dict[int, dict[Any, Any]], dict[Any, Any]]:
    """Return the saved state by parameter index, and the state under keys that are not parameters.

    Groups and parameters are checked first.

    Raises:
        ValueError: as torch's optimizers raise, with the group named.
    """
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state dict has {len(saved_groups)} parameter groups, the optimizer has {len(groups)}")
    for position, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"parameter group {position} has {len(saved['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer"
            )
    ids = list(chain.from_iterable(saved["params"] for saved in saved_groups))
    params = list(chain.from_iterable(group["params"] for group in groups))
    index_of_param: dict[int, int] = {}  # by id(): a parameter that is several times in its group has one index
    for param in params:
        index_of_param.setdefault(id(param), len(index_of_param))
    index_of = {saved_id: index_of_param[id(param)] for saved_id, param in zip(ids, params, strict=True)}
    others = {key: value for key, value in state_dict["state"].items() if key not in index_of}
    unknown = [key for key in others if isinstance(key, (int, Tensor))]
    if unknown:
        raise ValueError(f"the state dict has state for {unknown[:5]}, which are in none of its parameter groups")
    found = {key: value for key, value in state_dict["state"].items() if key in index_of and value is not None}
    return {index_of[key]: dict(value) for key, value in found.items()}, others


def _check_shapes(states: Mapping[int, Mapping[Any, Any]], layout: Layout, elementwise: Sequence[bool]) -> None:
    for index, state in states.items():
        spec = layout.params[index]
        for key, value in state.items() if elementwise[spec.group] else ():
            if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != spec.shape:
                raise ValueError(
                    f"state {key!r} of parameter {spec.name!r} has shape {tuple(value.shape)}, but the parameter has "
                    f"shape {spec.shape}"
                )


def _load_facts(
    state_dict: StateDict, states: Mapping[int, Mapping[Any, Any]], others: Mapping[Any, Any], layout: Layout
) -> list[Fact]:
    """Return facts that must be equal on all ranks: the options, names, shapes and scalars of a state dict."""
    return [
        *group_facts(state_dict["param_groups"]),
        *(
            Fact(f"state of parameter {layout.params[index].name!r}", f"{key}={_value_text(value)}")
            for index, state in sorted(states.items())
            for key, value in state.items()
        ),
        *(Fact(f"state under {key!r:.80}", _value_text(value)) for key, value in others.items()),
    ]


def _owned_states(
    states: Mapping[int, Mapping[Any, Any]], layout: Layout, local: InnerOptimizer
) -> tuple[dict[int, dict[Any, Any]], dict[int, Tensor]]:
    """Return copies of the state of this rank's shards, and the saved master weights, by parameter index."""
    found, saved_masters = {}, {}
    for owned in local.owned:
        index = owned.shard.param
        if index not in states:
            continue
        values = _owned_state(states[index], owned, layout.params[index])
        master = values.pop(master_weights.STATE_KEY, None)
        if master is not None and owned.param_view is not None:
            _check_master(master, owned, layout.params[index])
            saved_masters[index] = master
        if values:
            found[index] = values
    return found, saved_masters


def _check_master(master: object, owned: OwnedShard, spec: ParamSpec) -> None:
    if not isinstance(master, Tensor) or master.shape != owned.tensor.shape:
        found = f"shape {tuple(master.shape)}" if isinstance(master, Tensor) else f"type {type(master).__qualname__}"
        raise ValueError(
            f"the master weight of parameter {spec.name!r} in the state dict has {found}, but "
            f"the part of it that this rank owns has shape {tuple(owned.tensor.shape)}"
        )


def _owned_state(state: Mapping[Any, Any], owned: OwnedShard, spec: ParamSpec) -> dict[Any, Any]:
    """Return copies of one parameter's state; tensors of a cut parameter are reduced to the owned range."""

    def take(tensor: Tensor) -> Tensor:
        if owned.is_cut and tensor.dim() > 0:
            if tuple(tensor.shape) != spec.shape:
                raise ValueError(
                    f"parameter {spec.name!r} is cut among ranks, but its saved state has a tensor of shape "
                    f"{tuple(tensor.shape)} instead of {spec.shape}; keep parameters whole with elementwise=False"
                )
            return flat_like(tensor.detach(), owned.param)[owned.shard.start : owned.shard.stop].clone()
        return _clone(tensor)

    if owned.is_cut:
        check_not_cut(state, spec.name)
    result: dict[Any, Any] = nested_tensors.map_tensors(dict(state), take)
    return result


def _clone(tensor: Tensor) -> Tensor:
    return map_parts(tensor, lambda part: part.detach().clone())


def _holds_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_text(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds_text(item) for item in value)
    return isinstance(value, str)


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        content = f" = {value.item()}" if value.dim() == 0 and value.device.type == "cpu" else ""
        return f"{value.dtype} {tuple(value.shape)}{content}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
