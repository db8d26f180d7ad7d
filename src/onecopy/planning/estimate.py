"""Estimates of the time of a step, its traffic and the memory of a rank, computed without running anything.

Traffic follows from the plan. Time is a model with these assumptions. A collective takes a latency for each of its
operations, and the bytes that a rank sends divided by the bandwidth. The backward pass hides the reduction of all
buckets but the last. The update, the next forward pass or, with the overlap hooks, the backward pass hides the sharing
of parameters if the way of training allows it. Nothing hides the processor time that communication takes from the cores
that compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise as neighbours
from math import log

from onecopy.comm import limits
from onecopy.planning.collectives import Collective, Kind, Way, collectives_of, ddp_buckets
from onecopy.planning.model_shapes import Model
from onecopy.planning.ownership import owned_bytes

CONTENTION = 1.12
"""The factor by which all work takes longer if communication and computing share cores and caches (measured)."""

FORWARD = 1 / 3
"""The part of the time of a forward and a backward pass that the forward pass takes."""

COLLECTIVE_LATENCY = {8: 20e-6, 64: 50e-6, 512: 100e-6}
"""Seconds before the first byte of one operation arrives, by the number of ranks: assumed, not measured.

They grow more slowly than a ring's number of hops, because backends use trees where latency decides.
"""

RANKS_PER_NODE, NODE_BANDWIDTH, NETWORK_BANDWIDTH = 8, 200e9, 100e9
"""Assumed bytes per second that a rank sends inside a node of 8 accelerators, and between nodes."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model in training, and its times on one rank without communication.

    Attributes:
        model: its parameters. The largest one is assumed to be reduced last, as an embedding is.
        compute: seconds of a forward and a backward pass on one rank.
        update: seconds of the update of all parameters on one rank.
        state_bytes: bytes of optimizer state per element (8 for Adam in float32).
        master_bytes: bytes of master weights per element (4 for parameters in bf16, otherwise 0).
    """

    model: Model
    compute: float
    update: float
    state_bytes: float = 8
    master_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks and the network between them.

    Attributes:
        ranks: the number of ranks.
        bandwidth: bytes that a rank can send in a second while it receives as many.
        latency: seconds before the first byte of an operation or a message arrives.
        busy: the part of the communication time, 0 to 1, in which communication keeps a core from computing. It is the
            processor time of gloo's threads if there are no more cores than ranks, and 0 otherwise.
        pairwise: whether messages between pairs of ranks are used (gloo), instead of the backend's collectives.
    """

    ranks: int
    bandwidth: float
    latency: float = 0.0
    busy: float = 0.0
    pairwise: bool = True


def accelerators(ranks: int) -> Machine:
    """Return a cluster of accelerators with the assumed latency and bandwidth for this number of ranks."""
    bandwidth = NODE_BANDWIDTH if ranks <= RANKS_PER_NODE else NETWORK_BANDWIDTH
    return Machine(ranks, bandwidth, collective_latency(ranks), pairwise=False)


def collective_latency(ranks: int) -> float:
    """Return the assumed latency of one operation: a power law between the known numbers of ranks, and beyond."""
    known = list(COLLECTIVE_LATENCY.items())
    for (few, least), (many, most) in neighbours(known):
        if ranks <= many or many == known[-1][0]:
            exponent = log(most / least) / log(many / few)
            return float(least * (ranks / few) ** exponent)
    raise AssertionError("unreachable: the last pair always returns")


def communication_seconds(collectives: Iterable[Collective], machine: Machine) -> float:
    """Return the seconds of some collectives, one after the other."""
    return sum(
        each.sent_bytes / machine.bandwidth * (each.kind is not Kind.FLAGS) + each.operations * machine.latency
        for each in collectives
    )


def sent_bytes(way: Way, job: Job, machine: Machine) -> tuple[float, float]:
    """Return the bytes that one rank sends in a step to reduce gradients, and to share parameters."""
    collectives = collectives_of(way, job.model, machine.ranks, machine.pairwise)
    reduced = sum(each.sent_bytes for each in collectives if each.kind.reduces_gradients)
    shared = sum(each.sent_bytes for each in collectives if each.kind.shares_parameters)
    return reduced, shared


