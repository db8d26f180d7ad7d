"""Measure the bytes of tensors on one rank at the call of ``step()``, between steps and at the peak of a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from onecopy.bench.models import Sizes
from onecopy.bench.step_time import iterate
from onecopy.bench.variants import MEMORY_ONLY, VARIANTS, Trained
from onecopy.common.nested_tensors import tensors_in
from onecopy.common.tensor_storages import storages

KINDS = ("parameters", "gradients", "state", "other")


def measure(name: str, sizes: Sizes) -> dict[str, Any]:
    """Train a variant for a few steps and measure its memory at the call of ``step()``, after it, and at the peak."""
    trained = {**VARIANTS, **MEMORY_ONLY}[name](sizes.make())
    for number in range(3):
        iterate(trained, sizes, number)
    trained.finish()

    def step() -> None:
        iterate(trained, sizes, 3)
        trained.finish()  # torch's profiler crashes if it ends before a collective

    growth = peak_growth(step)
    between = sum(by_kind(trained).values())
    trained.zero()
    trained.forward_backward(sizes.tokens(dist.get_rank(), 4))
    found = by_kind(trained)
    trained.step()
    trained.finish()
    import resource  # not on Windows

    return {
        "kind": "memory",
        "variant": name,
        "rank": dist.get_rank(),
        **found,
        "between": between,
        "peak": between + growth,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def by_kind(trained: Trained) -> dict[str, int]:
    """Return the bytes of all tensors by kind; tensors that are no parameter, gradient or state are "other"."""
    gc.collect()
    all_tensors = storages(value for value in gc.get_objects() if isinstance(value, Tensor))
    params = storages(trained.model.parameters())
    grads = storages(param.grad for param in trained.model.parameters() if param.grad is not None)
    grads |= storages(tensors_in(list(trained.gradients())))
    state = storages(tensors_in(list(trained.state())))
    state = {address: size for address, size in state.items() if address not in params}
    known = params.keys() | grads.keys() | state.keys()
    other = sum(size for address, size in all_tensors.items() if address not in known)
    found = [*(sum(kind.values()) for kind in (params, grads, state)), other]
    return dict(zip(KINDS, found, strict=True))


def peak_growth(run: Callable[[], object]) -> int:
    """Return the largest number of bytes by which tensors grow during ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
