"""The public DDP communication hooks: two step inside the backward pass, one reduce-scatters gradients to owners."""

# No `from __future__ import annotations` here: DDP reads a hook's annotations and needs the real types.

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.common.torch_private import in_join_context
from onecopy.ddp_hooks.overlap_info import OverlapSettings
from onecopy.ddp_hooks.overlapped_step import Hook, OverlappedStep
from onecopy.ddp_hooks.reduce_scatter import GradientReducer
from onecopy.ddp_hooks.worker import make_worker
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.join import JOIN_REFUSAL
from onecopy.step.owned_state import engine_of, optimizer_list
from onecopy.step.parameter_groups import Group


class ShardedOptimizer(Protocol):
    """The attributes of a :class:`~onecopy.ZeroRedundancyOptimizer` that the hooks use."""

    engine: Engine
    overlap: OverlappedStep | None
    overlap_with_ddp: bool
    param_groups: list[Group]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, shard_buckets: bool = False
) -> Callable[[Any, Any], Future[Any]]:
    """Return a DDP communication hook that updates bucket by bucket after the backward pass has computed all gradients.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))

    Updates happen inside ``backward()`` from the third pass on (the fourth with ``static_graph``). Before that
    ``optimizer.step()`` updates. Call ``step()`` in every iteration, so that no update is lost or applied twice.

    Args:
        hook: the DDP communication hook that reduces a bucket, such as ``allreduce_hook``. Its state is the first
            argument of ``register_comm_hook``.
        ddp: the model on which the hook will be registered.
        zero: an optimizer over the model's parameters, constructed with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility and ignored. Ownership always comes from the optimizer's layout.
    """
    del shard_buckets
    return _overlap_hook(hook, ddp, zero, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, shard_buckets: bool = False
) -> Callable[[Any, Any], Future[Any]]:
    """Return a DDP communication hook that updates each bucket as soon as its gradients are reduced.

    Everything else is as in :func:`hook_with_zero_step`.

    Args:
        hook: the DDP communication hook that reduces a bucket.
        ddp: the model on which the hook will be registered.
        zero: an optimizer over the model's parameters, constructed with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility and ignored. Ownership always comes from the optimizer's layout.
    """
    del shard_buckets
    return _overlap_hook(hook, ddp, zero, interleaved=True)


class ReduceScatter:
    """The state of :func:`reduce_scatter_hook`: the optimizers that own the gradients, and the type to reduce in.

    All ranks construct it together, with the same arguments. If one rank refuses its arguments, all ranks raise.

    Args:
        optimizers: one optimizer, or several over disjoint parameters of one model.
        reduce_dtype: the data type in which gradients are sent and summed (default: their own).
        ddp: the model. It is required if the optimizers are on a subgroup of the ranks, to check that DDP is on the
            same ranks.
    """

    def __init__(
        self,
        optimizers: ShardedOptimizer | Sequence[ShardedOptimizer],
        reduce_dtype: torch.dtype | None = None,
        *,
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        given = optimizer_list(optimizers)
        with FailTogether(collectives_of(given), "constructing ReduceScatter") as together:
            engines = [engine_of(optimizer) for optimizer in given]
            _check_reduce_scatter(given, engines, reduce_dtype, ddp)
            together.facts = [Fact("reduce_dtype", str(reduce_dtype)), *_optimizer_facts(engines)]
        self.reducer = GradientReducer(engines, reduce_dtype)


_states: "weakref.WeakKeyDictionary[Any, tuple[list[int], ReduceScatter]]" = weakref.WeakKeyDictionary()
"""The hook states for optimizers that were registered without a ReduceScatter, by the first optimizer of the list."""


def reduce_scatter_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Reduce-scatter a DDP bucket, so that each rank receives only the gradients that it owns.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, shard_by="element", lr=3e-4)
        ddp.register_comm_hook(optimizer, reduce_scatter_hook)

    This sends half as much as an all-reduce. Together with the parameters that ``step()`` sends, the traffic is that of
    plain DDP. After ``backward()`` only the owned ranges of ``param.grad`` are reduced. ``step()`` updates as usual. A
    GradScaler works unchanged. Clip with ``optimizer.clip_grad_norm_()``: torch's function would compute a different
    norm on every rank.

    All ranks register the hook with the same optimizers. The first ``backward()`` compares them before it sends any
    gradient.

    Args:
        state: an optimizer, a list of optimizers over one model, or a :class:`ReduceScatter`.
        bucket: the bucket of gradients, from DDP.
    """
    scatter = state if isinstance(state, ReduceScatter) else _state_for(optimizer_list(state))
    return scatter.reducer.reduce(bucket)


def _state_for(optimizers: list[Any]) -> ReduceScatter:
    """Return the hook state for a list of optimizers; the first call constructs it, on all ranks together."""
    identities = list(map(id, optimizers))
    cacheable = bool(optimizers) and isinstance(getattr(optimizers[0], "engine", None), Engine)
    cached = _states.get(optimizers[0]) if cacheable else None
    if cached is None or cached[0] != identities:
        cached = (identities, ReduceScatter(optimizers))
        _states[optimizers[0]] = cached
    return cached[1]


def _optimizer_facts(engines: Sequence[Engine]) -> list[Fact]:
    """Describe the optimizers, their order and their layouts, which must be equal on all ranks."""
    facts = [Fact("number of optimizers", str(len(engines)))]
    for position, engine in enumerate(engines):
        name, count = type(engine.inner.optim).__qualname__, len(engine.params)
        description = f"{name} of {count} parameters, number {engine.number} constructed on its process group"
        facts += [
            Fact(f"optimizer {position}", description),
            Fact(f"layout of optimizer {position}", str(engine.layout.digest())),
        ]
    return facts


def _check_reduce_scatter(
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


def _overlap_hook(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, interleaved: bool
) -> Callable[[Any, Any], Future[Any]]:
    """Return a hook that reduces and updates each bucket; all ranks make this call together."""
    with FailTogether(collectives_of([zero]), "making an overlap hook") as together:
        engine = engine_of(zero)
        _check_overlap(ddp, zero, engine)
        together.facts = [
            Fact("interleaved", str(interleaved)),
            Fact("hook", _hook_name(hook)),
            Fact("static_graph of DDP", str(bool(ddp.static_graph))),
            Fact("find_unused_parameters of DDP", str(bool(ddp.find_unused_parameters))),
            *_optimizer_facts([engine]),
        ]
    # DDP refers to the hook: a strong reference from the hook to DDP would be a cycle that is never freed.
    ddp_reference = weakref.ref(ddp)

    def settings() -> OverlapSettings:
        live_ddp = ddp_reference()
        assert live_ddp is not None, "only a live DDP calls its hook"
        if in_join_context(live_ddp):
            raise RuntimeError(JOIN_REFUSAL)
        static_graph = bool(live_ddp.static_graph)
        return OverlapSettings(
            passes_before_overlap=3 if static_graph else 2,
            interleaved=interleaved,
            unused_params=bool(live_ddp.find_unused_parameters) or static_graph,
        )

    worker = make_worker(engine.params[0].device)
    collectives = worker.group_for_tasks(engine.collectives)
    overlap = OverlappedStep(engine, lambda: zero.param_groups, collectives, worker, hook, settings)
    zero.overlap = overlap

    def hook_with_step(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        return overlap.reduce_and_update(state, bucket)

    return hook_with_step


def _hook_name(hook: Hook) -> str:
    """Return the name of a function, or the class name of another callable, whose repr may contain an address."""
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"


def _check_overlap(ddp: Any, zero: ShardedOptimizer, engine: Engine) -> None:
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
