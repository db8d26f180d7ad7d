"""Compares the ways of training one model on one cluster, and recommends the first that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onecopy.planning.collectives import Way, collectives_of
from onecopy.planning.memory import PlannedOptimizer, memory_bytes
from onecopy.planning.models import Model, Source, specs_of

PRECISIONS = ("fp32", "bf16", "bf16-master")
"""Parameters, gradients and state in float32; all in bfloat16; or in bfloat16 with float32 master weights and state."""

WAYS = (Way.DDP, Way.LEVEL_1, Way.LEVEL_2, Way.LEVEL_3)
DDP, LEVEL_1, LEVEL_2, LEVEL_3 = (way.value for way in WAYS)

USABLE = 0.9
"""The part of an accelerator's memory that tensors can use: the rest is for the driver, kernels and fragmentation."""

WORTH_IT = 0.05
"""The least saving for which a change of the script is recommended."""

GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training."""

    name: str
    memory: dict[str, float]  # bytes on the rank with the most, by kind, without activations
    sent: float  # bytes that a rank sends in a step
    calls: int  # collectives in a step
    operations: int  # collectives as the backend runs them

    @property
    def total(self) -> float:
        """The bytes of all kinds."""
        return sum(self.memory.values())


def compare(source: Source, optimizer: PlannedOptimizer, precision: str, ranks: int) -> list[Row]:
    """Return a row for each way of training, with one of ``PRECISIONS``."""
    with_masters = precision == "bf16-master"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    state_bytes = optimizer.state_bytes(4 if with_masters else dtype.itemsize)
    model = Model(specs_of(source.shapes, dtype), optimizer.splittable)
    rows = []
    for way in WAYS:
        collectives = collectives_of(way, model, ranks)
        memory = memory_bytes(way, model, ranks, state_bytes, 4 if with_masters else 0)
        sent, operations = sum(each.sent_bytes for each in collectives), sum(each.operations for each in collectives)
        rows.append(Row(way.value, memory, sent, len(collectives), operations))
    return rows


def unit_of(rows: Sequence[Row]) -> tuple[str, float]:
    """Return the unit in which the memory of these ways of training is shown, and its bytes."""
    return ("GB", GB) if max(row.total for row in rows) >= GB else ("MB", 1e6)


@dataclass(frozen=True, slots=True)
class Advice:
    """The name of a row, or FSDP2 if nothing fits, with the reason and the lines that change in a DDP script."""

    choice: str
    reason: str
    code: str


def fits(row: Row, memory: float | None) -> bool | None:
    """Return whether a way of training fits into the memory of an accelerator; None if the memory is not known."""
    return None if memory is None else row.total <= USABLE * memory


def recommend(rows: Sequence[Row], optimizer: PlannedOptimizer, masters: bool, memory: float | None = None) -> Advice:
    """Choose the first way of training that fits into the memory of an accelerator, if that is known."""
    by_name = {row.name: row for row in rows}
    ddp = by_name[DDP]

    def saving(name: str) -> float:
        return (ddp.total - by_name[name].total) / ddp.total if ddp.total else 0.0

    def advice(name: str, reason: str) -> Advice:
        return Advice(name, reason, code_for(name, optimizer, masters))

    order = [DDP, LEVEL_1, LEVEL_3]
    fitting = [name for name in order if fits(by_name[name], memory)]
    unit, scale = unit_of(rows)
    saved = f"{(ddp.total - by_name[LEVEL_1].total) / scale:.2f} {unit} ({saving(LEVEL_1):.0%})"
    if memory is not None and not fitting:
        least = by_name[LEVEL_3].total
        return advice(
            "FSDP2",
            f"Nothing fits: {LEVEL_3} needs {least / GB:.1f} GB of {USABLE * memory / GB:.1f} GB that can be used. "
            "FSDP2 also divides the parameters. Or use more ranks, activation checkpointing or offload.",
        )
    if fitting and fitting[0] != DDP:
        return advice(fitting[0], f"Plain DDP does not fit. {fitting[0]} is the first that does.")
    if max(saving(LEVEL_1), saving(LEVEL_3)) < WORTH_IT:
        return advice(DDP, f"onecopy saves you {max(0.0, saving(LEVEL_1), saving(LEVEL_3)):.0%}: don't bother.")
    start = "Plain DDP fits without activations. " if fitting else ""
    if saving(LEVEL_1) < WORTH_IT:
        return advice(LEVEL_3, f"{start}It saves {saving(LEVEL_3):.0%}, and {LEVEL_1} saves {saving(LEVEL_1):.0%}.")
    return advice(LEVEL_1, f"{start}It saves {saved} with one line. {LEVEL_3} saves {saving(LEVEL_3):.0%}.")


def code_for(name: str, optimizer: PlannedOptimizer, masters: bool) -> str:
    """Return the lines of a script that matter for one way of training."""
    module, _, short = optimizer.name.rpartition(".")
    root = module.partition(".")[0]
    imports = [] if root == "torch" else [f"import {root}"]
    options = ", master_weights=True" if masters and name == LEVEL_1 else ""
    ours = f"optimizer = ZeroRedundancyOptimizer(model.parameters(), {module}.{short}{options}, lr=...)"
    ddp = "model = DistributedDataParallel(model)"
    lines = {
        DDP: [ddp, f"optimizer = {module}.{short}(model.parameters(), lr=...)"],
        LEVEL_1: ["from onecopy import ZeroRedundancyOptimizer", ddp, ours],
        LEVEL_3: [
            f"from onecopy import {'MixedPrecision, ' if masters else ''}ShardedDataParallel, ZeroRedundancyOptimizer",
            ours,
            "model = ShardedDataParallel(model, optimizer, overlap_forward=True"
            + (", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))" if masters else ")"),
        ],
        "FSDP2": [
            "from torch.distributed.fsdp import fully_shard",
            "for block in model.blocks: fully_shard(block)",
            "fully_shard(model)",
            f"optimizer = {module}.{short}(model.parameters(), lr=...)",
        ],
    }
    return "\n".join([*imports, *lines[name]])
