"""Checks of the hooks' arguments, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import Fact
from onecopy.step.engine import Engine
from onecopy.step.parameter_groups import Group


class ShardedOptimizer(Protocol):
    """The attributes of a :class:`~onecopy.ZeroRedundancyOptimizer` that the hooks use."""

    engine: Engine
    overlap: Any
    overlap_with_ddp: bool
    param_groups: list[Group]


def optimizer_facts(engines: Sequence[Engine]) -> list[Fact]:
    """Describe the optimizers, their order and their layouts, which must be equal on all ranks."""
    facts = [Fact("number of optimizers", str(len(engines)))]
    for position, engine in enumerate(engines):
        name, count = engine.inner.kind.rpartition(".")[2], len(engine.params)
        description = f"{name} of {count} parameters, number {engine.number} constructed on its process group"
        facts += [
            Fact(f"optimizer {position}", description),
            Fact(f"layout of optimizer {position}", str(engine.layout.digest())),
        ]
    return facts


def check_reduce_scatter(
    optimizers: Sequence[ShardedOptimizer],
    engines: Sequence[Engine],
    reduce_dtype: object,
    ddp: DistributedDataParallel | None,
) -> None:
    """Raise if the arguments of a :class:`ReduceScatter` do not fit together."""
    if not engines:
        raise ValueError("a reduce-scatter hook needs at least one optimizer, got an empty list")
    _check_disjoint(engines)
    groups = {id(engine.collectives.process_group) for engine in engines}
    if len(groups) > 1:
        raise ValueError("the optimizers of a reduce-scatter hook must be on the same process group")
    if any(optimizer.overlap_with_ddp for optimizer in optimizers):
        raise ValueError(
            "overlap_with_ddp=True updates inside backward(), but with the reduce-scatter hook step() updates: "
            "construct the optimizer without overlap_with_ddp"
        )
    if ddp is not None:
        _check_same_ranks(engines[0], ddp)
    elif engines[0].collectives.world_size != dist.get_world_size():
        raise ValueError(
            "the optimizer is not on all ranks, and the hook does not know the ranks of DDP: register "
            "ReduceScatter(optimizer, ddp=ddp) instead of the optimizer"
        )
    _check_gradients_in_buckets(engines)
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ValueError(f"reduce_dtype must be a floating-point type, got {reduce_dtype}")


def _check_disjoint(engines: Sequence[Engine]) -> None:
    """Raise if a parameter belongs to two optimizers."""
    seen: set[int] = set()
    for engine in engines:
        for spec, param in zip(engine.layout.params, engine.params, strict=True):
            if id(param) in seen:
                raise ValueError(f"parameter {spec.name!r} belongs to more than one of the hook's optimizers")
            seen.add(id(param))


def check_overlap(ddp: Any, zero: ShardedOptimizer, engine: Engine) -> None:
    """Raise if an overlap hook cannot be made for this model and optimizer."""
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel, got {type(ddp).__qualname__}")
    if not zero.overlap_with_ddp:
        raise ValueError("construct the optimizer with overlap_with_ddp=True to overlap its step with backward")
    if zero.overlap is not None:
        raise ValueError("a hook has already been made for this optimizer; use one hook per optimizer")
    model_params = {id(param) for param in ddp.parameters()}
    for spec, param in zip(engine.layout.params, engine.params, strict=True):
        if id(param) not in model_params:
            raise ValueError(f"parameter {spec.name!r} of the optimizer is not a parameter of the model")
    _check_same_ranks(engine, ddp)
    _check_gradients_in_buckets([engine])


def _check_same_ranks(engine: Engine, ddp: DistributedDataParallel) -> None:
    """Raise if the optimizer and DDP are on different ranks."""
    optimizer_ranks = dist.get_process_group_ranks(engine.collectives.process_group)
    ddp_ranks = dist.get_process_group_ranks(ddp.process_group)
    if optimizer_ranks != ddp_ranks:
        raise ValueError(
            f"the optimizer is on ranks {optimizer_ranks}, but DDP is on ranks {ddp_ranks}; give both the same "
            "process_group"
        )


def _check_gradients_in_buckets(engines: Sequence[Engine]) -> None:
    """Raise if a hook cannot use the buckets in which DDP has the gradients."""
    for engine in engines:
        for spec in engine.layout.params:
            if spec.dtype.is_complex:
                raise ValueError(
                    f"parameter {spec.name!r} is complex, and DDP's buckets have the gradients of such parameters as "
                    "real numbers: the hooks do not support it. Train without a hook, or use ShardedDataParallel"
                )
    devices = {param.device for engine in engines for param in engine.params if param.device.type != "cpu"}
    if len(devices) > 1:
        raise ValueError(f"the hooks support one accelerator per rank, but the parameters are on {devices}")
