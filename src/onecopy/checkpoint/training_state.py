"""Captures and restores schedulers, a GradScaler, random number generators and the position in the data."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value of ``extra`` that each rank saves for itself, such as the state of its random number generators."""

    value: Any


class Stateful(Protocol):
    """An object with these two methods: a scheduler, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load the state."""


RANDOM = "random numbers"


def capture(*, position: Any = None, **parts: Stateful) -> dict[str, Any]:
    """Return the state of schedulers, random number generators and more, for ``extra`` of :func:`save`.

    Args:
        position: this rank's position in the data, as plain data of your own.
        **parts: schedulers, a GradScaler and similar objects, by name.

    Returns:
        A dict with the state of each part, this rank's position and the states of its random number generators
        (torch's on the CPU and the accelerator, Python's, and NumPy's if it is in use).
    """
    extra: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    extra["position"] = PerRank(position)
    extra[RANDOM] = PerRank(_random_states())
    return extra


def restore(extra: dict[str, Any], **parts: Stateful) -> Any:
    """Restore the state that :func:`capture` returned; return this rank's position in the data.

    If another number of ranks saved the checkpoint, ``extra`` has no positions and random number states. Then the
    position is None and the random number generators do not change.

    Args:
        extra: the loaded ``extra``.
        **parts: the captured objects, under the same names.
    """
    absent = [name for name in parts if name not in extra]
    if absent:
        raise KeyError(f"the checkpoint has no state for {absent}; it has {sorted(extra)}")
    for name, part in parts.items():
        part.load_state_dict(extra[name])
    if RANDOM in extra:
        _set_random_states(extra[RANDOM])
    return extra.get("position")


def _accelerator() -> Any:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    module = _accelerator()
    if module is not None:
        states["accelerator"] = module.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), [int(rest[0]), int(rest[1]), float(rest[2])])
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    module = _accelerator()
    if module is not None and "accelerator" in states:
        module.set_rng_state(states["accelerator"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        kind, keys, (position, has_gauss, cached) = states["numpy"]
        assert isinstance(keys, Tensor)
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
