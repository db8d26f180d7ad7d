"""The construction of ``ShardedDataParallel``: arguments are checked, optimizers are planned and attached.

1. Check the arguments and plan the buckets of every optimizer. Nothing is changed.
2. Compare arguments and plans of all ranks.
3. Attach the optimizers: convert their parameters, move them into buckets, and rebuild their state for the new layout.

Frozen parameters have a place in the layout, but no bucket. They get one when they are unfrozen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.agreement import Fact
from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import flat_view
from onecopy.data_parallel.bucket import GradientBucket, ParameterBuckets, ReductionPolicy
from onecopy.layout import BucketPlan, Layout, plan_buckets, restricted
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.step.consistency import layout_facts
from onecopy.step.gradients import Gradients
from onecopy.step.master_weights import MasterWeightPolicy

# Mixed precision


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The types in which a model computes and communicates.

    Attributes:
        param_dtype: convert floating-point parameters to this type (default: leave them).
        reduce_dtype: the type in which gradients are sent and added up (default: the type of the parameters).
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


def params_to_convert(module: nn.Module, mixed_precision: MixedPrecision) -> set[int]:
    """The identities of the parameters that get another type.

    Batch normalisation has running averages in float32 buffers, and torch wants its parameters in the same type.
    Parameters in 8 bits and less are quantised, and stay so.
    """
    if mixed_precision.param_dtype is None:
        return set()
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    of_norms = {id(param) for part in module.modules() if isinstance(part, norms) for param in part.parameters()}
    return {
        id(param)
        for param in module.parameters()
        if param.is_floating_point()
        and param.element_size() > 1
        and param.dtype != mixed_precision.param_dtype
        and id(param) not in of_norms
    }


def convert_params(
    params: Iterable[Tensor], to_convert: set[int], mixed_precision: MixedPrecision
) -> dict[int, Tensor]:
    """Convert the parameters whose identities are in ``to_convert``; return their old values, by identity."""
    old_values = {}
    for param in params:
        if id(param) in to_convert:
            old_values[id(param)] = param.data
            param.grad = None
            param.data = param.data.to(mixed_precision.param_dtype)
    return old_values


# Checks


def check_optimizers(optimizers: Sequence[object], collectives: Collectives) -> None:
    """Raise unless all are :class:`ZeroRedundancyOptimizer` on the same process group."""
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


def replicas_of(mesh: DeviceMesh, collectives: Collectives) -> Collectives:
    """The ranks along the first dimension of a mesh; the second dimension must be the optimizers' ``collectives``."""
    if mesh.ndim != 2:
        raise ValueError(f"mesh must have two dimensions, (replicate, shard), got {mesh.ndim}")
    if mesh.get_group(1) is not collectives.process_group:
        raise ValueError(
            "the optimizers must be on the mesh's second dimension: construct them with process_group=mesh.get_group(1)"
        )
    return Collectives(mesh.get_group(0), collectives.control_device)


def check_mixed_precision(mixed_precision: object) -> None:
    """Raise unless the argument is a :class:`MixedPrecision`."""
    if not isinstance(mixed_precision, MixedPrecision):
        raise TypeError(
            "mixed_precision must be a onecopy.MixedPrecision, as in "
            f"MixedPrecision(param_dtype={mixed_precision!r}), not {mixed_precision!r}"
        )


