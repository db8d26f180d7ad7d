"""The optimizer state that this rank has: one iterator and one writer, for optimizers of any class.

``owned_state`` is the iterator: for each parameter of which this rank has state, its range and the state itself.
``written_states`` turns that into plain data and dense tensors. Consolidation, torch.distributed.checkpoint and
checkpoints all use these two.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy.common import tagged_json
from onecopy.common.flat_views import dense_copy, to_bytes
from onecopy.common.tensor_subclasses import check_not_cut
from onecopy.common.torch_private import uncompiled
from onecopy.state_dict.load import finish_load, keep_as_saved, load_inner
from onecopy.step import master_weights
from onecopy.step.averages import PREFIX as AVERAGE_PREFIX
from onecopy.step.averages import STATE_DICT_KEY as AVERAGES
from onecopy.step.averages import STEPS as AVERAGE_STEPS
from onecopy.step.averages import split_averages
from onecopy.step.engine import Engine
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import Group, first_places, options_of
from onecopy.step.several_classes import kind_of

Optimizers = Optimizer | Sequence[Optimizer] | None

Item = TypeVar("Item")


class WrapsModule:
    """Marks a module of onecopy around the user's ``module``, such as ShardedDataParallel."""

    def wait(self) -> None:
        """Wait for parameters in flight."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, ShardedDataParallel and compiled modules."""
    while True:
        if isinstance(model, (DistributedDataParallel, WrapsModule)):
            model = model.module
        elif (inner := uncompiled(model)) is not model:
            model = inner
        else:
            return model


@dataclass(frozen=True, slots=True)
class StateShard:
    """The optimizer state that this rank has of one parameter: of its elements ``[start, stop)`` in memory order."""

    index: int  # the position of the parameter in the optimizer
    name: str
    param: Tensor
    start: int
    stop: int
    tensor: Tensor  # what the optimizer steps: the parameter, a range of it, or a master weight
    param_view: Tensor | None  # the parameter's own memory of the range if ``tensor`` is a master weight
    state: Mapping[Any, Any]  # of ``tensor`` in the optimizer, without its master weight
    averages: Mapping[str, Any] = field(default_factory=dict)  # the entries of running averages of ``tensor``

    @property
    def numel(self) -> int:
        """The number of elements in this rank's range."""
        return self.stop - self.start

    @property
    def is_cut(self) -> bool:
        """Whether this rank has only a range of the parameter."""
        return self.numel != self.param.numel()

    def whole_state(self) -> dict[Any, Any]:
        """Return the state, with the master weight and the averages as more entries if there are any."""
        master = {master_weights.STATE_KEY: self.tensor.detach()} if self.param_view is not None else {}
        return {**self.state, **master, **self.averages}


