"""The collectives of one step with FSDP2 and with Megatron's distributed optimizer, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from onecopy.layout import ParamSpec
from onecopy.planning.collectives import Collective, Kind
from onecopy.planning.estimate import Job

MEGATRON_BUCKET_PARAMS, MEGATRON_BUCKET_PARAMS_PER_RANK = 40_000_000, 1_000_000


def fsdp2_collectives(
    units: Sequence[Sequence[ParamSpec]], ranks: int, reshard_after_forward: bool = False
) -> tuple[Collective, ...]:
    """Return the collectives of FSDP2: for each wrapped unit one all-gather and one reduce-scatter.

    Source: ``foreach_all_gather`` and ``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
    which run once per unit and pass. Parameters are divided along their first dimension, and every rank sends as many
    rows as the first one (``padded_sharded_param_size`` in _fsdp_param.py).

    Args:
        units: the parameters of each module that ``fully_shard`` was called on, the root module's first.
        ranks: the number of ranks.
        reshard_after_forward: whether all units but the root free their parameters after the forward pass and gather
            them again in the backward pass. That is torch's default. Without it a rank keeps all parameters between
            the passes, as with ``ShardedDataParallel``.
    """
    found = []
    for number, unit in enumerate(units):
        nbytes = sum(_padded_rows(spec, ranks) for spec in unit)
        gathers = 2 if reshard_after_forward and number else 1
        found += [Collective(Kind.ALL_GATHER, nbytes, ranks)] * gathers
        found.append(Collective(Kind.REDUCE_SCATTER, nbytes, ranks))
    return tuple(found)


def fsdp2_memory(units: Sequence[Sequence[ParamSpec]], ranks: int, job: Job) -> dict[str, float]:
    """Return the bytes of tensors on one rank with FSDP2, by kind, without activations.

    Units free their parameters after the forward pass, which is the default. The parameters of two units and the
    gradients of one are whole at a time. With master weights the sharded parameters and gradients are float32.
    """
    largest = max((sum(spec.nbytes for spec in unit) for unit in units), default=0)
    rows = sum(_padded_rows(spec, ranks) for unit in units for spec in unit) / ranks
    elements = rows * job.model.elements / max(1, job.model.nbytes)
    sharded = elements * job.master_bytes if job.master_bytes else rows
    return {
        "parameters": sharded,
        "gradients": sharded,
        "state": elements * job.state_bytes,
        "master weights": 0.0,
        "buffers": 3.0 * largest,
    }


def _padded_rows(spec: ParamSpec, ranks: int) -> int:
    """Return the bytes of a parameter whose rows are padded to a multiple of the number of ranks."""
    rows = spec.shape[0] if spec.shape else 1
    return -(-rows // ranks) * ranks * (spec.nbytes // rows) if rows else 0


def megatron_collectives(specs: Sequence[ParamSpec], ranks: int) -> tuple[Collective, ...]:
    """Return the collectives of Megatron's distributed optimizer with overlap: two for each bucket.

    Source: ``bucket_size = max(40000000, 1000000 * dp_group.size())`` parameters in megatron/core/distributed/
    distributed_data_parallel.py; ``_compute_per_buffer_param_layout`` in megatron/core/optimizer/distrib_optimizer.py
    fills buckets in reverse order and closes a bucket at that size. Each bucket is reduce-scattered and all-gathered.
    Left out: padding, an own bucket for an embedding that pipeline stages share, and bucket groups.
    """
    limit = max(MEGATRON_BUCKET_PARAMS, MEGATRON_BUCKET_PARAMS_PER_RANK * ranks)
    buckets, elements, nbytes = [], 0, 0
    for spec in reversed(specs):
        elements, nbytes = elements + spec.numel, nbytes + spec.nbytes
        if elements >= limit:
            buckets.append(nbytes)
            elements = nbytes = 0
    if elements:
        buckets.append(nbytes)
    kinds = (Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
    return tuple(Collective(kind, nbytes, ranks) for kind in kinds for nbytes in buckets)
