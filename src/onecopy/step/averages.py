"""Running averages of the tensors that the inner optimizer steps: each rank averages only the shards that it owns.

An average follows every update on the stream of the update, and sends nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import interpolate_each
from onecopy.step.batched_copies import batches
from onecopy.step.gradients import OwnedShard

PREFIX = "average:"
"""An average is saved with the state of its parameter, under this prefix and its name."""

STEPS = ":steps"
"""Follows the name in the entry with the number of steps that an average has seen."""

STATE_DICT_KEY = "averages"
"""The entry of a state dict with the averages by name and parameter. Plain optimizers ignore it."""

Decay = float | Callable[[int], float]


@dataclass(frozen=True, slots=True)
class AverageRule:
    """When and how an average follows.

    Attributes:
        decay: the part of the old average that stays, or a function of the number of averages so far.
        dtype: the data type of the average; None for that of the stepped tensor.
        update_every: average after every so many steps.
        start_step: the number of steps before the first average, which is a copy.
    """

    decay: Decay
    dtype: torch.dtype | None
    update_every: int
    start_step: int

    def number(self, steps: int) -> int | None:
        """The number of averages before the one that follows a step, or None if none follows it."""
        late = steps - self.start_step
        return None if late < 0 or late % self.update_every else late // self.update_every

    def steps_after(self, count: int) -> int:
        """The number of steps after this number of averages."""
        return self.start_step + max(0, (count - 1) * self.update_every + 1)

    def weight(self, number: int) -> float:
        """The part of the new value in an average."""
        return 1 - (self.decay(number) if callable(self.decay) else self.decay)


@dataclass(slots=True)
class Average:
    """One average of the shards that this rank owns.

    Attributes:
        rule: when and how it follows.
        steps: the number of steps so far.
        tensors: the averages, by the ``id()`` of the stepped tensor. A parameter that no step has changed has none,
            because its average is its value.
    """

    rule: AverageRule
    steps: int = 0
    tensors: dict[int, Tensor] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # ids of the tensors that were averaged in this step

    def before_update(self, owned: Sequence[OwnedShard], all_change: bool) -> None:
        """Keep the values of parameters that change for the first time since the average began."""
        if self.steps <= self.rule.start_step:
            return
        for entry in owned:
            if id(entry.tensor) not in self.tensors and (entry.param.requires_grad or all_change):
                self._copy(entry.tensor)

    def after_update(self, owned: Sequence[OwnedShard], all_change: bool) -> None:
        """Average the tensors that a step has updated, or a part of them."""
        number = self.rule.number(self.steps)
        if number is None:
            return
        averaged = [entry for entry in owned if id(entry.tensor) not in self._done]
        self._done.update(id(entry.tensor) for entry in averaged)
        if number == 0:
            for entry in averaged:
                if entry.param.requires_grad or all_change:
                    self._copy(entry.tensor)
            return
        kinds: dict[object, list[tuple[Tensor, Tensor]]] = {}
        for entry in averaged:
            average = self.tensors.get(id(entry.tensor))
            if average is not None:
                kind = (average.device, average.dtype, entry.tensor.dtype)
                kinds.setdefault(kind, []).append((average, entry.tensor.detach()))
        for pairs in kinds.values():
            _interpolate([one for one, _ in pairs], [other for _, other in pairs], self.rule.weight(number))

    def end_step(self, owned: Sequence[OwnedShard], all_change: bool) -> None:
        """Average the rest, and count the step."""
        self.after_update(owned, all_change)
        self._done.clear()
        self.steps += 1

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """A stepped tensor as the first average; None for integers."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        dtype = tensor.dtype if self.rule.dtype is None or tensor.is_complex() else self.rule.dtype
        return tensor.detach().to(dtype, copy=True)

    def _copy(self, tensor: Tensor) -> None:
        copy = self.copy_of(tensor)
        if copy is not None:
            self.tensors[id(tensor)] = copy

    def loaded(self, name: str, saved: Mapping[int, Mapping[str, Any]], owned: Sequence[OwnedShard]) -> Average:
        """The average of this name that saved entries make, by parameter."""
        found = [saved.get(entry.shard.param, {}) for entry in owned]
        new = Average(self.rule, max((entries.get(PREFIX + name + STEPS, 0) for entries in found), default=0))
        if new.steps <= self.rule.start_step:
            return new  # until the first average it is the parameter itself
        for entry, entries in zip(owned, found, strict=True):
            if PREFIX + name in entries:
                new._copy(entry.tensor)
                new.tensors[id(entry.tensor)].copy_(entries[PREFIX + name].view(entry.tensor.shape))
        return new


def _interpolate(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    if averages[0].dtype == values[0].dtype:
        interpolate_each(averages, values, weight)
        return
    for some, others in zip(
        batches(list(map(flat_view, averages))), batches(list(map(flat_view, values))), strict=True
    ):
        interpolate_each(some, [other.to(some[0].dtype) for other in others], weight)


class Averages(dict[str, Average]):
    """The averages of one inner optimizer by name. A load replaces the whole object."""

    def before_update(self, owned: Sequence[OwnedShard], all_change: bool) -> None:
        """Tell all averages of an update that follows."""
        for average in self.values():
            average.before_update(owned, all_change)

    def after_update(self, owned: Sequence[OwnedShard], all_change: bool) -> None:
        """Let all averages follow an update of some shards."""
        for average in self.values():
            average.after_update(owned, all_change)

    def end_step(self, owned: Sequence[OwnedShard], all_change: bool) -> None:
        """End the step of all averages."""
        for average in self.values():
            average.end_step(owned, all_change)

    def state_of(self, entry: OwnedShard, to_load: bool = False) -> dict[str, Any]:
        """The entries with which the averages of one shard are saved; for a frozen parameter, the number of steps.

        A rank may own frozen parameters only, and counts on from there when they are trained later. ``to_load`` adds
        memory for an average that has not begun.
        """
        found: dict[str, Any] = {}
        for name, average in self.items():
            values = average.tensors.get(id(entry.tensor))
            if values is None and to_load and entry.param.requires_grad:
                values = average.copy_of(entry.tensor)
            if values is not None:
                found[PREFIX + name] = values
            found[PREFIX + name + STEPS] = average.steps
        return found

    def loaded(self, saved: Mapping[int, Mapping[str, Any]], owned: Sequence[OwnedShard]) -> Averages:
        """The averages that saved entries make, by parameter. An average that was not saved begins anew."""
        names = {key.removeprefix(PREFIX).removesuffix(STEPS) for entries in saved.values() for key in entries}
        for name in sorted(names - self.keys()):
            warnings.warn(
                f"the average {name!r} was saved, and nothing here takes it: construct ShardedEMA(name={name!r}) "
                "before loading, or it is dropped",
                stacklevel=2,
            )
        return Averages({name: average.loaded(name, saved, owned) for name, average in self.items()})


def split_averages(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The state of one parameter without the entries of averages, and these entries."""
    averages = {key: value for key, value in state.items() if isinstance(key, str) and key.startswith(PREFIX)}
    return {key: value for key, value in state.items() if key not in averages}, averages
