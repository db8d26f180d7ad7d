"""The memory of one rank by kind: measured, and predicted for plain DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from onecopy.common.nested_tensors import tensors_in
from onecopy.common.tensor_subclasses import leaves_of
from onecopy.planning.collectives import Way
from onecopy.planning.memory import KINDS, buffer_bytes, optimizer_of
from onecopy.planning.models import Model
from onecopy.step.engine import Engine


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes of an optimizer's tensors on one rank, by kind. It prints as a table.

    Attributes:
        group_rank: the rank.
        world_size: the number of ranks that share the state.
        ddp: the bytes with plain DDP and the plain optimizer, predicted; None where the optimizer class is not known.
        measured: the bytes of the tensors that exist now.
        in_flight: the most bytes of buffers that a step has in flight for a moment, predicted.
    """

    group_rank: int
    world_size: int
    ddp: Mapping[str, float | None]
    measured: Mapping[str, int]
    in_flight: float

    def __str__(self) -> str:
        kinds = [kind for kind in KINDS if self.measured[kind] or self.ddp[kind] != 0]
        known = [value for kind in kinds if (value := self.ddp[kind]) is not None]
        total = sum(known) if len(known) == len(kinds) else None
        rows = [("MB", "plain DDP", "measured")]
        rows += [(kind, _mb(self.ddp[kind]), _mb(self.measured[kind])) for kind in kinds]
        rows.append(("total", _mb(total), _mb(sum(self.measured.values()))))
        lines = [f"{kind:<14}  {ddp:>10}  {measured:>10}" for kind, ddp, measured in rows]
        notes = [f"in flight in a step, beside these: at most {_mb(self.in_flight)} MB, predicted"]
        if not self.measured["gradients"] and self.ddp["gradients"]:
            notes.append("there are no gradients now: ask between backward() and zero_grad()")
        if not self.measured["state"] and self.ddp["state"]:
            notes.append("there is no state now: ask after the first step()")
        return "\n".join([f"memory of rank {self.group_rank} of {self.world_size}", *lines, *notes])


def _mb(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f}"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all distinct storages of some tensors.

    A tensor that consists of others counts with their storages, and a sharded gradient with this rank's range.
    """
    found = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # the tensor has no storage
            for leaf in leaves_of(getattr(tensor, "local", tensor)):
                storage = leaf.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return sum(found.values())


def memory_report(engine: Engine) -> MemoryReport:
    """Return the bytes of an optimizer's tensors on this rank, without communication."""
    layout, inner, collectives, params = engine.layout, engine.inner, engine.collectives, engine.params
    planned = [optimizer_of(inner.classes.of(group), group) for group in inner.optim.param_groups]
    stepped = [
        (param, planned[group], dtype.itemsize)
        for param, (group, dtype) in zip(params, inner.master_policy.stepped_dtypes(layout.params), strict=True)
    ]
    state = [
        None if optimizer is None else param.numel() * optimizer.state_bytes(size)
        for param, optimizer, size in stepped
        if param.requires_grad
    ]
    known = [each for each in state if each is not None]
    ddp = {
        "parameters": sum(param.nbytes for param in params),
        "gradients": sum(param.nbytes for param in params if param.requires_grad),
        "state": sum(known) if len(known) == len(state) else None,
        "master weights": sum(
            param.numel() * size for param, _, size in stepped if inner.master_policy.applies_to(param)
        ),
        "averages": sum(
            param.numel() * (size if each.rule.dtype is None else each.rule.dtype.itemsize)
            for each in inner.averages.values()
            for param, _, size in stepped
            if param.requires_grad
        ),
    }
    gradients = engine.gradients
    measured = (
        params,
        [param.grad for param in params if param.grad is not None],
        tensors_in(list(inner.optim.state.values())),
        [entry.tensor for entry in inner.owned if entry.param_view is not None],
        [tensor for average in inner.averages.values() for tensor in average.tensors.values()],
    )
    way = Way.LEVEL_2 if gradients.is_reduce_scattered else Way.LEVEL_1
    way = Way.LEVEL_3 if gradients.are_sharded else way
    bucket = collectives.bucket_bytes(params[0].device)
    return MemoryReport(
        group_rank=collectives.group_rank,
        world_size=collectives.world_size,
        ddp=ddp,
        measured=dict(zip(KINDS, map(storage_bytes, measured), strict=True)),
        in_flight=buffer_bytes(way, Model(layout.params, bucket_bytes=bucket), collectives.world_size),
    )
