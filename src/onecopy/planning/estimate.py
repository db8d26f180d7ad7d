"""How long a step takes and how much memory a rank needs, on machines that are not here: pure arithmetic.

Traffic is exact. Time is a model: what is reduced hides behind the backward pass, but for the last bucket, and what is
shared behind the next forward pass or the update, where the way of training allows it. What communication takes of the
cores that compute hides behind nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onecopy.comm import limits

CONTENTION = 1.12
"""How much longer everything takes as soon as sending and computing share cores and caches at all (measured here)."""

FORWARD = 1 / 3
"""The forward pass's part of a forward and a backward pass."""


class Way(Enum):
    """A way of training."""

    DDP = "DDP"
    TORCH = "torch's class"
    LEVEL_ONE = "onecopy"
    REDUCE_SCATTER = "onecopy, reduce-scatter hook"
    SHARDED = "onecopy, ShardedDataParallel"
    SHARDED_OVERLAP = "onecopy, ShardedDataParallel, overlap_forward"


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    Attributes:
        elements: the number of parameters.
        largest: elements of the largest parameter, which is taken to be reduced last, as an embedding is.
        bytes_per_element: of a parameter and of its gradient.
        state_bytes: of the optimizer's state for one parameter (Adam in float32: 8).
        compute: seconds that a forward and a backward pass take on one rank.
        update: seconds that updating all parameters takes on one rank.
        bucket_bytes: of a bucket, at least.
    """

    elements: int
    largest: int
    compute: float
    update: float
    bytes_per_element: int = 4
    state_bytes: int = 8
    bucket_bytes: int = 8 << 20

    @property
    def model_bytes(self) -> int:
        """Of all parameters."""
        return self.elements * self.bytes_per_element


@dataclass(frozen=True, slots=True)
class Machine:
    """What it is trained on.

    Attributes:
        ranks: the number of ranks.
        bandwidth: bytes that a rank can send in a second while it receives as many.
        latency: seconds before the first byte of a message arrives.
        busy: the part of the time of sending that it takes from the cores that compute, 0 to 1: with gloo and no more
            cores than ranks what its threads work, else 0.
    """

    ranks: int
    bandwidth: float
    latency: float = 0.0
    busy: float = 0.0


def sent_bytes(way: Way, job: Job, machine: Machine) -> tuple[float, float]:
    """What one rank sends in a step: to reduce gradients, and to share parameters."""
    part = job.model_bytes * (machine.ranks - 1) / machine.ranks
    reduced = 2 * part if way in (Way.DDP, Way.TORCH, Way.LEVEL_ONE) else part
    return reduced, 0.0 if way is Way.DDP else part


def step_seconds(way: Way, job: Job, machine: Machine) -> float:
    """The time of one step."""
    reduced, shared = (
        (bytes_ / machine.bandwidth + (job.model_bytes / job.bucket_bytes) * machine.latency if bytes_ else 0.0)
        for bytes_ in sent_bytes(way, job, machine)
    )
    update = job.update if way is Way.DDP else job.update / machine.ranks
    forward, backward = FORWARD * job.compute, (1 - FORWARD) * job.compute
    worked = job.compute + update + machine.busy * (reduced + shared)
    if machine.busy:
        worked *= CONTENTION
    reduced, shared = (1 - machine.busy) * reduced, (1 - machine.busy) * shared
    last = max(job.bucket_bytes, job.largest * job.bytes_per_element) / job.model_bytes
    late = max(reduced - backward, min(1.0, last) * reduced)
    if way in (Way.SHARDED, Way.SHARDED_OVERLAP):  # buckets are updated while others are on their way
        shared = max(0.0, shared - update - (forward if way is Way.SHARDED_OVERLAP else 0.0))
    return worked + late + shared


def memory_bytes(way: Way, job: Job, machine: Machine) -> dict[str, float]:
    """Bytes of tensors on the largest rank by kind, activations not counted."""
    whole, share = float(job.model_bytes), 1 / machine.ranks
    # torch's class does not cut parameters: the rank with the largest one may hold more than its share.
    state_share = {
        Way.DDP: 1.0,
        Way.TORCH: max(share, job.largest / job.elements),
    }.get(way, share)
    sharded = way in (Way.SHARDED, Way.SHARDED_OVERLAP)
    # Whole gradients that are on their way, and what other ranks send but one, which arrives where the sum will be;
    # for what is long there is room for a part of it.
    under_way = max(2 * job.bucket_bytes, job.largest * job.bytes_per_element)
    arriving = min(under_way * max(0, machine.ranks - 2) * share, limits.STAGED_BYTES)
    return {
        "parameters": whole,
        "gradients": whole * (share if sharded else 1.0),
        "state": job.elements * job.state_bytes * state_share,
        "buffers": under_way + arriving if sharded else 0.0,
    }
