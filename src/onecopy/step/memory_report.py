"""Measures the tensors of an optimizer on this rank, and puts the planner's prediction beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from onecopy.common.nested_tensors import tensors_in
from onecopy.common.tensor_storages import storage_bytes
from onecopy.planning.collectives import Way
from onecopy.planning.estimate import Machine, buffer_bytes
from onecopy.planning.memory_report import KINDS, MemoryReport, predicted_bytes
from onecopy.planning.model_shapes import Model
from onecopy.planning.optimizers import optimizer_of
from onecopy.step.engine import Engine


def measured_bytes(params: Iterable[Tensor], state: Any, masters: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes of tensors that exist now, by kind. Tensors that share memory are counted once.

    Args:
        params: parameters; their gradients are measured, too.
        state: the optimizer's state by parameter.
        masters: copies of parameters that are updated in place of them.
    """
    params = list(params)
    gradients = [param.grad for param in params if param.grad is not None]
    kinds = (params, gradients, tensors_in(list(state.values())), masters)
    return dict(zip(KINDS, map(storage_bytes, kinds), strict=True))


def memory_report(engine: Engine) -> MemoryReport:
    """Return the predicted and the measured bytes of an optimizer's tensors on this rank, without communication."""
    layout, inner, collectives = engine.layout, engine.inner, engine.collectives
    planned = [optimizer_of(inner.optimizer_class, group) for group in inner.optim.param_groups]
    predict = functools.partial(
        predicted_bytes,
        layout,
        optimizer=planned[0] if all(each == planned[0] for each in planned) else None,
        stepped=[dtype for _, dtype in inner.master_policy.stepped_dtypes(layout.params)],
        copied=[inner.master_policy.applies_to(param) for param in engine.params],
        trained=[param.requires_grad for param in engine.params],
    )
    is_sharded = engine.gradients.are_sharded
    way = Way.SHARDED if is_sharded else Way.REDUCE_SCATTER if engine.gradients.is_reduce_scattered else Way.LEVEL_ONE
    pairwise = collectives.uses_pairwise(engine.params[0].device)
    owned = layout.owned_by(collectives.group_rank)
    masters = [entry.tensor for entry in inner.owned if entry.param_view is not None]
    return MemoryReport(
        group_rank=collectives.group_rank,
        world_size=collectives.world_size,
        ddp=predict([(spec.index, spec.numel) for spec in layout.params], shards_gradients=False),
        predicted=predict([(shard.param, shard.numel) for shard in owned], shards_gradients=is_sharded),
        measured=measured_bytes(engine.params, inner.optim.state, masters),
        in_flight=buffer_bytes(way, Model(layout.params), Machine(collectives.world_size, 1.0, pairwise=pairwise)),
    )
