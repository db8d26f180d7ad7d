"""What ``ShardedDataParallel`` does to an optimizer: check it, plan buckets for its parameters, take it over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.agreement import Fact, agree
from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import flat_view
from onecopy.data_parallel.parameter_buckets import ParameterBuckets
from onecopy.data_parallel.sharded_gradients import ShardedGradients
from onecopy.layout import BucketPlan, Layout, plan_buckets
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.step.master_weights import MasterWeightPolicy

SPARSE_BYTES = 1 << 20
"""Embeddings from this size on may send their gradients by rows."""


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The types in which a model computes and communicates.

    Attributes:
        param_dtype: convert floating-point parameters to this type (default: leave them).
        reduce_dtype: the type in which gradients travel and are added up (default: their own).
        master_weights: keep float32 copies of parameters in bf16 or fp16, on their owners only.
        cast_inputs: convert floating-point inputs of the model to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    master_weights: bool = True
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point type, got {dtype!r}")


@dataclass(frozen=True, slots=True)
class Planned:
    """One optimizer's new layout, with the buckets it comes from."""

    optimizer: ZeroRedundancyOptimizer
    layout: Layout
    plans: tuple[BucketPlan, ...]
    masters: MasterWeightPolicy


def check_optimizers(optimizers: Sequence[object], collectives: Collectives) -> None:
    """Raise unless these are our optimizers, on the same ranks."""
    if not optimizers:
        raise ValueError("ShardedDataParallel needs at least one optimizer, got an empty list")
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"optimizer must be a onecopy.ZeroRedundancyOptimizer (or a list of them), got "
                f"{torch.typename(optimizer)}; the order is ShardedDataParallel(module, optimizer)"
            )
        if optimizer.engine.collectives.process_group is not collectives.process_group:
            raise ValueError(
                f"the optimizers of ShardedDataParallel must be on one process group; number {number} is on another"
            )


def replicas_of(mesh: DeviceMesh, shard: Collectives) -> Collectives:
    """The ranks along the first dimension of a mesh, whose second dimension is ``shard``."""
    if mesh.ndim != 2:
        raise ValueError(f"mesh must have two dimensions, (replicate, shard), got {mesh.ndim}")
    if mesh.get_group(1) is not shard.process_group:
        raise ValueError(
            "the optimizers must be on the mesh's second dimension: construct them with process_group=mesh.get_group(1)"
        )
    return Collectives(mesh.get_group(0))


def agree_with_replicas(
    collectives: Collectives, replicas: Collectives | None, what: str, facts: Sequence[Fact], failure: Exception | None
) -> None:
    """Raise on every rank of a mesh if one failed or if the facts differ: along one dimension, then along the other."""
    try:
        agree(collectives, what, facts, failure)
    except Exception as error:
        failure = error
    if replicas is not None:
        agree(replicas, what, facts, failure)
    elif failure is not None:
        raise failure


