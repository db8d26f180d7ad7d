"""Models and optimizers of any kind, seen alike: names, what this rank holds of them, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy.comm.agreement import Fact
from onecopy.common.torch_private import uncompiled
from onecopy.data_parallel.wrapper import ShardedDataParallel
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.state_dict.load import keep_as_saved, load_owned
from onecopy.step import master_weights
from onecopy.step.group_options import NOT_OPTIONS
from onecopy.step.parameter_groups import first_places

Optimizers = Optimizer | Sequence[Optimizer] | None


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that add nothing to its state: DDP, ours, a compiled module."""
    while True:
        if isinstance(model, (DistributedDataParallel, ShardedDataParallel)):
            model = model.module
        elif (inner := uncompiled(model)) is not model:
            model = inner
        else:
            return model


def list_of(optimizer: Optimizers) -> list[Optimizer]:
    """One or several optimizers, or none, as a list; raise ``TypeError`` for anything else."""
    several = isinstance(optimizer, Sequence)
    found: list[Any] = [] if optimizer is None else list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer must be an optimizer or a list of them, got {type(each).__qualname__}")
        if type(each).__module__ == "torch.distributed.optim.zero_redundancy_optimizer":
            raise TypeError(
                "torch's ZeroRedundancyOptimizer keeps its state where nobody else finds it: use "
                "onecopy.ZeroRedundancyOptimizer, which takes the same arguments, or save a plain optimizer"
            )
    return found


@dataclass(frozen=True, slots=True)
class StateShard:
    """What this rank holds of one parameter's state: the range ``[start, stop)`` of it, in the parameter's order.

    ``tensor`` is what the optimizer steps; ``home`` the parameter's own memory, if that is another (master weights).
    """

    index: int
    start: int
    stop: int
    tensor: Tensor
    param_view: Tensor | None
    state: Mapping[Any, Any]


class OptimizerView:
    """One optimizer, ours or any other: its parameters in order, with the names that the model gives them."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        found = [names.get(id(param)) for param in self.params]
        again = sorted(set(range(len(self.params))) - set(first_places(self.params)))
        if again:
            name = found[again[0]] or self.positions[again[0]]
            raise ValueError(
                f"parameter {name!r} is several times in a group of {self.kind}, "
                "which a checkpoint cannot tell apart: give it once, or save consolidate_state_dict() + state_dict()"
            )
        self.named = bool(names)
        unknown = [position for position, name in enumerate(found) if name is None]
        if self.named and unknown:
            raise ValueError(
                f"parameter {self.positions[unknown[0]]!r} of {self.kind} is not a parameter of the model: pass the "
                "model that it optimizes, or no model"
            )
        self.names = [str(name) for name in found] if self.named else self.positions

    @property
    def positions(self) -> list[str]:
        """Names by group and place, for parameters of which no model is known."""
        return [
            f"group{number}[{place}]"
            for number, group in enumerate(self.optimizer.param_groups)
            for place in range(len(group["params"]))
        ]

    @property
    def zero(self) -> ZeroRedundancyOptimizer | None:
        """The optimizer, if it is one of ours."""
        return self.optimizer if isinstance(self.optimizer, ZeroRedundancyOptimizer) else None

    @property
    def kind(self) -> str:
        """The class that does the updates."""
        kind = type(self.zero.optim) if self.zero is not None else type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def state_shards(self) -> Iterator[StateShard]:
        """What this rank holds: its own part for ours, everything for other optimizers."""
        if self.zero is None:
            for index, param in enumerate(self.params):
                yield StateShard(index, 0, param.numel(), param, None, self.optimizer.state.get(param, {}))
            return
        for owned in self.zero.engine.inner.owned:
            shard = owned.shard
            state = self.zero.optim.state.get(owned.tensor, {})
            yield StateShard(shard.param, shard.start, shard.stop, owned.tensor, owned.param_view, state)

    def check_state_keys(self) -> None:
        """Raise ``TypeError`` if state is kept under something that is not a parameter."""
        inner = self.optimizer if self.zero is None else self.zero.optim
        known = {id(shard.tensor) for shard in self.state_shards()}
        for key in inner.state:
            if id(key) not in known:
                raise TypeError(f"{self.kind} keeps state under {key!r:.80}, which is not a parameter: cannot save it")

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Every group's options, and its parameters' names."""
        found, start = [], 0
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
            found.append((options, self.names[start : start + len(group["params"])]))
            start += len(group["params"])
        return found

    def uses_master(self, index: int) -> bool:
        """Whether some rank steps a finer copy of this parameter."""
        if self.zero is None:
            return False
        wanted = self.zero.engine.inner.master_policy
        return wanted.fp32_copies and wanted.applies_to(self.params[index]) and self.params[index].dtype.itemsize < 4

    def install(
        self,
        states: dict[int, dict[Any, Any]],
        options: Sequence[dict[str, Any]],
        mastered: Collection[int],
        has_state: bool,
    ) -> None:
        """Take over state by parameter (what this rank holds of it) and options by group.

        Master weights of the parameters in ``mastered`` have been written already.
        """
        if self.zero is not None:
            load_owned(self.zero.engine.inner, self.zero.param_groups, states, options, mastered, has_state)
            self.zero.engine.allow_steps()
            return
        position, groups = 0, []
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            count = len(group["params"])
            groups.append({**values, "params": list(range(position, position + count))})
            position += count
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for index, state in states.items():
            keep_as_saved(self.optimizer.state[self.params[index]], state)