@dataclass(frozen=True, slots=True)
class WrittenState:
    """The state of one shard as plain data and tensors."""

    shard: StateShard
    tree: Any  # the state with its master weight, as tagged JSON
    tensors: list[Tensor]  # of the tree, dense
    per_element: list[bool]  # for each tensor, whether it has an element for each element of the shard's range alone
    checksum: int  # of the other tensors of a cut parameter, of which all owners must have equal copies


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a CRC-32 of dense tensors, to compare the copies that several owners of a cut parameter have."""
    found = 0
    for tensor in tensors:
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        found = zlib.crc32(to_bytes(flat.view(torch.uint8)), found)
    return found


def owners_differ(name: str, owners: str, values: str = "") -> str:
    """Return the error text for owners of a cut parameter whose state that is not per element differs."""
    return (
        f"parameter {name!r} is cut among ranks, but {owners} differ in state that is not per element{values}; "
        "keep parameters whole with elementwise=False"
    )


def owned_state(inner: InnerOptimizer, names: Sequence[str], to_load: bool = False) -> list[StateShard]:
    """Return the shards of a sharded optimizer that this rank owns, in the order of the layout.

    ``to_load`` adds memory for averages that have not begun.
    """
    found = []
    for owned in inner.owned:
        shard, tensor = owned.shard, owned.tensor
        position = (shard.param, names[shard.param], owned.param, shard.start, shard.stop)
        state, averages = inner.optim.state.get(tensor, {}), inner.averages.state_of(owned, to_load)
        found.append(StateShard(*position, tensor, owned.param_view, state, averages))
    return found


def written_states(shards: Sequence[StateShard]) -> list[WrittenState]:
    """Return the state of each shard; raise ``TypeError`` if it cannot be written."""
    found = []
    for shard in shards:
        values = shard.whole_state()
        is_cut, shape = shard.is_cut, shard.tensor.shape
        if is_cut and any(type(value) is not Tensor for value in values.values()):
            check_not_cut(values, shard.name)
        tensors: list[Tensor] = []
        tree = tagged_json.encode(values, tensors, f"state of parameter {shard.name!r}")
        for place, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided:
                raise TypeError(
                    f"state of parameter {shard.name!r} has a tensor of layout {tensor.layout}, which cannot be "
                    "gathered or saved"
                )
            if not tensor.is_contiguous():
                tensors[place] = dense_copy(tensor)
        per_element = [is_cut and tensor.shape == shape for tensor in tensors]
        copies = [tensor for tensor, split in zip(tensors, per_element, strict=True) if is_cut and not split]
        found.append(WrittenState(shard, tree, tensors, per_element, checksum(copies)))
    return found


class OptimizerView:
    """One optimizer of any class, its parameters in order, and their names.

    Attributes:
        engine: the engine of a ZeroRedundancyOptimizer; None for other optimizers.

    Args:
        optimizer: a ZeroRedundancyOptimizer or any other optimizer.
        names: the model's names by the ``id()`` of the parameter; empty if there is no model.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        engine = getattr(optimizer, "engine", None)
        self.optimizer = optimizer
        self.engine: Engine | None = engine if isinstance(engine, Engine) else None
        self.params: list[Tensor] = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        found = [names.get(id(param)) for param in self.params]
        repeated = sorted(set(range(len(self.params))) - set(first_places(self.params)))
        if repeated:
            name = found[repeated[0]] or self.positions[repeated[0]]
            raise ValueError(
                f"parameter {name!r} is several times in a group of {self.kind}, and a checkpoint can hold it only "
                "once: give it once, or save consolidate_state_dict() + state_dict()"
            )
        self.named = bool(names)
        if self.named and None in found:
            raise ValueError(
                f"parameter {self.positions[found.index(None)]!r} of {self.kind} is not a parameter of the model: pass "
                "the model that it optimizes, or no model"
            )
        self.names = [str(name) for name in found] if self.named else self.positions

    @property
    def positions(self) -> list[str]:
        """Names made of the number of the group and the position in it, for optimizers without a model."""
        return [
            f"group{number}[{place}]"
            for number, group in enumerate(self.optimizer.param_groups)
            for place in range(len(group["params"]))
        ]

    @property
    def optim(self) -> Optimizer:
        """The optimizer that does the updates."""
        return self.optimizer if self.engine is None else self.engine.inner.optim

    @property
    def kind(self) -> str:
        """The full names of the classes that do the updates."""
        return kind_of(self.optim)

    def state_shards(self) -> list[StateShard]:
        """Return this rank's state: the owned shards of a ZeroRedundancyOptimizer, else all parameters."""
        if self.engine is not None:
            return owned_state(self.engine.inner, self.names)
        state, names = self.optim.state, self.names
        return [
            StateShard(index, names[index], param, 0, param.numel(), param, None, state.get(param, {}))
            for index, param in enumerate(self.params)
        ]

    def check_state_keys(self) -> None:
        """Raise ``TypeError`` if the optimizer has state under a key that is not a parameter."""
        known = {id(shard.tensor) for shard in self.state_shards()}
        for key in self.optim.state:
            if id(key) not in known:
                raise TypeError(f"{self.kind} keeps state under {key!r:.80}, which is not a parameter: cannot save it")

    def split_by_group(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divide a list with one item per parameter into one list per parameter group."""
        return split_by_group(self.optimizer.param_groups, items)

    def uses_master(self, index: int) -> bool:
        """Whether the owners of this parameter step a float32 master weight."""
        if self.engine is None:
            return False
        wanted, param = self.engine.inner.master_policy, self.params[index]
        return wanted.fp32_copies and wanted.applies_to(param) and param.dtype.itemsize < 4

    def install(
        self,
        states: dict[int, dict[Any, Any]],
        options: Sequence[dict[str, Any]],
        loaded_masters: Collection[int],
        has_state: bool,
    ) -> None:
        """Load state and options into the optimizer.

        Args:
            states: the state of this rank's shards, by parameter.
            options: the options of every group.
            loaded_masters: parameters whose master weights are written already.
            has_state: whether any rank loads state.
        """
        if self.engine is not None:
            load_inner(self.engine.inner, states, options, as_saved=True)
            groups = self.optimizer.param_groups
            finish_load(self.engine, groups, options, {}, has_state, loaded_masters)
            return
        states = {index: split_averages(state)[0] for index, state in states.items()}
        positions = self.split_by_group(range(len(self.params)))
        groups = [{**values, "params": members} for values, members in zip(options, positions, strict=True)]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for index, state in states.items():
            keep_as_saved(self.optimizer.state[self.params[index]], state)


def optimizer_views(model: nn.Module | None, optimizer: Optimizers) -> list[OptimizerView]:
    """Return a view of each optimizer, with the model's parameter names if there is a model.

    Parameters that are still in flight are waited for first.
    """
    several = isinstance(optimizer, Sequence)
    given: list[Any] = [] if optimizer is None else list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for each in given:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer must be an optimizer or a list of them, got {type(each).__qualname__}")
        if type(each).__module__ == "torch.distributed.optim.zero_redundancy_optimizer":
            raise TypeError(
                "torch's ZeroRedundancyOptimizer hides its state from other modules: use "
                "onecopy.ZeroRedundancyOptimizer, which takes the same arguments, or a plain optimizer"
            )
    names: dict[int, str] = {}
    if model is not None:
        names = {id(param): name for name, param in unwrapped(model).named_parameters()}
    views = [OptimizerView(each, names) for each in given]
    in_flight: list[Any] = [view.optimizer for view in views if view.engine is not None]
    for each in [*in_flight, *([model] if isinstance(model, WrapsModule) else [])]:
        each.wait()
    return views


def shown_kinds(views: Sequence[OptimizerView]) -> str:
    """Return the classes of the optimizers as text; all ranks must have the same."""
    kinds = [f"{view.kind}{'' if view.engine is None else ' (sharded)'}" for view in views]
    return f"{len(kinds)} of them: {', '.join(kinds)}" if kinds else "None"


# Forms: parameters by name or by position


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
    by_position, extras = split_extras(by_position)
    numbered = [{**group, "params": [position_of[name] for name in group["params"]]} for group in groups]
    return {"state": by_position, "param_groups": numbered, **extras}


def split_extras(state: dict[int, dict[Any, Any]]) -> tuple[dict[int, dict[Any, Any]], dict[str, Any]]:
    """Return state by parameter as a plain optimizer knows it, and the entries of a state dict beside it.

    These have the master weights by parameter, and the number of steps and the values of each average.
    """
    state, masters = master_weights.split_master_weights(state)
    split = {index: split_averages(values) for index, values in state.items()}
    plain = {index: values for index, (values, averages) in split.items() if values or not averages}
    found: dict[str, dict[str, Any]] = {}
    for index, (_, averages) in split.items():
        for key, value in averages.items():
            name = key.removeprefix(AVERAGE_PREFIX).removesuffix(AVERAGE_STEPS)
            entry = found.setdefault(name, {"steps": 0, "values": {}})
            if key.endswith(AVERAGE_STEPS):
                entry["steps"] = value
            else:
                entry["values"][index] = value
    extras = {master_weights.STATE_DICT_KEY: masters, AVERAGES: found}
    return plain, {key: value for key, value in extras.items() if value}
