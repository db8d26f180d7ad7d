"""The norm of all gradients, and clipping by it, from what each rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm.agreement import Fact, agree
from onecopy.step.engine import Engine
from onecopy.step.sharded_norm import check_defined, combined_norms, local_norms


def total_norm(engines: Sequence[Engine], norm_type: float) -> Tensor:
    """The norm of all gradients of all engines; every rank makes this call and gets the same number."""
    failure: Exception | None = None
    facts: list[Fact] = []
    local = torch.zeros(0)
    try:
        norm_type = float(norm_type)
        facts = [Fact("norm_type", str(norm_type)), *_engine_facts(engines)]
        local = _local_norms(engines, norm_type)
    except Exception as error:
        failure = error
    return _total_norm(engines, local, norm_type, facts, failure)


def clip(engines: Sequence[Engine], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; return the norm they had."""
    failure: Exception | None = None
    facts: list[Fact] = []
    gradients: list[Tensor] = []
    local = torch.zeros(0)
    try:
        norm_type, max_norm = float(norm_type), float(max_norm)
        facts = [
            Fact("norm_type", str(norm_type)),
            Fact("max_norm", str(max_norm)),
            Fact("error_if_nonfinite", str(bool(error_if_nonfinite))),
            *_engine_facts(engines),
        ]
        local = _local_norms(engines, norm_type)
        gradients = [
            each for engine in engines for each in engine.gradients.to_scale(engine.inner.owned, engine.layout)
        ]
    except Exception as error:
        failure = error
    norm = _total_norm(engines, local, norm_type, facts, failure)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {norm.item()}, not finite")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    for engine in engines:
        engine.note_scaled()
    return norm


def _engine_facts(engines: Sequence[Engine]) -> list[Fact]:
    """What must be equal for the ranks to send each other equally many numbers."""
    for number, engine in enumerate(engines):
        if engine.collectives.process_group is not engines[0].collectives.process_group:
            raise ValueError(f"the optimizers must be on one process group; number {number} is on another")
    return [Fact("parameters of the optimizers", str([len(engine.params) for engine in engines]))]


def _local_norms(engines: Sequence[Engine], order: float) -> Tensor:
    """The norm of this rank's part of each parameter's gradient."""
    parts: list[Tensor | None] = []
    for engine in engines:
        present = engine.gradients.has_gradient()
        for spec, has in zip(engine.layout.params, present, strict=True):
            if has:
                check_defined(order, spec.numel, f"the gradient of parameter {spec.name!r}")
        mine = engine.gradients.owned_gradients(engine.inner.owned, engine.layout)
        parts += [mine.get(index) for index in range(len(engine.params))]
    return local_norms(parts, order, engines[0].params[0].device)


def _total_norm(
    engines: Sequence[Engine], local: Tensor, order: float, facts: Sequence[Fact], failure: Exception | None
) -> Tensor:
    """The norm of all gradients, once all ranks agree that they have been given the same."""
    collectives = engines[0].collectives
    if not collectives.defers_host_reads:
        agree(collectives, "the norm of the gradients", facts, failure)
    elif failure is not None:
        raise failure
    norms = combined_norms(collectives, local, order)
    double = any(spec.dtype.itemsize >= 8 for engine in engines for spec in engine.layout.params)
    total: Tensor = torch.linalg.vector_norm(norms, order)
    if order < 0 and not any(any(engine.gradients.has_gradient()) for engine in engines):
        total = torch.zeros_like(total)  # as in torch, which takes the norm of no gradients for zero
    return total.to(torch.float64 if double else torch.float32)
