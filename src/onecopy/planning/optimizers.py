"""Optimizers as a planner sees them: bytes of state per element, and whether a parameter may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """The state of an optimizer class.

    Attributes:
        name: the class, as a script names it.
        tensors: the number of state tensors with the shape of the parameter.
        bytes_per_value: the bytes of one value of state, or None for those of the parameter's type.
        splittable: whether the class works element by element, so that parameters may be cut.
    """

    name: str
    tensors: int
    bytes_per_value: float | None = None
    splittable: bool = True

    def state_bytes(self, itemsize: int) -> float:
        """The bytes of state per element of a parameter that is updated in a type of this size."""
        return self.tensors * (itemsize if self.bytes_per_value is None else self.bytes_per_value)


OPTIMIZERS: dict[str, PlannedOptimizer] = {
    "adamw": PlannedOptimizer("torch.optim.AdamW", 2),
    "adam": PlannedOptimizer("torch.optim.Adam", 2),
    "sgd": PlannedOptimizer("torch.optim.SGD", 0),
    "momentum": PlannedOptimizer("torch.optim.SGD", 1),
    "rmsprop": PlannedOptimizer("torch.optim.RMSprop", 1),
    "adagrad": PlannedOptimizer("torch.optim.Adagrad", 1),
    "muon": PlannedOptimizer("torch.optim.Muon", 1, splittable=False),
    # One scale of 4 bytes for each block: of 256 values with 8 bits, of 128 values with 4 bits.
    "adamw8bit": PlannedOptimizer("bitsandbytes.optim.AdamW8bit", 2, 1 + 4 / 256, splittable=False),
    "adamw4bit": PlannedOptimizer("torchao.optim.AdamW4bit", 2, 0.5 + 4 / 128, splittable=False),
}
"""The optimizers that ``onecopy plan --optimizer`` knows."""


def optimizer_of(optimizer_class: type, options: Mapping[str, Any]) -> PlannedOptimizer | None:
    """Return the state of an optimizer class with some options, or None if the class is not known.

    Args:
        optimizer_class: the class. Its name and the package that defines it must be those of a known optimizer.
        options: the options of a parameter group; some of them add a tensor.
    """
    package, name = optimizer_class.__module__.partition(".")[0], optimizer_class.__name__
    for known in OPTIMIZERS.values():
        if known.name.partition(".")[0] == package and known.name.rpartition(".")[2] == name:
            if name == "SGD":
                return replace(known, tensors=1 if options.get("momentum") else 0)
            more = [name == "RMSprop" and options.get("momentum"), options.get("centered"), options.get("amsgrad")]
            return replace(known, tensors=known.tensors + sum(map(bool, more)))
    return None
