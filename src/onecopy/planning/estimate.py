"""Estimates of the time of a step, its traffic and the memory of a rank, computed without running anything.

Traffic is exact. Time is a model with three assumptions. The backward pass hides the reduction of all buckets but the
last. The update or the next forward pass hides the sharing of parameters if the way of training allows it. Nothing
hides the processor time that communication takes from the cores that compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onecopy.comm import limits

CONTENTION = 1.12
"""The factor by which all work takes longer if communication and computing share cores and caches (measured)."""

FORWARD = 1 / 3
"""The part of the time of a forward and a backward pass that the forward pass takes."""


class Way(Enum):
    """A way of training: which wrapper and which optimizer class a script uses."""

    DDP = "DDP"
    TORCH = "torch's class"
    LEVEL_ONE = "onecopy"
    REDUCE_SCATTER = "onecopy, reduce-scatter hook"
    SHARDED = "onecopy, ShardedDataParallel"
    SHARDED_OVERLAP = "onecopy, ShardedDataParallel, overlap_forward"


@dataclass(frozen=True, slots=True)
class Job:
    """A model in training: its sizes, and its times on one rank without communication.

    Attributes:
        elements: the number of elements of all parameters.
        largest: the number of elements of the largest parameter. It is assumed to be reduced last, as an embedding is.
        bytes_per_element: bytes of one element of a parameter, and of its gradient.
        state_bytes: bytes of optimizer state per element (8 for Adam in float32).
        compute: seconds of a forward and a backward pass on one rank.
        update: seconds of the update of all parameters on one rank.
        bucket_bytes: the least size of a bucket in bytes.
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
        """The bytes of all parameters."""
        return self.elements * self.bytes_per_element


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks and the network between them.

    Attributes:
        ranks: the number of ranks.
        bandwidth: bytes that a rank can send in a second while it receives as many.
        latency: seconds before the first byte of a message arrives.
        busy: the part of the communication time, 0 to 1, in which communication keeps a core from computing. It is the
            processor time of gloo's threads if there are no more cores than ranks, and 0 otherwise.
    """

    ranks: int
    bandwidth: float
    latency: float = 0.0
    busy: float = 0.0


def sent_bytes(way: Way, job: Job, machine: Machine) -> tuple[float, float]:
    """Return the bytes that one rank sends in a step to reduce gradients, and to share parameters."""
    once = job.model_bytes * (machine.ranks - 1) / machine.ranks
    reduced = 2 * once if way in (Way.DDP, Way.TORCH, Way.LEVEL_ONE) else once
    return reduced, 0.0 if way is Way.DDP else once


def step_seconds(way: Way, job: Job, machine: Machine) -> float:
    """Return the seconds of one step: forward pass, backward pass, reduction, update and sharing."""
    reducing, sharing = (
        (bytes_ / machine.bandwidth + (job.model_bytes / job.bucket_bytes) * machine.latency if bytes_ else 0.0)
        for bytes_ in sent_bytes(way, job, machine)
    )
    update = job.update if way is Way.DDP else job.update / machine.ranks
    forward, backward = FORWARD * job.compute, (1 - FORWARD) * job.compute
    processor_time = job.compute + update + machine.busy * (reducing + sharing)
    if machine.busy:
        processor_time *= CONTENTION
    reducing, sharing = (1 - machine.busy) * reducing, (1 - machine.busy) * sharing
    last_bucket = max(job.bucket_bytes, job.largest * job.bytes_per_element) / job.model_bytes
    exposed_reducing = max(reducing - backward, min(1.0, last_bucket) * reducing)
    exposed_sharing = sharing
    if way in (Way.SHARDED, Way.SHARDED_OVERLAP):  # one bucket is updated while another is in flight
        exposed_sharing = max(0.0, sharing - update - (forward if way is Way.SHARDED_OVERLAP else 0.0))
    return processor_time + exposed_reducing + exposed_sharing


def memory_bytes(way: Way, job: Job, machine: Machine) -> dict[str, float]:
    """Return the bytes of tensors on the rank with the most of them, by kind, without activations."""
    whole, fraction = float(job.model_bytes), 1 / machine.ranks
    # torch's class does not cut parameters, so the rank that owns the largest one may own more than the mean.
    state_fraction = {
        Way.DDP: 1.0,
        Way.TORCH: max(fraction, job.largest / job.elements),
    }.get(way, fraction)
    sharded = way in (Way.SHARDED, Way.SHARDED_OVERLAP)
    # Buffers hold whole gradients of the buckets in flight, and the messages of all other ranks but one, whose messages
    # are received in place. The buffer for messages is bounded: long messages are received in parts.
    in_flight = max(2 * job.bucket_bytes, job.largest * job.bytes_per_element)
    received = min(in_flight * max(0, machine.ranks - 2) * fraction, limits.STAGED_BYTES)
    return {
        "parameters": whole,
        "gradients": whole * (fraction if sharded else 1.0),
        "state": job.elements * job.state_bytes * state_fraction,
        "buffers": in_flight + received if sharded else 0.0,
    }