def optimizer_views(model: nn.Module | None, optimizer: Optimizers) -> list[OptimizerView]:
    """All optimizers, with the model's names for their parameters if there is one."""
    names: dict[int, str] = {}
    if model is not None:
        names = {id(param): name for name, param in unwrapped(model).named_parameters()}
    return [OptimizerView(each, names) for each in list_of(optimizer)]


def argument_facts(model: nn.Module | None, views: Sequence[OptimizerView]) -> list[Fact]:
    """The arguments ``model`` and ``optimizer``, which ranks that save or load together must give alike."""
    kinds = [f"{view.kind}{'' if view.zero is None else ' (sharded)'}" for view in views]
    return [
        Fact("model", "None" if model is None else "given"),
        Fact("optimizer", f"{len(kinds)} of them: {', '.join(kinds)}" if kinds else "None"),
    ]


def tensor_facts(model: nn.Module | None, views: Sequence[OptimizerView]) -> list[Fact]:
    """The tensors of a model's state dict and the parameters of optimizers: names, shapes and types."""
    tensors = {} if model is None else unwrapped(model).state_dict()
    facts = [
        Fact(f"{name!r} of the model", f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else "data")
        for name, value in tensors.items()
    ]
    for number, view in enumerate(views):
        for place, (name, param) in enumerate(zip(view.names, view.params, strict=True)):
            facts.append(Fact(f"parameter {place} of optimizer {number}", f"{name!r}, {tuple(param.shape)}"))
    return facts


def wait_for(optimizers: Sequence[OptimizerView], model: nn.Module | None) -> None:
    """End transfers of parameters that an overlapped step has left under way."""
    for view in optimizers:
        if view.zero is not None:
            view.zero.wait()
    if isinstance(model, ShardedDataParallel):
        model.wait()


def state_with_master(shard: StateShard) -> dict[Any, Any]:
    """The state of one parameter, with its master weight among it."""
    state = dict(shard.state)
    if shard.param_view is not None:
        state[master_weights.STATE_KEY] = shard.tensor.detach()
    return state


def is_per_element(tensor: Tensor, shard: StateShard) -> bool:
    """Whether a tensor of the state has one value for each element that this rank holds."""
    return tensor.shape == shard.tensor.shape and torch.numel(tensor) == shard.stop - shard.start
