"""DDP communication hooks: two that step inside the backward pass, and one that gives gradients to their owners."""

# No `from __future__ import annotations` here: DDP reads a hook's annotations and wants the real types.

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import Fact, agree
from onecopy.common.torch_private import in_join_context, locally_used, params_of_reducer
from onecopy.ddp_hooks.overlapped_step import Hook, OverlappedStep, OverlapSchedule
from onecopy.ddp_hooks.reduce_scatter import GradientReducer
from onecopy.ddp_hooks.worker import make_worker
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.gradient_norm import clip, total_norm
from onecopy.step.parameter_groups import Group


class ShardedOptimizer(Protocol):
    """What the hooks need of a :class:`~onecopy.ZeroRedundancyOptimizer`."""

    engine: Engine
    overlap: OverlappedStep | None
    overlap_with_ddp: bool
    param_groups: list[Group]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, shard_buckets: bool = False
) -> Callable[[Any, Any], Future[Any]]:
    """A DDP communication hook that steps bucket by bucket once the backward pass has computed all gradients.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4, overlap_with_ddp=True)
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))

    Updates happen inside ``backward()`` from the third pass on (the fourth with ``static_graph``); until then
    ``optimizer.step()`` does them. Keep calling ``step()``: with it no update is ever lost or doubled.

    Args:
        hook: the DDP communication hook that reduces a bucket, such as ``allreduce_hook``; its state is what
            ``register_comm_hook`` is given.
        ddp: the model that the hook will be registered on.
        zero: an optimizer over the model's parameters, made with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility. Who owns what always comes from the optimizer's layout.
    """
    del shard_buckets
    return _overlap_hook(hook, ddp, zero, when_reduced=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, shard_buckets: bool = False
) -> Callable[[Any, Any], Future[Any]]:
    """As :func:`hook_with_zero_step`, but each bucket is stepped as soon as its gradients are reduced.

    Args:
        hook: the DDP communication hook that reduces a bucket.
        ddp: the model that the hook will be registered on.
        zero: an optimizer over the model's parameters, made with ``overlap_with_ddp=True``.
        shard_buckets: accepted for compatibility. Who owns what always comes from the optimizer's layout.
    """
    del shard_buckets
    return _overlap_hook(hook, ddp, zero, when_reduced=True)


