"""Compares the ways of training one model on one cluster: memory by kind, traffic, collectives and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onecopy.planning.collectives import Collective, Way, collectives_of
from onecopy.planning.estimate import Job, Machine, communication_seconds, memory_bytes, step_seconds
from onecopy.planning.model_shapes import Model, specs_of, wrapped_units
from onecopy.planning.optimizers import PlannedOptimizer
from onecopy.planning.peers import fsdp2_collectives, fsdp2_memory
from onecopy.planning.sources import Source

PRECISIONS = ("fp32", "bf16", "bf16-master")
"""Parameters, gradients and state in float32; all in bfloat16; or in bfloat16 with float32 master weights and state."""

UTILISATION = 0.4
"""The assumed part of its peak that an accelerator reaches in the forward and backward pass."""

MEMORY_BANDWIDTH = 1.5e12
"""The assumed bytes per second that an update reads and writes."""

DDP, TORCH, LEVEL_1, LEVEL_2, LEVEL_3, FSDP2 = "DDP", "torch's class", "level 1", "level 2", "level 3", "FSDP2"
WAYS = {
    DDP: Way.DDP,
    TORCH: Way.TORCH,
    LEVEL_1: Way.LEVEL_ONE,
    LEVEL_2: Way.REDUCE_SCATTER,
    LEVEL_3: Way.SHARDED_OVERLAP,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way of training.

    Attributes:
        name: the way.
        memory: bytes on the rank with the most, by kind, without activations.
        sent: bytes that a rank sends in a step.
        calls: collectives in a step.
        operations: collectives as the backend runs them.
        communication: seconds of all collectives, if nothing hides them.
        step: seconds of a step, or None if it was not estimated.
    """

    name: str
    memory: dict[str, float]
    sent: float
    calls: int
    operations: int
    communication: float
    step: float | None

    @property
    def total(self) -> float:
        """The bytes of all kinds."""
        return sum(self.memory.values())


def planned_job(source: Source, optimizer: PlannedOptimizer, precision: str, tokens: int, flops: float) -> Job:
    """Return the model with its data types, and its times on one rank.

    Args:
        source: the model.
        optimizer: the optimizer class.
        precision: one of ``PRECISIONS``.
        tokens: tokens of one rank in a step, or 0 if the time is not estimated.
        flops: peak floating-point operations per second of an accelerator.
    """
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    with_masters = precision == "bf16-master"
    model = Model(specs_of(source.shapes, dtype), optimizer.splittable)
    state_bytes = optimizer.state_bytes(4 if with_masters else dtype.itemsize)
    master_bytes = 4 if with_masters else 0
    touched = model.elements * (2 * dtype.itemsize + 2 * (state_bytes + master_bytes))
    compute = 6 * model.elements * tokens / (UTILISATION * flops)
    return Job(model, compute, touched / MEMORY_BANDWIDTH, state_bytes, master_bytes)


def compare(job: Job, machine: Machine) -> list[Row]:
    """Return a row for each way of training."""
    rows = []
    for name, way in WAYS.items():
        if way is Way.TORCH and job.master_bytes:
            continue  # torch's class has no master weights
        collectives = collectives_of(way, job.model, machine.ranks)
        seconds = step_seconds(way, job, machine) if job.compute else None
        rows.append(_row(name, memory_bytes(way, job, machine), collectives, machine, seconds))
    units = wrapped_units(job.model.specs)
    gathered = fsdp2_collectives(units, machine.ranks, reshard_after_forward=True)
    return [*rows, _row(FSDP2, fsdp2_memory(units, machine.ranks, job), gathered, machine, None)]


def _row(
    name: str, memory: dict[str, float], collectives: Sequence[Collective], machine: Machine, step: float | None
) -> Row:
    return Row(
        name,
        memory,
        sum(each.sent_bytes for each in collectives),
        len(collectives),
        sum(each.operations for each in collectives),
        communication_seconds(collectives, machine),
        step,
    )


def activation_bytes(source: Source, batch: int, sequence: int, itemsize: int, checkpointing: bool) -> float | None:
    """Return an estimate of the activations of a transformer; None if its sizes are not known.

    A layer with an attention that does not store its scores keeps about 34 bytes per token and unit of width in 16 bits
    (Korthikanti et al., 2022). With activation checkpointing it keeps its input, and one layer is computed again. The
    logits and their gradient are added if the vocabulary is known. Real values differ by half and more.
    """
    if source.hidden is None or source.layers is None:
        return None
    scale = itemsize / 2
    tokens = batch * sequence
    layer = 34 * tokens * source.hidden * scale
    kept = 2 * tokens * source.hidden * scale * source.layers + layer if checkpointing else layer * source.layers
    return kept + 2.0 * tokens * (source.vocabulary or 0) * itemsize
