"""``ParamSpec``, ``Shard`` and ``Layout``: plain values that say which rank owns which range of each parameter.

Nothing here uses a process group or a tensor's data.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from onecopy.common.digests import flag_digest
from onecopy.layout.drawing import Block, draw_rows

CUT_MULTIPLE = 64
"""Cuts are at multiples of this many elements, so that vectorised kernels round a shard as they round the whole."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The properties of one parameter from which a layout is computed.

    Attributes:
        index: position among all parameters of the optimizer.
        name: its name in errors and tables.
        shape: its shape.
        stride: its strides, in elements; ranges are counted in storage order.
        dtype: its data type.
        group: the index of its parameter group.
        device_ordinal: the index of its device among the rank's devices, in order of appearance.
        cost: the cost of its update, in any unit, by which parameters that stay whole are balanced; by default the
            number of elements.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0
    device_ordinal: int = 0
    cost: float = -1.0
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))
        if self.cost < 0:
            object.__setattr__(self, "cost", float(self.numel))

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole parameter."""
        return self.numel * self.dtype.itemsize

    def describe(self) -> str:
        """Return one line with all properties that must be the same on all ranks."""
        return (
            f"shape {self.shape}, {str(self.dtype).removeprefix('torch.')}, strides {self.stride}, "
            f"group {self.group}, device {self.device_ordinal}"
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """The elements ``[start, stop)`` of one parameter, in storage order, and the group rank that owns them."""

    param: int
    start: int
    stop: int
    owner: int

    @property
    def numel(self) -> int:
        """The number of elements of the shard."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """A division of parameters among ranks that covers every element exactly once.

    A rank owns at most one range of a parameter. ``shards`` are ordered by parameter and then by range. Printing a
    layout shows a table with one row per rank.
    """

    params: tuple[ParamSpec, ...]
    shards: tuple[Shard, ...]
    world_size: int

    def __post_init__(self) -> None:
        _check_cover(self.params, self.shards, self.world_size)

    def owned_by(self, group_rank: int) -> tuple[Shard, ...]:
        """The shards of one rank."""
        return tuple(shard for shard in self.shards if shard.owner == group_rank)

    def shards_of(self, param: int) -> tuple[Shard, ...]:
        """The shards of one parameter, in storage order."""
        return tuple(shard for shard in self.shards if shard.param == param)

    def is_whole(self, shard: Shard) -> bool:
        """Whether a shard is all of its parameter."""
        return shard.numel == self.params[shard.param].numel

    @property
    def cut_params(self) -> tuple[int, ...]:
        """Indices of the parameters that have more than one owner."""
        return tuple(sorted({shard.param for shard in self.shards if not self.is_whole(shard)}))

    @property
    def elements_per_rank(self) -> tuple[int, ...]:
        """The number of elements that each rank owns."""
        totals = [0] * self.world_size
        for shard in self.shards:
            totals[shard.owner] += shard.numel
        return tuple(totals)

    @property
    def bytes_per_rank(self) -> tuple[int, ...]:
        """The number of bytes of parameters that each rank owns."""
        totals = [0] * self.world_size
        for shard in self.shards:
            totals[shard.owner] += shard.numel * self.params[shard.param].dtype.itemsize
        return tuple(totals)

    @property
    def imbalance(self) -> float:
        """The largest number of elements that a rank owns, divided by the mean (1.0 is perfect)."""
        totals = self.elements_per_rank
        return max(totals) * self.world_size / sum(totals) if sum(totals) else 1.0

    def draw(self, width: int = 0, colour: bool | None = None) -> str:
        """Return a drawing in characters: one row per rank, one block for each parameter of which it owns something.

        Args:
            width: columns of the drawing; 0 for the width of the terminal.
            colour: whether to use colours; by default if the standard output is a terminal.
        """
        if colour is None:
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        rows: list[list[Block]] = [[] for _ in range(self.world_size)]
        for shard in self.shards:
            spec, is_part = self.params[shard.param], not self.is_whole(shard)
            label = f"{spec.name} {shard.numel / spec.numel:.0%}" if is_part else spec.name
            if shard.numel:
                rows[shard.owner].append(Block(spec.index, label, shard.numel, is_part))
        return draw_rows(rows, width or shutil.get_terminal_size((100, 24)).columns, colour)

    def digest(self) -> int:
        """Return a hash of the layout, by which ranks compare their layouts."""
        specs = (f"{spec.name}\0{spec.describe()}\0".encode() for spec in self.params)
        shards = (b"%d,%d,%d,%d;" % (shard.param, shard.start, shard.stop, shard.owner) for shard in self.shards)
        return flag_digest([str(self.world_size).encode(), *specs, *shards])

    def __str__(self) -> str:
        rows = [("rank", "parameters", "pieces", "elements", "share", "bytes")]
        total = sum(spec.numel for spec in self.params)
        elements, sizes = self.elements_per_rank, self.bytes_per_rank
        counts = [[0, 0] for _ in range(self.world_size)]
        for shard in self.shards:
            counts[shard.owner][0 if self.is_whole(shard) else 1] += 1
        for group_rank, (whole, pieces) in enumerate(counts):
            share = f"{elements[group_rank] / total:.1%}" if total else "-"
            rows.append(
                (
                    str(group_rank),
                    str(whole),
                    str(pieces),
                    f"{elements[group_rank]:,}",
                    share,
                    f"{sizes[group_rank]:,}",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        title = (
            f"{len(self.params)} parameters, {total:,} elements on {self.world_size} ranks, "
            f"{len(self.cut_params)} cut, largest/mean {self.imbalance:.3f}"
        )
        return "\n".join([title, *lines])


def _check_cover(params: Sequence[ParamSpec], shards: Sequence[Shard], world_size: int) -> None:
    """Raise ``ValueError`` unless the shards cover every parameter once, in order, with legal owners and cuts."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    position = 0
    for index, spec in enumerate(params):
        if spec.index != index:
            raise ValueError(f"parameter {spec.name!r} has index {spec.index} but is number {index}")
        expected = 0
        owners: set[int] = set()
        while position < len(shards) and shards[position].param == spec.index:
            shard = shards[position]
            if not 0 <= shard.owner < world_size:
                raise ValueError(
                    f"parameter {spec.name!r} is given to rank {shard.owner}, but there are {world_size} ranks"
                )
            if shard.owner in owners:
                raise ValueError(f"parameter {spec.name!r} gives rank {shard.owner} more than one range")
            # An empty parameter has exactly one shard, which is empty. Any other shard has elements.
            wrong_size = bool(owners) if spec.numel == 0 else shard.stop <= shard.start
            if shard.start != expected or shard.stop < shard.start or wrong_size:
                raise ValueError(
                    f"parameter {spec.name!r} with {spec.numel} elements is not covered exactly once: "
                    f"range [{shard.start}, {shard.stop}) follows element {expected}"
                )
            if shard.start % CUT_MULTIPLE:
                raise ValueError(
                    f"parameter {spec.name!r} is cut at element {shard.start}; "
                    f"cuts must fall on multiples of {CUT_MULTIPLE} to leave the update's rounding unchanged"
                )
            owners.add(shard.owner)
            expected = shard.stop
            position += 1
        if expected != spec.numel or not owners:
            raise ValueError(f"parameter {spec.name!r} has {spec.numel} elements, but its ranges end at {expected}")
    if position != len(shards):
        raise ValueError(f"shard {shards[position]} belongs to no parameter, or is out of order")
