"""The memory of one rank by kind: predicted from the layout, measured, and predicted for plain DDP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from onecopy.layout import Layout
from onecopy.planning.optimizers import PlannedOptimizer

KINDS = ("parameters", "gradients", "state", "master weights")
"""The kinds of memory that a rank has between two steps."""

COLOURS = {"parameters": "#0072b2", "gradients": "#e69f00", "state": "#009e73", "master weights": "#cc79a7"}
"""A colour for each kind, from a palette that people with any kind of colour vision tell apart."""

MB = 1e6


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes of an optimizer's tensors on one rank, by kind. It prints as a table.

    Attributes:
        group_rank: the rank.
        world_size: the number of ranks that share the state.
        ddp: the bytes with plain DDP and the plain optimizer; None where the optimizer class is not known.
        predicted: the bytes that the planner predicts for this rank of this layout; None in the same places.
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
