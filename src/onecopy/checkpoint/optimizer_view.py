"""One interface to models and optimizers of any class: parameter names, this rank's state, and how to load it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy.common.torch_private import uncompiled
from onecopy.data_parallel.wrapper import ShardedDataParallel
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.state_dict.forms import Item, split_by_group
from onecopy.state_dict.load import finish_load, keep_as_saved, load_owned_state
from onecopy.step.parameter_groups import first_places

POSITION_NAME = "group{}[{}]"
"""The name of a parameter without a model: the number of its group, and its position in the group."""

Optimizers = Optimizer | Sequence[Optimizer] | None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, ShardedDataParallel and compiled modules."""
    while True:
        if isinstance(model, (DistributedDataParallel, ShardedDataParallel)):
            model = model.module
        elif (inner := uncompiled(model)) is not model:
            model = inner
        else:
            return model


def list_of(optimizer: Optimizers) -> list[Optimizer]:
    """Return the ``optimizer`` argument as a list; raise ``TypeError`` if it is not made of optimizers."""
    several = isinstance(optimizer, Sequence)
    found: list[Any] = [] if optimizer is None else list(optimizer) if several else [optimizer]  # type: ignore[arg-type]
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer must be an optimizer or a list of them, got {type(each).__qualname__}")
        if type(each).__module__ == "torch.distributed.optim.zero_redundancy_optimizer":
            raise TypeError(
                "torch's ZeroRedundancyOptimizer hides its state from other modules: use "
                "onecopy.ZeroRedundancyOptimizer, which takes the same arguments, or a plain optimizer"
            )
    return found


@dataclass(frozen=True, slots=True)
class StateShard:
    """The optimizer state that this rank has of one parameter.

    Attributes:
        index: the position of the parameter in the optimizer.
        param: the parameter.
        start: where this rank's range of the parameter begins, in memory order.
        stop: where it ends.
        tensor: the tensor that the optimizer steps: the parameter, a range of it, or a master weight.
        param_view: the parameter's own memory of the range if ``tensor`` is a master weight, else None.
        state: the state of ``tensor`` in the optimizer.
    """

    index: int
    param: Tensor
    start: int
    stop: int
    tensor: Tensor
    param_view: Tensor | None
    state: Mapping[Any, Any]

    @property
    def numel(self) -> int:
        """The number of elements in this rank's range."""
        return self.stop - self.start

    @property
    def is_cut(self) -> bool:
        """Whether this rank has only a range of the parameter."""
        return self.numel != self.param.numel()


class OptimizerView:
    """One optimizer of any class, its parameters in order, and their names.

    Args:
        optimizer: a ZeroRedundancyOptimizer or any other optimizer.
        names: the model's names by the ``id()`` of the parameter; empty if there is no model.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
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
        unknown = [position for position, name in enumerate(found) if name is None]
        if self.named and unknown:
            raise ValueError(
                f"parameter {self.positions[unknown[0]]!r} of {self.kind} is not a parameter of the model: pass the "
                "model that it optimizes, or no model"
            )
        self.names = [str(name) for name in found] if self.named else self.positions

    @property
    def positions(self) -> list[str]:
        """Names made of the group and the position in it, for optimizers without a model."""
        return [
            POSITION_NAME.format(number, place)
            for number, group in enumerate(self.optimizer.param_groups)
            for place in range(len(group["params"]))
        ]

    @property
    def zero(self) -> ZeroRedundancyOptimizer | None:
        """The optimizer if it is a ZeroRedundancyOptimizer, else None."""
        return self.optimizer if isinstance(self.optimizer, ZeroRedundancyOptimizer) else None

    @property
    def kind(self) -> str:
        """The full name of the class that does the updates."""
        kind = type(self.zero.optim) if self.zero is not None else type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def state_shards(self) -> Iterator[StateShard]:
        """Yield this rank's state: the owned shards of a ZeroRedundancyOptimizer, else all parameters."""
        if self.zero is None:
            for index, param in enumerate(self.params):
                yield StateShard(index, param, 0, param.numel(), param, None, self.optimizer.state.get(param, {}))
            return
        for owned in self.zero.engine.inner.owned:
            shard = owned.shard
            state = self.zero.optim.state.get(owned.tensor, {})
            yield StateShard(shard.param, owned.param, shard.start, shard.stop, owned.tensor, owned.param_view, state)

    def check_state_keys(self) -> None:
        """Raise ``TypeError`` if the optimizer has state under a key that is not a parameter."""
        inner = self.optimizer if self.zero is None else self.zero.optim
        known = {id(shard.tensor) for shard in self.state_shards()}
        for key in inner.state:
            if id(key) not in known:
                raise TypeError(f"{self.kind} keeps state under {key!r:.80}, which is not a parameter: cannot save it")

    def split_by_group(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divide a list with one item per parameter into one list per parameter group."""
        return split_by_group(self.optimizer.param_groups, items)

    def uses_master(self, index: int) -> bool:
        """Whether the owners of this parameter step a float32 master weight."""
        if self.zero is None:
            return False
        wanted = self.zero.engine.inner.master_policy
        return wanted.fp32_copies and wanted.applies_to(self.params[index]) and self.params[index].dtype.itemsize < 4

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
        if self.zero is not None:
            engine = self.zero.engine
            load_owned_state(engine.inner, states, options)
            finish_load(engine, self.zero.param_groups, options, {}, has_state, loaded_masters)
            return
        positions = self.split_by_group(range(len(self.params)))
        groups = [{**values, "params": members} for values, members in zip(options, positions, strict=True)]
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        for index, state in states.items():
            keep_as_saved(self.optimizer.state[self.params[index]], state)


def optimizer_views(model: nn.Module | None, optimizer: Optimizers) -> list[OptimizerView]:
    """Return a view of each optimizer, with the model's parameter names if there is a model."""
    names: dict[int, str] = {}
    if model is not None:
        names = {id(param): name for name, param in unwrapped(model).named_parameters()}
    return [OptimizerView(each, names) for each in list_of(optimizer)]


def wait_for_parameters(views: Sequence[OptimizerView], model: nn.Module | None) -> None:
    """Before a save or a load: wait for updated parameters that are still in flight."""
    for view in views:
        if view.zero is not None:
            view.zero.wait()
    if isinstance(model, ShardedDataParallel):
        model.wait()
