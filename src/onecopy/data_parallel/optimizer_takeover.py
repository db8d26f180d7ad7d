"""``ShardedDataParallel`` takes over an optimizer: its parameters move into buckets that are sharded among all ranks.

The inner optimizer is rebuilt for the new layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from onecopy.comm.agreement import Fact
from onecopy.common.flat_views import flat_view
from onecopy.data_parallel.argument_checks import module_facts
from onecopy.data_parallel.mixed_precision import MixedPrecision, convert_params, params_to_convert
from onecopy.data_parallel.parameter_buckets import ParameterBuckets
from onecopy.layout import BucketPlan, Layout, plan_buckets
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.step.consistency import layout_facts
from onecopy.step.gradients import Gradients
from onecopy.step.master_weights import MasterWeightPolicy
from onecopy.step.optimizer_classes import check_dtypes


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """The new layout of one optimizer.

    Attributes:
        optimizer: the optimizer.
        layout: the shards of its parameters.
        buckets: the buckets that the layout comes from.
        master_weights: whether the optimizer keeps fp32 copies, and where.
    """

    optimizer: ZeroRedundancyOptimizer
    layout: Layout
    buckets: tuple[BucketPlan, ...]
    master_weights: MasterWeightPolicy


def plan_optimizer(
    module: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    bucket_bytes: int,
    mixed_precision: MixedPrecision,
) -> OptimizerPlan:
    """Divide one optimizer's parameters into buckets, in reverse order of the module's parameters.

    Args:
        module: the module that has the parameters.
        optimizer: the optimizer.
        bucket_bytes: the size from which a bucket is full.
        mixed_precision: the types of the parameters.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be a positive number of bytes, got {bucket_bytes!r}")
    engine = optimizer.engine
    to_convert, dtype = params_to_convert(module, mixed_precision), mixed_precision.param_dtype
    names = {id(param): name for name, param in module.named_parameters()}
    specs = [
        replace(
            spec, name=names[id(param)], dtype=dtype if dtype is not None and id(param) in to_convert else spec.dtype
        )
        for spec, param in zip(engine.layout.params, engine.params, strict=True)
    ]
    place = {id(param): number for number, param in enumerate(module.parameters())}
    order = sorted(range(len(specs)), key=lambda index: -place[id(engine.params[index])])
    layout, buckets = plan_buckets(
        specs,
        order,
        engine.collectives.world_size,
        optimizer.splittable,
        bucket_bytes,
    )
    current = engine.inner.master_policy
    fp32_copies = current.fp32_copies or (mixed_precision.param_dtype is not None and mixed_precision.master_weights)
    master_policy = MasterWeightPolicy(fp32_copies, current.offload)
    check_dtypes(optimizer.optim, master_policy.stepped_dtypes(specs))
    return OptimizerPlan(optimizer, layout, buckets, master_policy)


def construction_facts(
    arguments: Mapping[str, object],
    module: nn.Module,
    plans: Sequence[OptimizerPlan],
) -> list[Fact]:
    """The facts that must be equal on all ranks before ``ShardedDataParallel`` takes over optimizers."""
    return [
        *(Fact(name, str(value)) for name, value in arguments.items()),
        *module_facts(module),
        *(fact for plan in plans for fact in layout_facts(plan.layout, "bucket")),
        *(Fact("bucket", str(bucket)) for plan in plans for bucket in plan.buckets),
    ]


@contextlib.contextmanager
def restored_on_failure(module: nn.Module, plans: Sequence[OptimizerPlan]) -> Iterator[None]:
    """If the block raises, restore all parameters, their gradients, the layouts and the inner optimizers."""
    # Restoring allocates nothing, because a rank without memory must be able to do it.
    tensors = [(param, param.data, param.grad) for param in module.parameters()]
    restore_functions = [plan.optimizer.engine.restore_function() for plan in plans]
    try:
        yield
    except BaseException:
        for param, data, gradient in tensors:
            param.data, param.grad = data, gradient
        for restore in restore_functions:
            restore()
        raise


def take_over(plan: OptimizerPlan, to_convert: set[int], mixed_precision: MixedPrecision) -> Gradients:
    """Convert the parameters, move them into buckets, and rebuild the inner optimizer for this rank's shards.

    Returns the source of gradients from which the optimizer steps from now on.
    """
    engine, groups = plan.optimizer.engine, plan.optimizer.param_groups
    old_values = convert_params(engine.params, to_convert, mixed_precision)
    flats = [flat_view(param.detach()) for param in engine.params]
    inner = engine.inner.rebuilt(groups, plan.layout, engine.params, flats, plan.master_weights)
    for owned in inner.owned:
        # Master weights begin with the values from before the conversion.
        if owned.param_view is not None and id(owned.param) in old_values:
            values = flat_view(old_values[id(owned.param)])[owned.shard.start : owned.shard.stop]
            owned.tensor.copy_(values.as_strided(owned.tensor.shape, owned.tensor.stride()))
    gradients = Gradients(engine.params, plan.layout, are_sharded=True)
    engine.take_over(
        plan.layout, inner, lambda params, layout: ParameterBuckets(params, layout, plan.buckets), gradients
    )
    inner.push_options(groups)  # the constructor of the new inner optimizer may have changed some
    return gradients