def step_seconds(way: Way, job: Job, machine: Machine) -> float:
    """Return the seconds of one step: forward pass, backward pass, reduction, update and sharing."""
    collectives = collectives_of(way, job.model, machine.ranks, machine.pairwise)
    reducing = communication_seconds((each for each in collectives if each.kind.reduces_gradients), machine)
    sharing = communication_seconds((each for each in collectives if each.kind.shares_parameters), machine)
    flags = communication_seconds((each for each in collectives if each.kind is Kind.FLAGS), machine)
    update = job.update * state_fraction(way, job.model, machine.ranks)
    forward, backward = FORWARD * job.compute, (1 - FORWARD) * job.compute
    processor_time = job.compute + update + machine.busy * (reducing + sharing)
    if machine.busy:
        processor_time *= CONTENTION
    reducing, sharing = (1 - machine.busy) * reducing, (1 - machine.busy) * sharing
    last = min(1.0, max(_bucket_bytes(job.model, machine), job.model.largest_bytes) / job.model.nbytes)
    if way is Way.OVERLAP:  # the backward pass hides both, again without the last bucket
        return processor_time + max(reducing + sharing - backward, last * (reducing + sharing)) + flags
    exposed_reducing = max(reducing - backward, last * reducing)
    exposed_sharing = sharing
    if way.shards_gradients:  # one bucket is updated while another is in flight
        exposed_sharing = max(0.0, sharing - update - (forward if way is Way.SHARDED_OVERLAP else 0.0))
    return processor_time + exposed_reducing + exposed_sharing + flags


def state_fraction(way: Way, model: Model, ranks: int) -> float:
    """Return the part of the state that the rank with the most of it owns."""
    if way is Way.DDP:
        return 1.0
    if model.splittable and way is not Way.TORCH:
        return 1 / ranks
    # Whole parameters, largest first, each to the rank with the least: torch's class does the same.
    owned = owned_bytes(model.specs, [range(len(model.specs))], ranks, "parameter", splittable=False)
    return int(owned.max()) / max(1, model.nbytes)


def memory_bytes(way: Way, job: Job, machine: Machine) -> dict[str, float]:
    """Return the bytes of tensors on the rank with the most of them, by kind, without activations."""
    model, fraction = job.model, state_fraction(way, job.model, machine.ranks)
    return {
        "parameters": float(model.nbytes),
        "gradients": model.nbytes * (fraction if way.shards_gradients else 1.0),
        "state": model.elements * job.state_bytes * fraction,
        "master weights": float(model.elements * job.master_bytes) * fraction,
        "buffers": buffer_bytes(way, model, machine),
    }


def buffer_bytes(way: Way, model: Model, machine: Machine) -> float:
    """Return the most bytes of buffers that a step allocates, beside parameters, gradients and state."""
    bucket = _bucket_bytes(model, machine)
    if way in (Way.DDP, Way.TORCH):
        return 0.0
    if way.shards_gradients:
        # Whole gradients of the buckets in flight. Between pairs, also the messages of all other ranks but one, whose
        # messages are received in place.
        in_flight = float(min(max(2 * bucket, model.largest_bytes), model.nbytes))
        received = in_flight * max(0, machine.ranks - 2) / machine.ranks
        return in_flight + (received if machine.pairwise else 0)
    if machine.pairwise:
        # Only ranges of less than DIRECT_BYTES are packed. A parameter may be cut into one range for each rank.
        packed = sum(spec.nbytes for spec in model.specs if spec.nbytes < limits.DIRECT_BYTES * machine.ranks)
        sharing = min((limits.PACKS_IN_FLIGHT + 1) * limits.PACK_BYTES, packed)
    else:
        # Two rounds of packed parameters: one is packed while the other is in flight.
        sharing = min(2 * bucket, model.nbytes)
    # The buffers of both are reused from step to step, so they exist at the same time.
    return float(sharing) + (_gradient_buffer_bytes(model, machine) if way is Way.REDUCE_SCATTER else 0.0)


def _gradient_buffer_bytes(model: Model, machine: Machine) -> float:
    """Return the bytes of buffers for the DDP buckets that the reduce-scatter hook has in flight."""
    sizes = [sum(model.specs[index].nbytes for index in bucket) for bucket in ddp_buckets(model.specs, model.order)]
    # By the backend: a packed copy of a bucket, and this rank's part. Between pairs: the messages of all other ranks.
    others = machine.ranks - 1 if machine.pairwise else machine.ranks + 1
    needed = [size * others / machine.ranks for size in sizes]
    count = limits.DDP_BUCKETS_IN_FLIGHT
    return max((sum(needed[start : start + count]) for start in range(len(needed))), default=0.0)


def _bucket_bytes(model: Model, machine: Machine) -> int:
    return model.bucket_bytes or limits.bucket_bytes(machine.ranks, machine.pairwise)
