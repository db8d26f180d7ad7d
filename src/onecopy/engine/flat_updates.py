"""Many small parameters updated as one: what a step costs in Python is then a matter of runs, not of parameters.

A run is small parameters, each of so many elements that the same vector instructions work on them in a longer tensor.
For torch's own elementwise classes the result is then bitwise the same, whichever implementation they use (not with
bf16 and fp16, where the ends of a thread's part are rounded otherwise). Parameters that lie side by side in a bucket
are updated where they are, others in a copy.

The state of a run is *adopted*: moved side by side, once, and seen through views from then on, so that those who read
or write the state of one parameter find it under the same keys. A *twin*, another optimizer of the same class, steps
one flat tensor. Whatever is not as that takes is left to the inner optimizer, with state in memory of its own again:
torch adds some sparse gradients at the wrong place to a tensor that is part of a longer memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, repeat
from operator import is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.engine.classes import ELEMENTWISE
from onecopy.engine.flat import flat_views
from onecopy.engine.torch_private import bare_step, copy_each, has_step_hooks, version_of

FEWEST = 32
"""The tensors of a run are at least so many: to call one more ``step`` takes as long as to loop over these."""

LONGEST_WAIT = 1000
"""So many steps at most go by before state that did not fit is looked at again; in the beginning none do."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors of one group, and the flat memory that they fill, one after the other, if there is such."""

    group: int
    tensors: tuple[Tensor, ...]
    memory: Tensor | None


class FlatUpdates:
    """Steps an optimizer, its runs as flat tensors where the result is bitwise the same."""

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], runs: Sequence[Run], patience: int = 0) -> None:
        self._inner = inner
        runs = [run for run in runs if len(run.tensors) >= FEWEST and type(inner) in ELEMENTWISE]
        self._runs = [_Updates(inner, defaults, run, patience) for run in runs]
        in_runs = {id(tensor) for run in runs for tensor in run.tensors}
        self._others = [
            [tensor for tensor in group["params"] if id(tensor) not in in_runs] for group in inner.param_groups
        ]
        self._counts = [len(group["params"]) for group in inner.param_groups]

    @property
    def patience(self) -> int:
        """How many steps those who come after this one should wait."""
        return max((run.patience for run in self._runs), default=0)

    def wake(self) -> None:
        """Note that the state is new: hold on to nothing of the old, and look whether the new fits."""
        self.let_go()
        for run in self._runs:
            run.wake()

    @torch.no_grad()
    def let_go(self) -> None:
        """Make the state such as if no run had been adopted, for a step that the inner optimizer makes alone."""
        for run in self._runs:
            run.let_go()

    def step(self, run_inner: Callable[[], Any]) -> Any:
        """Make one step; ``run_inner`` is the inner optimizer's own."""
        if not self._runs or not self._permitted():
            self.let_go()
            return run_inner()
        left = [list(others) for others in self._others]
        with torch.no_grad():
            entries = _Entries(self._inner.state)
            for run in self._runs:
                left[run.group] += run.prepare(entries)
        # First, because it is the one that refuses what it cannot step: then nothing has changed.
        loss = self._step_some(left, run_inner)
        with torch.no_grad():
            for run in self._runs:
                run.step()
        return loss

    def _step_some(self, tensors: Sequence[list[Tensor]], run_inner: Callable[[], Any]) -> Any:
        """Step the inner optimizer over some of the tensors of each group."""
        groups = self._inner.param_groups
        before = [group["params"] for group in groups]
        try:
            for group, some in zip(groups, tensors, strict=True):
                if len(some) != len(group["params"]):
                    group["params"] = some
            return run_inner() if any(tensors) else None
        finally:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params

    def _permitted(self) -> bool:
        inner = self._inner
        return (
            not has_step_hooks(inner)
            # What torch's GradScaler leaves for an optimizer that divides by the scale itself.
            and getattr(inner, "grad_scale", None) is None
            and getattr(inner, "found_inf", None) is None
            and [len(group["params"]) for group in inner.param_groups] == self._counts
        )


