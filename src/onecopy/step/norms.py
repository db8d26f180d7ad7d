"""The norm of all gradients, and clipping by it, from the part of the gradients that each rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.common.torch_private import multiply_each
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.owned_state import OwnedStateOptimizer, engine_of, optimizer_list
from onecopy.step.sharded_gradient import CALL, check_defined, combined_norms, local_norms


def grad_norm(optimizers: OwnedStateOptimizer | Sequence[OwnedStateOptimizer], norm_type: float = 2.0) -> Tensor:
    """Return the norm of the gradients of all parameters of one or several optimizers.

    All ranks make this call together.

    Args:
        optimizers: one optimizer or several.
        norm_type: the order of the norm, or infinity.
    """
    return total_norm(optimizer_list(optimizers), norm_type)


def clip_grad_norm_(
    optimizers: OwnedStateOptimizer | Sequence[OwnedStateOptimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of one or several optimizers so that their common norm is at most ``max_norm``.

    All ranks make this call together.

    Args:
        optimizers: one optimizer or several over one model.
        max_norm: the largest norm allowed.
        norm_type: the order of the norm, or infinity.
        error_if_nonfinite: raise if the norm is infinite or not a number.

    Returns:
        The norm before scaling.
    """
    return clip(optimizer_list(optimizers), max_norm, norm_type, error_if_nonfinite)


def _engines_of(given: Sequence[object]) -> list[Engine]:
    """The engines of optimizers, or the given engines; raise if there is none or if an object is neither."""
    if not given:
        raise ValueError("clip_grad_norm_ and grad_norm need at least one optimizer, got an empty list")
    return [each if isinstance(each, Engine) else engine_of(each) for each in given]


def total_norm(given: Sequence[object], norm_type: float, **compared: float) -> Tensor:
    """The norm of the gradients of optimizers or engines, equal on all ranks, as ``compared`` must be.

    All ranks make this call together.
    """
    with _failing_together(given) as facts:
        engines = _engines_of(given)
        norm_type = float(norm_type)
        numbers = {"norm_type": norm_type, **compared}
        facts += [Fact(name, str(float(number))) for name, number in numbers.items()]
        facts += _engine_facts(engines)
        local = _local_norms(engines, norm_type)
    norms = combined_norms(engines[0].collectives, local, norm_type)
    double = any(spec.dtype.itemsize >= 8 for engine in engines for spec in engine.layout.params)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    if norm_type < 0 and not any(any(engine.gradients.has_gradient()) for engine in engines):
        total = torch.zeros_like(total)  # the norm of no gradients is zero in torch, too
    return total.to(torch.float64 if double else torch.float32)


def clip(given: Sequence[object], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``; return the norm that they had."""
    norm = total_norm(given, norm_type, max_norm=max_norm, error_if_nonfinite=error_if_nonfinite)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {norm.item()}, not finite")
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in [param.grad for engine in _engines_of(given) for param in engine.params]:
        if gradient is not None:
            by_type.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), same in by_type.items():
        multiply_each(same, factor.to(device))  # not rounded to the type of the gradients
    return norm


@contextmanager
def _failing_together(given: Sequence[object]) -> Iterator[list[Fact]]:
    """Fail on all ranks together, where reading status flags does not make the host wait for an accelerator."""
    collectives = collectives_of(given)
    with FailTogether(None if collectives.defers_host_reads else collectives, CALL) as together:
        yield together.facts


def _engine_facts(engines: Sequence[Engine]) -> list[Fact]:
    """The facts that make all ranks send equally many numbers."""
    for number, engine in enumerate(engines):
        if engine.collectives.process_group is not engines[0].collectives.process_group:
            raise ValueError(f"the optimizers must be on one process group; number {number} is on another")
    return [Fact("parameters of the optimizers", str([len(engine.params) for engine in engines]))]


def _local_norms(engines: Sequence[Engine], order: float) -> Tensor:
    """The norm of this rank's part of each parameter's gradient."""
    parts: list[Tensor | None] = []
    for engine in engines:
        for spec, param in zip(engine.layout.params, engine.params, strict=True):
            if param.grad is not None:
                check_defined(order, spec.numel, f"the gradient of parameter {spec.name!r}")
                if param.grad.layout is not torch.strided:
                    raise ValueError(f"the gradient of parameter {spec.name!r} is sparse: no norm of it")
        mine = engine.gradients.owned(engine.inner.owned)
        parts += [mine.get(index) for index in range(len(engine.params))]
    return local_norms(parts, order, engines[0].params[0].device)
