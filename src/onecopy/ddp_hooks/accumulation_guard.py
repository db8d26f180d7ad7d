"""A check that no backward pass adds to gradients that the reduce-scatter hook has already reduced.

A second reduction of the sum would count the reduced ranges twice. A hook on a leaf runs before its gradient is
accumulated, so that it finds the gradient of an earlier pass in ``param.grad``, unless it was zeroed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onecopy.comm.status_flags import DeferredFlags
from onecopy.common.torch_private import backward_number, norms_of_each
from onecopy.step.engine import Engine


class AccumulationGuard:
    """Raises if a backward pass adds to a reduced gradient that was not zeroed.

    After ``optimizer.zero_grad()``, and for gradients that are None, nothing is to be checked. Other gradients may
    have been zeroed in place, which only their values tell. The CPU looks at once. On an accelerator that would make
    the host wait for each gradient: there the norms of all of them are computed before the first one is added to, and
    the host reads them in the next backward pass.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._defers = engine.collectives.defers_host_reads
        self._guarded: set[int] = set()  # identities of parameters
        self._flags = DeferredFlags()
        self._put = self._last = 0  # numbers of flags in the queue
        self._pass: int | None = None
        # By identity of a parameter: the position of its norm, and the names of parameters that this pass adds to.
        self._unread: dict[int, tuple[dict[int, str], int]] = {}

    def begin_pass(self) -> None:
        """Raise if the last pass has added to reduced gradients, and guard parameters that are not guarded yet."""
        self._flags.check_through(self._last)
        engine = self._engine()
        assert engine is not None
        for param, spec in zip(engine.params, engine.layout.params, strict=True):
            if param.requires_grad and id(param) not in self._guarded:
                param.register_hook(self._guard_of(param, spec.name))
                self._guarded.add(id(param))

    def end_pass(self) -> None:
        """Note that all gradients of a pass have been reduced."""
        self._last = self._put

    def _guard_of(self, param: Tensor, name: str) -> Callable[[Tensor], None]:
        param_reference = weakref.ref(param)

        def guard(_gradient: Tensor) -> None:
            engine, leaf = self._engine(), param_reference()
            if engine is None or leaf is None or id(leaf) not in engine.params_with_reduced_grad:
                return
            if leaf.grad is not None:
                if self._defers:
                    self._check_later(engine, leaf, name)
                elif torch.count_nonzero(leaf.grad):
                    raise _error(name)
            engine.params_with_reduced_grad.discard(id(leaf))

        return guard

    def _check_later(self, engine: Engine, leaf: Tensor, name: str) -> None:
        """Note that this pass adds to a reduced gradient; the first note of a pass computes the norms of all."""
        if self._pass != backward_number():
            self._pass = backward_number()
            self._unread = {}
            by_type: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
            for param in engine.params:
                gradient = param.grad
                if id(param) in engine.params_with_reduced_grad and gradient is not None:
                    by_type.setdefault((gradient.device, gradient.dtype), {})[id(param)] = gradient
            for gradients in by_type.values():
                added: dict[int, str] = {}
                norms = torch.stack(norms_of_each(list(gradients.values()), math.inf, None))
                self._put = self._flags.put(norms, None, partial(_check, added))
                self._unread.update({param: (added, position) for position, param in enumerate(gradients)})
        names, position = self._unread[id(leaf)]
        names[position] = name


def _check(added: dict[int, str], norms: Tensor) -> None:
    """Raise if a gradient that was added to was not zero."""
    for position in norms.nonzero().flatten().tolist():
        if position in added:
            raise _error(added[position])


def _error(name: str) -> RuntimeError:
    return RuntimeError(
        f"a second backward pass would add to the gradient of parameter {name!r} that the reduce-scatter hook has "
        "already reduced; run all backward passes before step() except the last one inside ddp.no_sync(), and zero the "
        "gradients after step()"
    )
