"""Many small parameters updated as one: what a step costs in Python is then a matter of runs, not of parameters.

A run is small parameters, each of so many elements that the same vector instructions work on them in a longer tensor.
For torch's own elementwise classes the result is then bitwise the same, whichever implementation they use (not with
bf16 and fp16, where the ends of a thread's part are rounded otherwise). Parameters that lie side by side in a bucket
are updated where they are, others in a copy.

The state of a run is *adopted*: moved side by side, into a *twin*, another optimizer of the same class, which steps one
flat tensor. It is moved back, into memory of its own, for whoever asks for it, and for the inner optimizer, to which
whatever is not as that takes is left. State that somebody holds on to is not adopted, so that it stays the current one.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.engine.classes import ELEMENTWISE
from onecopy.engine.flat import flat_views
from onecopy.engine.held_state import HeldState, Holder
from onecopy.engine.torch_private import (
    bare_step,
    copy_each,
    has_memory_to_itself,
    has_step_hooks,
    plain_operations,
    split_copies,
)

FEWEST = 32
"""The tensors of a run are at least so many: to call one more ``step`` takes as long as to loop over these."""

PAYS_OFF = 10
"""After so many steps to have moved the state there and back has taken less time than it saved."""

LONGEST_WAIT = 1000
"""So many steps at most go by before state that did not stay long enough is looked at again; at first none do."""


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
        self._find_state()

    @property
    def patience(self) -> int:
        """How many steps those who come after this one should wait."""
        return max((run.patience for run in self._runs), default=0)

    def wake(self) -> None:
        """Note that the state is new, and look at once whether it fits."""
        self._find_state()
        for run in self._runs:
            run.wake()

    def step(self, run_inner: Callable[[], Any]) -> Any:
        """Make one step; ``run_inner`` is the inner optimizer's own."""
        state = self._find_state()
        if state is None or not self._permitted():
            return run_inner()
        left = [list(others) for others in self._others]
        ready: list[tuple[_Part, list[Tensor]]] = []
        for run in self._runs:
            ready += run.prepare(state)
            left[run.group] += run.left
        # First, because it is the one that refuses what it cannot step: then nothing has changed.
        loss = self._step_some(left, run_inner)
        asked_for: list[list[Tensor]] = [[] for _ in self._others]
        for part, gradients in ready:
            if not part.step(state, self._inner.param_groups[part.group], gradients):
                asked_for[part.group] += part.tensors
        self._step_some(asked_for, run_inner)
        return loss

    def _find_state(self) -> HeldState | None:
        """The inner optimizer's state, made such that some of it can be held; None if there is no use or no way."""
        inner = self._inner
        plain = self._runs and type(inner.state) is defaultdict and inner.state.default_factory is dict
        if plain and _held_by_nobody_else([inner.state]) == [True]:
            inner.state = HeldState(dict, inner.state)
        return inner.state if self._runs and isinstance(inner.state, HeldState) else None

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
            and not torch.is_inference_mode_enabled()
        )


