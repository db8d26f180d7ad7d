"""The memory of one rank by kind: predicted from the layout, measured, and predicted for plain DDP."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.common.nested_tensors import tensors_in
from onecopy.common.tensor_storages import storage_bytes
from onecopy.layout import Layout
from onecopy.planning.collectives import Way
from onecopy.planning.memory import KINDS, PlannedOptimizer, buffer_bytes, optimizer_of
from onecopy.planning.models import Model
from onecopy.step.engine import Engine

MB = 1e6


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes of an optimizer's tensors on one rank, by kind. It prints as a table.

    Attributes:
        group_rank: the rank.
        world_size: the number of ranks that share the state.
        ddp: the bytes with plain DDP and the plain optimizer; None where the optimizer class is not known.
        predicted: the bytes predicted for this rank of this layout; None in the same places.
        measured: the bytes of the tensors that exist now.
        in_flight: the most bytes of buffers that a step has in flight for a moment, predicted.
    """

    group_rank: int
    world_size: int
    ddp: Mapping[str, float | None]
    predicted: Mapping[str, float | None]
    measured: Mapping[str, int]
    in_flight: float

    def __str__(self) -> str:
        kinds = [kind for kind in KINDS if self.measured[kind] or self.predicted[kind] != 0]
        rows: list[tuple[str, ...]] = [("MB", "plain DDP", "predicted", "measured", "difference")]
        rows += [_row(kind, self.ddp[kind], self.predicted[kind], self.measured[kind]) for kind in kinds]
        ddp, predicted = (_total(column, kinds) for column in (self.ddp, self.predicted))
        rows.append(_row("total", ddp, predicted, sum(self.measured[kind] for kind in kinds)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        notes = [f"in flight in a step, beside these: at most {self.in_flight / MB:.2f} MB, predicted"]
        if not self.measured["gradients"] and self.predicted["gradients"]:
            notes.append("there are no gradients now: ask between backward() and zero_grad()")
        if not self.measured["state"] and self.predicted["state"]:
            notes.append("there is no state now: ask after the first step()")
        return "\n".join([f"memory of rank {self.group_rank} of {self.world_size}", *lines, *notes])


def predicted_bytes(
    layout: Layout,
    owned: Iterable[tuple[int, int]],
    optimizer: PlannedOptimizer | None,
    stepped: Sequence[torch.dtype],
    copied: Sequence[bool],
    trained: Sequence[bool],
    shards_gradients: bool,
) -> dict[str, float | None]:
    """Return the bytes by kind of a rank that owns some elements of each parameter.

    Args:
        layout: all parameters.
        owned: parameters by index, each with the number of elements that the rank owns.
        optimizer: the state of the optimizer class, if it is known.
        stepped: for each parameter, the type in which it is updated.
        copied: for each parameter, whether a copy of it is updated (a master weight).
        trained: for each parameter, whether it gets gradients.
        shards_gradients: whether the rank keeps only the gradients that it owns.
    """
    gradients = sum(spec.nbytes for spec in layout.params if trained[spec.index])
    state = masters = owned_gradients = 0.0
    for index, numel in owned:
        if copied[index]:
            masters += numel * stepped[index].itemsize
        if trained[index]:
            owned_gradients += numel * layout.params[index].dtype.itemsize
            state += numel * optimizer.state_bytes(stepped[index].itemsize) if optimizer else 0.0
    return {
        "parameters": float(sum(spec.nbytes for spec in layout.params)),
        "gradients": owned_gradients if shards_gradients else float(gradients),
        "state": None if optimizer is None else state,
        "master weights": masters,
    }


def _row(kind: str, ddp: float | None, predicted: float | None, measured: int) -> tuple[str, ...]:
    difference = "-" if not predicted else f"{(measured - predicted) / predicted:+.1%}"
    cells = ["-" if value is None else f"{value / MB:.2f}" for value in (ddp, predicted, measured)]
    return (kind, *cells, difference)


def _total(column: Mapping[str, float | None], kinds: Sequence[str]) -> float | None:
    """Return the sum of a column, or None if a kind is not known."""
    total = 0.0
    for kind in kinds:
        value = column[kind]
        if value is None:
            return None
        total += value
    return total


def measured_bytes(params: Iterable[Tensor], state: Any, masters: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes of tensors that exist now, by kind. Tensors that share memory are counted once.

    Args:
        params: parameters; their gradients are measured, too.
        state: the optimizer's state by parameter.
        masters: copies of parameters that are updated in place of them.
    """
    params = list(params)
    gradients = [param.grad for param in params if param.grad is not None]
    kinds = (params, gradients, tensors_in(list(state.values())), masters)
    return dict(zip(KINDS, map(storage_bytes, kinds), strict=True))


def memory_report(engine: Engine) -> MemoryReport:
    """Return the predicted and the measured bytes of an optimizer's tensors on this rank, without communication."""
    layout, inner, collectives = engine.layout, engine.inner, engine.collectives
    planned = [optimizer_of(inner.optimizer_class, group) for group in inner.optim.param_groups]
    predict = functools.partial(
        predicted_bytes,
        layout,
        optimizer=planned[0] if all(each == planned[0] for each in planned) else None,
        stepped=[dtype for _, dtype in inner.master_policy.stepped_dtypes(layout.params)],
        copied=[inner.master_policy.applies_to(param) for param in engine.params],
        trained=[param.requires_grad for param in engine.params],
    )
    gradients = engine.gradients
    way = Way.LEVEL_2 if gradients.is_reduce_scattered else Way.LEVEL_1
    way = Way.LEVEL_3 if gradients.are_sharded else way
    bucket = collectives.bucket_bytes(engine.params[0].device)
    owned = layout.owned_by(collectives.group_rank)
    masters = [entry.tensor for entry in inner.owned if entry.param_view is not None]
    return MemoryReport(
        group_rank=collectives.group_rank,
        world_size=collectives.world_size,
        ddp=predict([(spec.index, spec.numel) for spec in layout.params], shards_gradients=False),
        predicted=predict(
            [(shard.param, shard.numel) for shard in owned], shards_gradients=gradients.have_own_memory()
        ),
        measured=measured_bytes(engine.params, inner.optim.state, masters),
        in_flight=buffer_bytes(way, Model(layout.params, bucket_bytes=bucket), collectives.world_size),
    )
