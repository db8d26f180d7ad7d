"""The memory of one rank by kind, for every way of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onecopy.comm import limits
from onecopy.planning.collectives import Way, ddp_buckets, owned_bytes
from onecopy.planning.models import Model

KINDS = ("parameters", "gradients", "state", "master weights", "averages")
"""The kinds of memory that a rank has between two steps."""


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """The state of an optimizer class."""

    name: str  # the class, as a script names it
    tensors: int  # the number of state tensors with the shape of the parameter
    bytes_per_value: float | None = None  # the bytes of one value of state, or None for those of the parameter's type
    splittable: bool = True  # whether the class works element by element, so that parameters may be cut

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

    Its name and the package that defines it must be those of a known optimizer. Some options add a tensor.
    """
    package, name = optimizer_class.__module__.partition(".")[0], optimizer_class.__name__
    for known in OPTIMIZERS.values():
        if known.name.partition(".")[0] == package and known.name.rpartition(".")[2] == name:
            if name == "SGD":
                return replace(known, tensors=1 if options.get("momentum") else 0)
            more = [name == "RMSprop" and options.get("momentum"), options.get("centered"), options.get("amsgrad")]
            return replace(known, tensors=known.tensors + sum(map(bool, more)))
    return None


def memory_bytes(way: Way, model: Model, ranks: int, state_bytes: float, master_bytes: int) -> dict[str, float]:
    """Return the bytes of tensors on the rank with the most of them, by kind, without activations.

    The bytes of state and of master weights are for each element: 8 for Adam in float32, 4 for parameters in bf16.
    """
    share = 1.0 if way is Way.DDP else _largest_share(model, ranks)
    return {
        "parameters": float(model.nbytes),
        "gradients": model.nbytes * (share if way is Way.LEVEL_3 else 1.0),
        "state": model.elements * state_bytes * share,
        "master weights": float(model.elements * master_bytes) * share,
        "buffers": buffer_bytes(way, model, ranks),
    }


def _largest_share(model: Model, ranks: int) -> float:
    """Return the part of the state that the rank with the most of it owns."""
    if model.splittable:
        return 1 / ranks
    owned = owned_bytes(model, [range(len(model.specs))], ranks)
    return int(owned.max()) / max(1, model.nbytes)


def buffer_bytes(way: Way, model: Model, ranks: int) -> float:
    """Return the most bytes of buffers that a step allocates, beside parameters, gradients and state."""
    if way is Way.DDP:
        return 0.0
    bucket = model.bucket_bytes or limits.bucket_bytes(ranks, pairwise=False)
    if way is Way.LEVEL_3:  # whole gradients of the buckets in flight
        return float(min(max(2 * bucket, model.largest_bytes), model.nbytes))
    # Two rounds of packed parameters: one is packed while the other is in flight.
    sharing = float(min(2 * bucket, model.nbytes))
    if way is not Way.LEVEL_2:
        return sharing
    # For each of DDP's buckets in flight a packed copy, and this rank's part. Buffers are reused from step to step, so
    # those for gradients and those for parameters exist at the same time.
    sizes = [sum(model.specs[index].nbytes for index in params) for params in ddp_buckets(model.specs, model.order)]
    count = limits.DDP_BUCKETS_IN_FLIGHT
    reducing = max((sum(sizes[start : start + count]) for start in range(len(sizes))), default=0)
    return sharing + reducing * (ranks + 1) / ranks