class _Updates:
    """One run: in adopted parts, as far as its state fits, and what is left for the inner optimizer."""

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], run: Run, patience: int) -> None:
        self._inner, self._defaults, self._run = inner, defaults, run
        self.group = run.group
        self.wake(patience)

    def wake(self, patience: int = 0) -> None:
        """Begin anew."""
        self._set_parts([])
        self._wait = self._patience = patience

    @property
    def patience(self) -> int:
        """How many steps go by before what is left is looked at again."""
        return 0 if any(part.steps >= PAYS_OFF for part in self._parts) else self._patience

    def prepare(self, state: HeldState) -> list[tuple[_Part, list[Tensor]]]:
        """Find out which parts can be updated together in this step, with which gradients, and what is left."""
        self._drop_given_back(state)
        if self.left:
            self._wait -= 1
            if self._wait < 0:
                self._adopt(state)
        found = {part: part.find_gradients() for part in self._parts}
        for part, gradients in found.items():
            if gradients is None:
                state.take_back(part)
        self._drop_given_back(state)  # which somebody may have asked for just now: what is left is not ready too
        return [(part, gradients) for part in self._parts if (gradients := found[part]) is not None]

    def _adopt(self, state: HeldState) -> None:
        with plain_operations():
            for run in list(_alike_parts(self._run, self.left, state)):
                part = _Part(type(self._inner), self._defaults, run, [state[tensor] for tensor in run.tensors])
                state.hold(part)
                self._set_parts([*self._parts, part])
        if self.left:
            self._lose_patience()

    def _set_parts(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        taken = {id(tensor) for part in parts for tensor in part.tensors}
        self.left = [tensor for tensor in self._run.tensors if id(tensor) not in taken]

    def _drop_given_back(self, state: HeldState) -> None:
        """Notice which parts somebody has asked for."""
        gone = [part for part in self._parts if not state.is_held(part)]
        if gone:
            self._set_parts([part for part in self._parts if part not in gone])
            if min(part.steps for part in gone) >= PAYS_OFF:
                self._wait = self._patience = 0
            else:
                self._lose_patience()

    def _lose_patience(self) -> None:
        self._wait = self._patience
        self._patience = min(2 * self._patience + 1, LONGEST_WAIT)


class _Part(Holder):
    """Tensors whose state lies side by side in a twin, which updates them all."""

    def __init__(
        self, optimizer_class: type[Optimizer], defaults: dict[str, Any], run: Run, states: Sequence[dict[Any, Any]]
    ) -> None:
        self.tensors, self.group = run.tensors, run.group
        self.steps = 0
        self._matrices = [position for position, tensor in enumerate(run.tensors) if tensor.dim() != 1]
        self._homes = [] if run.memory is not None else flat_views(run.tensors)
        first = run.tensors[0]
        self._flat = torch.empty(0, dtype=first.dtype, device=first.device) if run.memory is None else run.memory
        self._twin: Any = optimizer_class([self._flat], **defaults)
        self._twin.state.clear()
        self._twin.state[self._flat] = _side_by_side(states)
        self._step_twin = bare_step(self._twin)
        self._stepping = False
        self._asked_for: list[dict[Any, Any]] = []

    def copies(self) -> list[dict[Any, Any]]:
        """The state of each tensor, in memory of its own."""
        states: list[dict[Any, Any]] = [{} for _ in self.tensors]
        sizes = [tensor.numel() for tensor in self.tensors]
        with plain_operations():
            for key, value in self._twin.state[self._flat].items():
                if value.dim():
                    pieces = split_copies(value, sizes)
                    for position in self._matrices:
                        pieces[position].resize_(self.tensors[position].shape)
                else:
                    pieces = [value.clone() for _ in sizes]
                for state, piece in zip(states, pieces, strict=True):
                    state[key] = piece
        if self._stepping:
            self._asked_for = [dict(state) for state in states]
        return states

    def forget(self) -> None:
        """Keep nothing, unless a step is being made, which forgets it."""
        if not self._stepping:
            self._twin.state.clear()

    def find_gradients(self) -> list[Tensor] | None:
        """The gradients of all, or of none; None if some are missing, or not such as can be put side by side."""
        found: list[Any] = [tensor.grad for tensor in self.tensors]
        if not all(map(is_not, found, repeat(None))):
            return [] if all(map(is_, found, repeat(None))) else None  # torch's classes leave alone what has none
        # Sparse ones are not contiguous.
        if not all(map(Tensor.is_contiguous, found)) or {gradient.dtype for gradient in found} != {self._flat.dtype}:
            return None
        return found

    @torch.no_grad()
    def step(self, state: HeldState, options: Mapping[str, Any], gradients: list[Tensor]) -> bool:
        """Update all; False, and nothing is done, if their state is no longer here."""
        with state.lock:
            if not state.is_held(self):
                return False
            # From now on whoever asks, a thread or a signal's handler, gets copies that are brought up to date below.
            self._stepping = True
        try:
            if gradients:
                self._step(options, gradients)
        finally:
            with state.lock:
                self._stepping = False
                asked_for, self._asked_for = self._asked_for, []
                if asked_for:
                    for old, new in zip(asked_for, self.copies(), strict=True):
                        for key, value in old.items():
                            value.copy_(new[key])
                    self.forget()
        return True

    def _step(self, options: Mapping[str, Any], gradients: list[Tensor]) -> None:
        self.steps += 1
        for position in self._matrices:
            gradients[position] = gradients[position].view(-1)
        flat, values = self._flat, self._flat
        if self._homes:
            values = torch.cat(self._homes)
            flat.data = values
        flat.grad = torch.cat(gradients)
        self._twin.param_groups[0] = {**options, "params": [flat]}
        try:
            self._step_twin()
        finally:
            flat.grad = None
        if self._homes:
            copy_each(self._homes, list(values.split([home.numel() for home in self._homes])))
            flat.data = values.new_empty(0)


def _alike_parts(run: Run, among: Sequence[Tensor], state: HeldState) -> Iterator[Run]:
    """The parts of a run whose tensors, all ``among`` these, have state of one kind and have made as many steps."""
    chosen = {id(tensor) for tensor in among if tensor in state}
    states = [state[tensor] if id(tensor) in chosen else None for tensor in run.tensors]
    kinds = [
        _kind(each, tensor) if is_free else None
        for each, tensor, is_free in zip(states, run.tensors, _held_by_nobody_else(states), strict=True)
    ]
    start = stop = 0
    for kind, members in groupby(range(len(kinds)), kinds.__getitem__):
        tensors = tuple(run.tensors[position] for position in members)
        start, stop = stop, stop + sum(tensor.numel() for tensor in tensors)
        if kind is not None and len(tensors) >= FEWEST:
            yield replace(run, tensors=tensors, memory=None if run.memory is None else run.memory[start:stop])


def _held_by_nobody_else(values: list[Any]) -> list[bool]:
    """Which values are referred to by this list and the dict that they come from alone."""
    return [count == _REFERENCES for count in map(sys.getrefcount, values)]


_SAMPLE = {"in a dict": object()}
_REFERENCES = max(map(sys.getrefcount, list(_SAMPLE.values())))


def _kind(state: Any, tensor: Tensor) -> tuple[Any, ...] | None:
    """What the state of tensors that are updated together must have in common; None if it is not of that sort."""
    if type(state) is not dict or not state or not all(_held_by_nobody_else(list(state.values()))):
        return None
    kind = []
    for key, value in state.items():
        if type(value) is not Tensor or value.layout is not torch.strided or value.shape not in ((), tensor.shape):
            return None
        known_to_somebody = vars(value) or value.requires_grad or weakref.getweakrefcount(value)
        if known_to_somebody or not has_memory_to_itself(value):
            return None
        kind.append((key, value.dtype, value.device, None if value.dim() else value.item()))
    return tuple(kind)


def _side_by_side(states: Sequence[dict[Any, Any]]) -> dict[Any, Tensor]:
    """The state of all as that of one long tensor."""
    return {
        key: torch.cat([state[key].reshape(-1) for state in states]) if first.dim() else first.clone()
        for key, first in states[0].items()
    }
