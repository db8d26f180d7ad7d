"""The guards of a step, which are off by default: ``nonfinite`` and ``check_replicas_every``.

With ``nonfinite`` there is a step schedule of its own: all ranks agree that all gradients are finite, and then update,
confirm and share as in the ordinary one. ``ShardedDataParallel`` agrees in the exchange before its update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onecopy.comm.agreement import FirstFailure
from onecopy.step.engine import Engine, StepSchedule, sequential_step
from onecopy.step.nonfinite import NonfiniteGuard
from onecopy.step.parameter_groups import Group
from onecopy.step.replica_check import ReplicaCheck


@dataclass(frozen=True, slots=True)
class StepGuards:
    """The guards that a user wants.

    Attributes:
        nonfinite: what happens if a gradient is not finite: None (an update), "raise" or "skip".
        check_replicas_every: the number of steps from one comparison of all parameters to the next, or None.
    """

    nonfinite: str | None
    check_replicas_every: int | None

    @classmethod
    def of_arguments(cls, nonfinite: Any, check_replicas_every: Any, overlap_with_ddp: bool) -> StepGuards:
        """Return the guards for an optimizer's arguments; raise if an argument is wrong."""
        if nonfinite not in (None, "raise", "skip"):
            raise ValueError(f"nonfinite must be None, 'raise' or 'skip', got {nonfinite!r}")
        if nonfinite is not None and overlap_with_ddp:
            raise ValueError(
                "nonfinite cannot be combined with overlap_with_ddp=True, because some parameters are updated before "
                "all gradients are known; leave overlap_with_ddp out and register onecopy.reduce_scatter_hook, which "
                "steps after backward"
            )
        every = check_replicas_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"check_replicas_every must be None or a number of steps from 1 on, got {every!r}")
        return cls(nonfinite, every)

    def install(self, engine: Engine) -> StepSchedule:
        """Give an engine these guards, and return the step schedule to use."""
        if self.check_replicas_every is not None:
            engine.replica_check = ReplicaCheck(self.check_replicas_every, engine.collectives)
        if self.nonfinite is None:
            return sequential_step
        engine.guard = NonfiniteGuard(self.nonfinite == "skip", engine.collectives)
        return guarded_step


def guarded_step(
    engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
) -> Any:
    """The step schedule with ``nonfinite``: agree that all gradients are finite, then make an ordinary step.

    The closure is evaluated before anything else. On an accelerator with ``nonfinite="raise"`` the flag is exchanged
    in the ordinary step, with the others.
    """
    guard, loss = engine.guard, None
    assert guard is not None
    if callable(closure):
        with torch.enable_grad():
            loss = closure()
        closure = _evaluated(loss, type(engine.inner.optim).__qualname__)
    failure = FirstFailure()
    with failure:
        engine.follow_moved_params()
        guard.look(engine.gradients.owned(engine.inner.owned), engine.layout)
    has_gradient = engine.gradients.has_gradient()
    if guard.agrees_first:
        if engine.confirm(groups, has_gradient, failure.error, at_once=True):
            return loss
    elif failure:
        engine.confirm_and_share(groups, has_gradient, failure.error)
    return sequential_step(engine, groups, closure, kwargs)


def _evaluated(loss: Any, class_name: str) -> Callable[[], Any]:
    """A closure that returns the loss of one that was evaluated already, once."""
    losses = [loss]

    def closure() -> Any:
        if not losses:
            raise RuntimeError(
                f"{class_name}.step() evaluates the closure several times, and with nonfinite it is evaluated once: "
                "its gradients are looked at before the update. Leave nonfinite out for this class"
            )
        return losses.pop()

    return closure