def check_module(module: object, optimizers: Sequence[ZeroRedundancyOptimizer]) -> None:
    """Raise unless the optimizers are untouched and have, together, what the module trains."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {torch.typename(module)}")
    if isinstance(module, Joinable):
        raise TypeError(
            f"module is wrapped in {type(module).__name__} already: ShardedDataParallel takes the place of DDP; give "
            "it the module itself"
        )
    held = {id(param): name for name, param in module.named_parameters()}
    owned: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if optimizer.overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True is for DDP; construct the optimizer without it")
        if optimizer.wait_for_transfers is not None:
            raise ValueError(f"optimizer {number} already belongs to a ShardedDataParallel")
        if optimizer.engine.inner.version:
            raise ValueError(
                f"optimizer {number} has state already: wrap the model before the first step() and before "
                "load_state_dict()"
            )
        for spec, param in zip(optimizer.layout.params, optimizer.engine.params, strict=True):
            if id(param) not in held:
                raise ValueError(f"parameter {spec.name!r} of optimizer {number} is not a parameter of the module")
            if id(param) in owned:
                raise ValueError(f"parameter {held[id(param)]!r} is in optimizers {owned[id(param)]} and {number}")
            owned[id(param)] = number
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in owned:
            raise ValueError(
                f"parameter {name!r} of the module needs a gradient but is in no optimizer: add it to one, or freeze "
                "it with requires_grad_(False)"
            )


def sparse_embeddings_of(module: nn.Module) -> list[nn.Embedding]:
    """Embeddings whose gradients are worth sending by rows: large ones, whose weights no other module has.

    torch has no sparse gradients with ``scale_grad_by_freq``. Those of ``nn.EmbeddingBag`` are rounded otherwise than
    its dense ones, so they are left as they are.
    """
    holders = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        and part.weight.requires_grad
        and part.weight.numel() * part.weight.element_size() >= SPARSE_BYTES
        and part.weight.is_contiguous()
        and holders[id(part.weight)] == 1
        and not part.scale_grad_by_freq
    ]


def plan(
    module: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    bucket_bytes: int,
    policy: MixedPrecision,
    apart: Collection[int],
) -> Planned:
    """Divide one optimizer's parameters into buckets, in reverse order of their place in the module.

    Those whose identities are in ``apart`` get buckets of their own.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be a positive number of bytes, got {bucket_bytes!r}")
    engine = optimizer.engine
    chosen, dtype = to_convert(module, policy), policy.param_dtype
    names = {id(param): name for name, param in module.named_parameters()}
    specs = [
        replace(spec, name=names[id(param)], dtype=dtype if dtype is not None and id(param) in chosen else spec.dtype)
        for spec, param in zip(engine.layout.params, engine.params, strict=True)
    ]
    place = {id(param): number for number, param in enumerate(module.parameters())}
    order = sorted(range(len(specs)), key=lambda index: -place[id(engine.params[index])])
    layout, plans = plan_buckets(
        specs,
        order,
        engine.collectives.world_size,
        optimizer.splittable,
        bucket_bytes,
        {index for index in order if id(engine.params[index]) in apart},
    )
    wanted = engine.inner.master_policy
    fp32_copies = wanted.fp32_copies or (policy.param_dtype is not None and policy.master_weights)
    return Planned(optimizer, layout, plans, MasterWeightPolicy(fp32_copies, wanted.offload))


def module_facts(module: nn.Module) -> list[Fact]:
    """What ranks must have alike of a module: all parameters, which of them are frozen, and buffers."""
    params = [
        Fact(f"parameter {name!r} of the module", f"{_type_text(param)}, requires_grad={param.requires_grad}")
        for name, param in module.named_parameters()
    ]
    return params + [Fact(f"buffer {name!r} of the module", _type_text(each)) for name, each in module.named_buffers()]


def _type_text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype}"


def to_convert(module: nn.Module, policy: MixedPrecision) -> set[int]:
    """Identities of the parameters that get another type: floating-point ones, but for batch normalisation.

    Batch normalisation keeps running averages as buffers, in float32, and wants its parameters in the same type.
    """
    if policy.param_dtype is None:
        return set()
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    kept = {id(param) for part in module.modules() if isinstance(part, norms) for param in part.parameters()}
    return {
        id(param)
        for param in module.parameters()
        if param.is_floating_point() and param.dtype != policy.param_dtype and id(param) not in kept
    }


def convert(params: Iterable[Tensor], chosen: set[int], policy: MixedPrecision) -> dict[int, Tensor]:
    """Give the chosen parameters their type; return the values they had, by identity."""
    fine = {}
    for param in params:
        if id(param) in chosen:
            fine[id(param)] = param.data
            param.grad = None
            param.data = param.data.to(policy.param_dtype)
    return fine


def take_over(planned: Planned, chosen: set[int], policy: MixedPrecision) -> ShardedGradients:
    """Convert the parameters, move them into buckets, and give the inner optimizer what this rank owns of them."""
    engine = planned.optimizer.engine
    fine = convert(engine.params, chosen, policy)
    flats = [flat_view(param.detach()) for param in engine.params]
    local = engine.inner.rebuilt(planned.optimizer.param_groups, planned.layout, engine.params, flats, planned.masters)
    for owned in local.owned:
        # Masters begin with the values from before the conversion.
        if owned.param_view is not None and id(owned.param) in fine:
            exact = flat_view(fine[id(owned.param)])[owned.shard.start : owned.shard.stop]
            owned.tensor.copy_(exact.as_strided(owned.tensor.shape, owned.tensor.stride()))
    gradients = ShardedGradients(engine.params, planned.layout)
    engine.take_over(
        planned.layout, local, lambda params, layout: ParameterBuckets(params, layout, planned.plans), gradients
    )
    local.push_options(planned.optimizer.param_groups)  # the new instance's constructor may have changed some
    return gradients
