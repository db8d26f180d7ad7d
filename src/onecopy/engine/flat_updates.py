"""Many small parameters updated as one: what a step costs in Python is then a matter of runs, not of parameters.

A run is small parameters that lie side by side in one bucket, each of so many elements that the same vector
instructions work on them in a longer tensor. For torch's own elementwise classes the result is then bitwise the same,
whichever implementation they use (not with bf16 and fp16, where the ends of a thread's part are rounded otherwise).

The state of a run is moved side by side as well, once, and seen through views from then on; so the inner optimizer can
go on at any time, one parameter after the other, and everyone else finds the state where it was. Each run
has a *twin*, another optimizer of the same class with one flat tensor; what is in no run has one together. In each step
these step or, whenever anything is not as they take, the inner optimizer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.engine.classes import ELEMENTWISE
from onecopy.engine.torch_private import bare_step, has_step_hooks, version_of

FEWEST = 16
"""The tensors of a run are at least so many: to call one more ``step`` takes as long as to loop over these."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors of one group that fill a flat tensor, one after the other."""

    group: int
    tensors: tuple[Tensor, ...]
    flat: Tensor


@dataclass(slots=True)
class _Counter:
    """A number that the state of each parameter of a run holds, such as how many steps were made: all the same."""

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


class _Twin:
    """An optimizer over tensors that stand for those of some of the inner optimizer's groups, by the group's number."""

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], tensors: Mapping[int, list[Tensor]]) -> None:
        self._inner, self._tensors = inner, tensors
        self.optimizer = type(inner)(self._groups(), **defaults)
        self._step = bare_step(self.optimizer)

    def _groups(self) -> list[dict[str, Any]]:
        groups = ((self._inner.param_groups[position], tensors) for position, tensors in self._tensors.items())
        return [
            {key: value for key, value in group.items() if key != "param_names"} | {"params": tensors}
            for group, tensors in groups
        ]

    def step(self) -> None:
        """Step with the options that the inner optimizer has now."""
        self.optimizer.param_groups = self._groups()
        self._step()


class _Adopted:
    """A run whose state lies side by side, and its twin."""

    def __init__(
        self, run: Run, held: dict[Any, Tensor], counters: list[_Counter], twin: _Twin, gradient: Tensor
    ) -> None:
        self.run = run
        self._held, self.counters, self._twin = held, counters, twin
        self._matrices = [position for position, tensor in enumerate(run.tensors) if tensor.dim() != 1]
        run.flat.grad = gradient
        twin.optimizer.state[run.flat] = dict(held)

    def gradients(self) -> list[Any] | None:
        """The gradients, each flat; None if one is missing or sparse."""
        found: list[Any] = [tensor.grad for tensor in self.run.tensors]
        if not all(map(is_not, found, repeat(None))):
            return None
        for position in self._matrices:
            if found[position].layout is not torch.strided:
                return None
            found[position] = found[position].reshape(-1)
        return found

    def step(self, gradients: list[Tensor]) -> None:
        """Update the run, and make what each parameter's state shows equal to the twin's."""
        torch.cat(gradients, out=self.run.flat.grad)
        self._twin.step()
        state = self._twin.optimizer.state[self.run.flat]
        for key, held in self._held.items():
            if state[key] is not held:  # an implementation that makes new tensors instead of changing these
                held.copy_(state[key])
                state[key] = held
        for counter in self.counters:
            counter.spread()