class ReduceScatter:
    """State for :func:`reduce_scatter_hook`: the optimizers that own the gradients, and how to reduce.

    All ranks construct it together, with the same arguments. If one refuses its arguments, all raise.

    Args:
        optimizers: one optimizer, or several over disjoint parameters of one model.
        reduce_dtype: the data type in which gradients travel (default: their own).
        ddp: the model; needed where the optimizers are not on all ranks, to see that it is on the same ones.
    """

    def __init__(
        self,
        optimizers: ShardedOptimizer | Sequence[ShardedOptimizer],
        reduce_dtype: torch.dtype | None = None,
        *,
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        given = _as_list(optimizers)
        engines: list[Engine] = []
        facts: list[Fact] = []
        failure: Exception | None = None
        try:
            engines = [_engine_of(optimizer) for optimizer in given]
            _check_reduction(given, engines, reduce_dtype, ddp)
            facts = [Fact("reduce_dtype", str(reduce_dtype)), *_engine_facts(engines)]
        except Exception as error:
            failure = error
        agree(collectives_of(given), "constructing ReduceScatter", facts, failure)
        self.reducer = GradientReducer(engines, reduce_dtype)


_states: "weakref.WeakKeyDictionary[Any, tuple[list[int], ReduceScatter]]" = weakref.WeakKeyDictionary()
"""The state made for optimizers that were registered themselves, by the first of them."""


def reduce_scatter_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A DDP communication hook that gives each rank only the gradients it owns; the update is left to ``step()``.

    Example::

        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, shard_by="element", lr=3e-4)
        ddp.register_comm_hook(optimizer, reduce_scatter_hook)

    Half of an all-reduce is saved: with the parameters that ``step()`` sends, the traffic is that of plain DDP. After
    ``backward()`` only the owned ranges of ``param.grad`` are reduced. A GradScaler works unchanged. Clip with
    ``optimizer.clip_grad_norm_()``; torch's function would see a different norm on every rank.

    All ranks register it with the same optimizers. What they registered is compared in the first ``backward()``, before
    any gradient is sent.

    Args:
        state: an optimizer, a list of optimizers over one model, or a :class:`ReduceScatter`.
        bucket: what DDP hands to the hook.
    """
    scatter = state if isinstance(state, ReduceScatter) else _state_for(_as_list(state))
    return scatter.reducer.reduce(bucket)


def _state_for(optimizers: list[Any]) -> ReduceScatter:
    """The state for optimizers that were registered themselves; the first call makes it, on all ranks together."""
    identities = list(map(id, optimizers))
    ours = bool(optimizers) and isinstance(getattr(optimizers[0], "engine", None), Engine)
    known = _states.get(optimizers[0]) if ours else None
    if known is None or known[0] != identities:
        known = (identities, ReduceScatter(optimizers))
        _states[optimizers[0]] = known
    return known[1]


def grad_norm(optimizers: ShardedOptimizer | Sequence[ShardedOptimizer], norm_type: float = 2.0) -> Tensor:
    """The norm of the gradients of all parameters of some optimizers; all ranks make this call together.

    Args:
        optimizers: one optimizer or several.
        norm_type: the order of the norm, or infinity.
    """
    return total_norm([_engine_of(optimizer) for optimizer in _as_list(optimizers)], norm_type)


def clip_grad_norm_(
    optimizers: ShardedOptimizer | Sequence[ShardedOptimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of some optimizers so that their common norm is at most ``max_norm``; return what it was.

    All ranks make this call together.

    Args:
        optimizers: one optimizer or several over one model.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm, or infinity.
        error_if_nonfinite: raise if the norm is infinite or not a number.
    """
    engines = [_engine_of(optimizer) for optimizer in _as_list(optimizers)]
    return clip(engines, max_norm, norm_type, error_if_nonfinite)


def _as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def _engine_of(optimizer: Any) -> Engine:
    engine = getattr(optimizer, "engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"this takes a onecopy.ZeroRedundancyOptimizer, got {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}. Wrap a plain optimizer's class, ZeroRedundancyOptimizer(params, AdamW, "
            "...). reduce_scatter_hook's state and clip_grad_norm_ take one or a list, an overlap hook takes one"
        )
    return engine


def _engine_facts(engines: Sequence[Engine]) -> list[Fact]:
    """Which optimizers these are, in which order, and who owns what."""
    facts = [Fact("number of optimizers", str(len(engines)))]
    for place, engine in enumerate(engines):
        kind, count = type(engine.inner.optim).__qualname__, len(engine.params)
        which = f"{kind} of {count} parameters, number {engine.number} constructed on its process group"
        facts += [Fact(f"optimizer {place}", which), Fact(f"layout of optimizer {place}", str(engine.layout.digest()))]
    return facts


def _check_reduction(
    optimizers: Sequence[ShardedOptimizer],
    engines: Sequence[Engine],
    reduce_dtype: object,
    ddp: DistributedDataParallel | None,
) -> None:
    if not engines:
        raise ValueError("a reduce-scatter hook needs at least one optimizer, got an empty list")
    _check_disjoint(engines)
    groups = {id(engine.collectives.process_group) for engine in engines}
    if len(groups) > 1:
        raise ValueError("the optimizers of a reduce-scatter hook must be on the same process group")
    if any(optimizer.overlap_with_ddp for optimizer in optimizers):
        raise ValueError(
            "overlap_with_ddp=True steps inside backward(), the reduce-scatter hook lets step() do it: "
            "construct the optimizer without overlap_with_ddp"
        )
    if ddp is not None:
        _check_same_ranks(engines[0], ddp)
    elif engines[0].collectives.world_size != dist.get_world_size():
        raise ValueError(
            "the optimizer is not on all ranks, and the hook cannot see which ranks DDP is on: register "
            "ReduceScatter(optimizer, ddp=ddp) instead of the optimizer"
        )
    _check_one_accelerator(engines)
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ValueError(f"reduce_dtype must be a floating-point type, got {reduce_dtype}")