class _Entries:
    """An optimizer's state as lists, because to look up every tensor takes longer."""

    def __init__(self, state: Mapping[Tensor, Any]) -> None:
        self.tensors = list(state)
        self.values = list(state.values())

    @cached_property
    def positions(self) -> dict[int, int]:
        """Where each tensor is in these lists."""
        return {id(tensor): position for position, tensor in enumerate(self.tensors)}


class _Updates:
    """One run: in adopted parts, as far as its state fits, and what is left for the inner optimizer."""

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], run: Run, patience: int) -> None:
        self._inner, self._defaults, self._run = inner, defaults, run
        self.group = run.group
        self.wake(patience)

    def wake(self, patience: int = 0) -> None:
        """Begin anew."""
        self._parts: list[_Part] = []
        self._left: Sequence[Tensor] = self._run.tensors
        self._wait = self.patience = patience

    def let_go(self) -> None:
        """Leave everything to the inner optimizer, for this time."""
        self._drop(self._parts)

    def prepare(self, entries: _Entries) -> Sequence[Tensor]:
        """Find out what can be updated together in this step; return what is left."""
        self._drop([part for part in self._parts if not part.is_intact(entries)])
        if self._left:
            self._wait -= 1
            if self._wait < 0:
                self._adopt(entries.positions)
        self._drop([part for part in self._parts if not part.take_gradients()])
        return self._left

    def step(self) -> None:
        """Update it."""
        for part in self._parts:
            part.step()

    def _adopt(self, positions: Mapping[int, int]) -> None:
        runs = list(_alike_parts(self._run, self._left, self._inner.state))
        self._parts += [_Part(self._inner, self._defaults, run, positions) for run in runs]
        taken = {id(tensor) for run in runs for tensor in run.tensors}
        self._left = [tensor for tensor in self._left if id(tensor) not in taken]
        if self._left:
            self._lose_patience()

    def _drop(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            for tensor in part.tensors:
                _give_own_memory(self._inner.state.get(tensor))
        if parts:
            self._left = [*self._left, *(tensor for part in parts for tensor in part.tensors)]
            self._parts = [part for part in self._parts if part not in parts]
            self._lose_patience()

    def _lose_patience(self) -> None:
        self._wait = self.patience
        self.patience = min(2 * self.patience + 1, LONGEST_WAIT)


class _Part:
    """Tensors whose state lies side by side, and their twin."""

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], run: Run, positions: Mapping[int, int]) -> None:
        self._inner, self._group, self.tensors = inner, run.group, run.tensors
        states = [inner.state[tensor] for tensor in run.tensors]
        self._held, self._counters = _side_by_side(states)
        # Which entries of the optimizer's state these are, and at which addresses: only numbers, which keep nothing.
        self._pick = itemgetter(*(positions[id(tensor)] for tensor in run.tensors))
        self._addresses = _addresses(states)
        self._matrices = [position for position, tensor in enumerate(run.tensors) if tensor.dim() != 1]
        self._homes = [] if run.memory is not None else flat_views(run.tensors)
        first = run.tensors[0]
        self._flat = torch.empty(0, dtype=first.dtype, device=first.device) if run.memory is None else run.memory
        self._twin = type(inner)([self._options()], **defaults)
        self._twin.state.clear()
        self._twin.state[self._flat] = dict(self._held)
        self._step_twin = bare_step(self._twin)

    def is_intact(self, entries: _Entries) -> bool:
        """Whether the state of all is still where it was put, and the counters are still the same for all."""
        try:
            same = all(map(is_, self._pick(entries.tensors), self.tensors))
            same = same and _addresses(self._pick(entries.values)) == self._addresses
        except (IndexError, TypeError):  # state was taken away, or something else put there
            return False
        return same and all(counter.is_common() for counter in self._counters)

    def take_gradients(self) -> bool:
        """Hold on to the gradients for this step; False if some are missing, or not such as can be put side by side."""
        found: list[Any] = [tensor.grad for tensor in self.tensors]
        self._gradients: list[Tensor] = []
        if not all(map(is_not, found, repeat(None))):
            return all(map(is_, found, repeat(None)))  # if all are missing, torch's classes leave all alone
        # Sparse ones are not contiguous.
        if not all(map(Tensor.is_contiguous, found)) or {gradient.dtype for gradient in found} != {self._flat.dtype}:
            return False
        self._gradients = found
        return True

    def step(self) -> None:
        """Update all, and make what each one's state shows equal to the twin's."""
        gradients, self._gradients = self._gradients, []
        if not gradients:
            return
        for position in self._matrices:
            gradients[position] = gradients[position].view(-1)
        flat, values = self._flat, self._flat
        if self._homes:
            values = torch.cat(self._homes)
            flat.data = values
        flat.grad = torch.cat(gradients)
        self._twin.param_groups[0] = self._options()
        try:
            self._step_twin()
        finally:
            flat.grad = None
        if self._homes:
            copy_each(self._homes, list(values.split([home.numel() for home in self._homes])))
            flat.data = values.new_empty(0)
        state = self._twin.state[flat]
        for key, held in self._held.items():
            if state[key] is not held:  # an implementation that makes new tensors instead of changing these
                held.copy_(state[key])
                state[key] = held
        for counter in self._counters:
            counter.spread()

    def _options(self) -> dict[str, Any]:
        return {**self._inner.param_groups[self._group], "params": [self._flat]}