def check_module(module: object, optimizers: Sequence[ZeroRedundancyOptimizer]) -> None:
    """Raise unless the optimizers have not stepped and together have every parameter that the module trains."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {torch.typename(module)}")
    if isinstance(module, Joinable):
        raise TypeError(
            f"module is wrapped in {type(module).__name__} already: ShardedDataParallel takes the place of DDP; give "
            "it the module itself"
        )
    names = {id(param): name for name, param in module.named_parameters()}
    optimizer_of: dict[int, int] = {}
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
            if id(param) not in names:
                raise ValueError(f"parameter {spec.name!r} of optimizer {number} is not a parameter of the module")
            if id(param) in optimizer_of:
                raise ValueError(
                    f"parameter {names[id(param)]!r} is in optimizers {optimizer_of[id(param)]} and {number}"
                )
            optimizer_of[id(param)] = number
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in optimizer_of:
            raise ValueError(
                f"parameter {name!r} of the module needs a gradient but is in no optimizer: add it to one, or freeze "
                "it with requires_grad_(False)"
            )


def resolve_uses(module: nn.Module, uses: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """The identities of the parameters that ``uses`` names, by submodule; raise if a name is unknown."""
    names = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules())
    resolved: dict[str, list[int]] = {}
    for name, used_names in uses.items():
        if name not in modules:
            raise ValueError(f"uses names a submodule {name!r} that the module does not have")
        resolved[name] = []
        for used in used_names:
            if used in names:
                resolved[name].append(id(names[used]))
            elif used in modules:
                resolved[name] += [id(param) for param in modules[used].parameters()]
            else:
                raise ValueError(f"uses[{name!r}] names {used!r}, which is neither a parameter nor a submodule")
    return resolved


# Plans


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """The new layout of one optimizer."""

    optimizer: ZeroRedundancyOptimizer
    layout: Layout
    buckets: tuple[BucketPlan, ...]  # of the parameters that are trainable now
    frozen: tuple[BucketPlan, ...]  # that the frozen parameters would have: they say who owns which range
    master_weights: MasterWeightPolicy


def plan_optimizer(
    module: nn.Module, optimizer: ZeroRedundancyOptimizer, bucket_bytes: int, mixed_precision: MixedPrecision
) -> OptimizerPlan:
    """Divide one optimizer's parameters into buckets, in reverse order of the module's parameters."""
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be a positive number of bytes, got {bucket_bytes!r}")
    engine = optimizer.engine
    if engine.inner.averages:
        raise ValueError("construct ShardedDataParallel first and ShardedEMA after it: the shards become others")
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
    frozen = {index for index in order if not engine.params[index].requires_grad}
    splittable = engine.inner.classes.splittable(optimizer.param_groups)
    layout, plans = plan_buckets(specs, order, engine.collectives.world_size, splittable, bucket_bytes, frozen)
    current = engine.inner.master_policy
    fp32_copies = current.fp32_copies or (mixed_precision.param_dtype is not None and mixed_precision.master_weights)
    master_policy = MasterWeightPolicy(fp32_copies, current.offload)
    engine.inner.check_options(master_policy.stepped_dtypes(specs))
    buckets, of_frozen = (
        tuple(plan for plan in plans if (plan.params[0] in frozen) is is_frozen) for is_frozen in (False, True)
    )
    return OptimizerPlan(optimizer, layout, buckets, of_frozen, master_policy)


def construction_facts(
    arguments: Mapping[str, object], module: nn.Module, plans: Sequence[OptimizerPlan]
) -> list[Fact]:
    """The values that must be equal on all ranks before optimizers are attached."""
    return [
        *(Fact(name, str(value)) for name, value in arguments.items()),
        *(
            Fact(f"parameter {name!r} of the module", f"{_type_text(param)}, requires_grad={param.requires_grad}")
            for name, param in module.named_parameters()
        ),
        *(Fact(f"buffer {name!r} of the module", _type_text(buffer)) for name, buffer in module.named_buffers()),
        *(fact for plan in plans for fact in layout_facts(plan.layout, "bucket")),
        *(Fact("bucket", str(bucket)) for plan in plans for bucket in plan.buckets + plan.frozen),
    ]


def _type_text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype}"


# Attached optimizers


class AttachedOptimizer:
    """An optimizer whose parameters are in buckets that are sharded among all ranks."""

    def __init__(
        self, plan: OptimizerPlan, policy: ReductionPolicy, to_convert: set[int], mixed_precision: MixedPrecision
    ) -> None:
        self.engine = engine = plan.optimizer.engine
        self._policy = policy
        self._plans, self._frozen = list(plan.buckets), list(plan.frozen)
        groups = plan.optimizer.param_groups
        old_values = convert_params(engine.params, to_convert, mixed_precision)
        flats = [flat_view(param.detach()) for param in engine.params]
        inner = engine.inner.rebuilt(groups, plan.layout, engine.params, flats, plan.master_weights)
        for owned in inner.owned:
            # Master weights begin with the values from before the conversion.
            if owned.param_view is not None and id(owned.param) in old_values:
                values = flat_view(old_values[id(owned.param)])[owned.shard.start : owned.shard.stop]
                owned.tensor.copy_(values.as_strided(owned.tensor.shape, owned.tensor.stride()))
        gradients = Gradients(engine.params, plan.layout, are_sharded=True)
        # An unknown class may change frozen parameters, too, so they are shared with all others.
        shared = plan.buckets + plan.frozen if inner.updates_without_gradient else plan.buckets
        engine.attach(plan.layout, inner, partial(ParameterBuckets, plans=shared), gradients)
        inner.push_options(groups)  # the constructor of the new inner optimizer may have changed some
        # Of the parameters that are trainable, or have been.
        self.buckets = [self._gradient_bucket(bucket) for bucket in plan.buckets]
        gradients.on_zero = partial(_clear_accumulated, weakref.ref(self))

    def _gradient_bucket(self, plan: BucketPlan) -> GradientBucket:
        engine = self.engine
        names = [engine.layout.params[index].name for index in plan.params]
        return GradientBucket(plan, [engine.params[index] for index in plan.params], names, self._policy)

    def unfreeze(self, params: Collection[int]) -> list[GradientBucket]:
        """Make the buckets of parameters, given by ``id()``, that have none.

        Their owners stay the same, so no state moves.
        """
        engine, specs = self.engine, self.engine.layout.params
        chosen = {index for plan in self._frozen for index in plan.params if id(engine.params[index]) in params}
        new = [restricted(plan, specs, chosen) for plan in self._frozen]
        left = [restricted(plan, specs, set(plan.params) - chosen) for plan in self._frozen]
        plans = [plan for plan in new if plan.params]
        buckets = [self._gradient_bucket(plan) for plan in plans]
        self._plans, self._frozen = self._plans + plans, [plan for plan in left if plan.params]
        self.buckets = self.buckets + buckets
        if buckets and not engine.inner.updates_without_gradient:
            storage_class = partial(ParameterBuckets, plans=self._plans)
            engine.attach(engine.layout, engine.inner, storage_class, engine.gradients)
        return buckets


def _clear_accumulated(attached: Callable[[], AttachedOptimizer | None]) -> None:
    live = attached()
    for bucket in [] if live is None else live.buckets:
        bucket.clear_accumulated()