def _check_disjoint(engines: Sequence[Engine]) -> None:
    seen: set[int] = set()
    for engine in engines:
        for spec, param in zip(engine.layout.params, engine.params, strict=True):
            if id(param) in seen:
                raise ValueError(f"parameter {spec.name!r} belongs to more than one of the hook's optimizers")
            seen.add(id(param))


def _overlap_hook(
    hook: Hook, ddp: DistributedDataParallel, zero: ShardedOptimizer, when_reduced: bool
) -> Callable[[Any, Any], Future[Any]]:
    failure: Exception | None = None
    facts: list[Fact] = []
    try:
        engine = _engine_of(zero)
        _check_registration(ddp, zero, engine)
        facts = [
            Fact("interleaved", str(when_reduced)),
            Fact("hook", _name_of(hook)),
            Fact("static_graph of DDP", str(bool(ddp.static_graph))),
            Fact("find_unused_parameters of DDP", str(bool(ddp.find_unused_parameters))),
            *_engine_facts([engine]),
        ]
    except Exception as error:
        failure = error
    agree(collectives_of([zero]), "making an overlap hook", facts, failure)
    # The hook lives inside DDP: a strong reference back to the model would keep both alive forever.
    model = weakref.ref(ddp)
    reducer_params = params_of_reducer(ddp)

    def schedule() -> OverlapSchedule:
        live = model()
        assert live is not None, "a hook is only called by its model"
        static = bool(live.static_graph)
        return OverlapSchedule(
            passes=3 if static else 2,
            when_reduced=when_reduced,
            unused_params=bool(live.find_unused_parameters) or static,
            uneven_inputs=in_join_context(live),
            last_used=lambda: locally_used(live, reducer_params),
        )

    collectives = engine.collectives.dedicated_group()
    worker = make_worker(engine.params[0].device)
    overlap = OverlappedStep(engine, lambda: zero.param_groups, collectives, worker, hook, schedule)
    zero.overlap = overlap

    def hook_with_step(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        return overlap.on_bucket(state, bucket)

    return hook_with_step


def _name_of(hook: Hook) -> str:
    """A function's name; of other callables the class, because their text may hold an address."""
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"


def _check_registration(ddp: Any, zero: ShardedOptimizer, engine: Engine) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp must be a DistributedDataParallel, got {type(ddp).__qualname__}")
    if not zero.overlap_with_ddp:
        raise ValueError("construct the optimizer with overlap_with_ddp=True to overlap its step with backward")
    if zero.overlap is not None:
        raise ValueError("a hook has already been made for this optimizer; one optimizer goes with one hook")
    known = {id(param) for param in ddp.parameters()}
    for spec, param in zip(engine.layout.params, engine.params, strict=True):
        if id(param) not in known:
            raise ValueError(f"parameter {spec.name!r} of the optimizer is not a parameter of the model")
    _check_same_ranks(engine, ddp)
    _check_one_accelerator([engine])


def _check_same_ranks(engine: Engine, ddp: DistributedDataParallel) -> None:
    ours = dist.get_process_group_ranks(engine.collectives.process_group)
    theirs = dist.get_process_group_ranks(ddp.process_group)
    if ours != theirs:
        raise ValueError(f"the optimizer is on ranks {ours}, but DDP is on ranks {theirs}; give both the same group")


def _check_one_accelerator(engines: Sequence[Engine]) -> None:
    devices = {param.device for engine in engines for param in engine.params if param.device.type != "cpu"}
    if len(devices) > 1:
        raise ValueError(f"the hooks work with one accelerator per rank, but the parameters are on {devices}")