@dataclass(slots=True)
class _Counter:
    """A number in the state of each parameter, such as how many steps were made, that is the same for all."""

    flat: Tensor
    each: Tensor
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = version_of(self.each)

    def spread(self) -> None:
        """Give every parameter the number that the twin has now."""
        self.each.copy_(self.flat)
        self.version = version_of(self.each)

    def is_common(self) -> bool:
        """Whether it is still the same for all; follow if someone has changed it for all of them."""
        # To look at it on an accelerator would make the host wait, in every step.
        if self.each.device.type != "cpu" and version_of(self.each) == self.version:
            return True
        if not bool((self.each == self.each[0]).all()):
            return False
        self.flat.copy_(self.each[0])
        self.version = version_of(self.each)
        return True


def _alike_parts(run: Run, among: Sequence[Tensor], state: Mapping[Tensor, Any]) -> Iterator[Run]:
    """The parts of a run whose tensors, all ``among`` these, have state of one kind and have made as many steps."""
    chosen = {id(tensor) for tensor in among}
    kinds = [_kind(state.get(tensor), tensor) if id(tensor) in chosen else None for tensor in run.tensors]
    start = stop = 0
    for kind, members in groupby(range(len(kinds)), kinds.__getitem__):
        tensors = tuple(run.tensors[position] for position in members)
        start, stop = stop, stop + sum(tensor.numel() for tensor in tensors)
        if kind is not None and len(tensors) >= FEWEST:
            yield replace(run, tensors=tensors, memory=None if run.memory is None else run.memory[start:stop])


def _kind(state: Any, tensor: Tensor) -> tuple[Any, ...] | None:
    """What the state of tensors that are updated together must have in common; None if it is not of that sort."""
    if type(state) is not dict or not state:
        return None
    kind = []
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.shape not in ((), tensor.shape):
            return None
        kind.append((key, value.dtype, value.device, None if value.dim() else value.item()))
    return tuple(kind)


def _side_by_side(states: Sequence[dict[Any, Any]]) -> tuple[dict[Any, Tensor], list[_Counter]]:
    """Move equal entries of all states into one tensor, entry by entry, and leave views of it in their place."""
    held, counters = {}, []
    for key, first in list(states[0].items()):
        values = [state[key] for state in states]
        if first.dim() == 0:
            counter = _Counter(first.clone(), torch.stack(values))
            counters.append(counter)
            held[key] = counter.flat
            views = [counter.each[position] for position in range(len(values))]
        else:
            held[key] = torch.cat([value.reshape(-1) for value in values])
            pieces = held[key].split([value.numel() for value in values])
            views = [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]
        for state, view in zip(states, views, strict=True):
            state[key] = view
    return held, counters


def _addresses(states: Sequence[dict[Any, Any]]) -> list[int]:
    return list(map(Tensor.data_ptr, chain.from_iterable(map(dict.values, states))))


def _give_own_memory(state: Any) -> None:
    """Give a parameter's state memory of its own again, because a view keeps all that it was part of."""
    for key, value in state.items() if isinstance(state, dict) else ():
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        if dense and value.untyped_storage().nbytes() > value.nbytes:
            state[key] = value.clone()