class FlatUpdates:
    """Steps for the inner optimizer where the result is bitwise the same."""

    def __init__(self, inner: Optimizer, defaults: dict[str, Any], runs: Sequence[Run]) -> None:
        self._inner = inner
        self._defaults = defaults
        self._runs = runs if type(inner) in ELEMENTWISE else ()
        self._asleep = not self._runs
        self._adopted: list[_Adopted] = []
        self._rest: _Twin | None = None

    def wake(self) -> None:
        """Note that the state is new: what did not fit may fit now."""
        self._asleep = not self._runs

    @torch.no_grad()
    def step(self) -> bool:
        """Make the step that the inner optimizer would make; False if it has to make it itself."""
        if self._asleep or not self._permitted():
            return False
        if not (self._adopted and self._intact()) and not self._adopt():
            return False
        gradients = [adopted.gradients() for adopted in self._adopted]
        if None in gradients:
            return False
        for adopted, found in zip(self._adopted, gradients, strict=True):
            assert found is not None
            adopted.step(found)
        if self._rest is not None:
            self._rest.optimizer.state = self._inner.state
            self._rest.step()
        return True

    def _permitted(self) -> bool:
        inner = self._inner
        return (
            not has_step_hooks(inner)
            # What torch's GradScaler leaves for an optimizer that divides by the scale itself.
            and getattr(inner, "grad_scale", None) is None
            and getattr(inner, "found_inf", None) is None
        )

    def _intact(self) -> bool:
        """Whether the state is still the one that was moved side by side."""
        state = self._inner.state
        # In the order of the dict, because looking each tensor up takes longer. New entries come last.
        if len(state) < len(self._known) or not all(map(is_, state.values(), self._known)):
            return False
        entries = list(chain.from_iterable(map(dict.values, self._states)))
        return (
            len(entries) == len(self._entries)
            and all(map(is_, entries, self._entries))
            and all(counter.is_common() for adopted in self._adopted for counter in adopted.counters)
        )

    def _adopt(self) -> bool:
        """Move the state of each run side by side and make the twins; False if there is no state, or none that fits."""
        state = self._inner.state
        parts = [part for run in self._runs for part in _alike_parts(run, state)]
        self._adopted = []
        if not parts:
            self._asleep = bool(state)
            return False
        memories = {part.flat.device: part.flat for part in sorted(parts, key=lambda part: part.flat.nbytes)}
        # They use the memory for their gradients one after the other.
        memories = {device: torch.zeros_like(flat).view(torch.uint8) for device, flat in memories.items()}
        for part in parts:
            held, counters = _side_by_side(part, state)
            twin = _Twin(self._inner, self._defaults, {part.group: [part.flat]})
            gradient = memories[part.flat.device][: part.flat.nbytes].view(part.flat.dtype)
            self._adopted.append(_Adopted(part, held, counters, twin, gradient))
        taken = {id(tensor) for part in parts for tensor in part.tensors}
        rest = {
            position: [tensor for tensor in group["params"] if id(tensor) not in taken]
            for position, group in enumerate(self._inner.param_groups)
        }
        rest = {position: tensors for position, tensors in rest.items() if tensors}
        self._rest = _Twin(self._inner, self._defaults, rest) if rest else None
        self._known = list(state.values())
        self._states = [state[tensor] for part in parts for tensor in part.tensors]
        self._entries = list(chain.from_iterable(map(dict.values, self._states)))
        return True


def _alike_parts(run: Run, state: Mapping[Tensor, Any]) -> Iterator[Run]:
    """The parts of a run whose tensors have state of the same kind and have made as many steps."""
    kinds = [_kind(state.get(tensor), tensor) for tensor in run.tensors]
    start = stop = 0
    for kind, members in groupby(range(len(kinds)), kinds.__getitem__):
        tensors = [run.tensors[position] for position in members]
        start, stop = stop, stop + sum(tensor.numel() for tensor in tensors)
        if kind is not None and len(tensors) >= FEWEST:
            yield Run(run.group, tuple(tensors), run.flat[start:stop])


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


def _side_by_side(run: Run, state: Mapping[Tensor, dict[Any, Any]]) -> tuple[dict[Any, Tensor], list[_Counter]]:
    """Move equal entries of all states into one tensor, entry by entry, and leave views of it in their place."""
    states = [state[tensor] for tensor in run.tensors]
    held, counters = {}, []
    for key, first in list(states[0].items()):
        values = [entries[key] for entries in states]
        if first.dim() == 0:
            counter = _Counter(first.clone(), torch.stack(values))
            counters.append(counter)
            held[key] = counter.flat
            views = [counter.each[position] for position in range(len(values))]
        else:
            held[key] = torch.cat([value.reshape(-1) for value in values])
            pieces = held[key].split([value.numel() for value in values])
            views = [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]
        for entries, view in zip(states, views, strict=True):
            entries[key] = view
    return held, counters
