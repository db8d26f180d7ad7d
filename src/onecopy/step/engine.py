"""One step on one layout: update the owned shards, confirm that all ranks did, share the updated parameters.

"Share" means a broadcast or all-gather of updated parameters. ``Engine`` has the three phases. A *step schedule* calls
them in its own order: ``sequential_step`` here, ``step/join.py`` for uneven inputs, ``ddp_hooks/overlap.py``
inside the backward pass, ``data_parallel/step.py`` bucket by bucket.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecopy.comm.agreement import FirstFailure
from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import DeferredFlags
from onecopy.common.flat_views import is_dense
from onecopy.common.torch_private import profiled
from onecopy.layout import Layout, ParamSpec
from onecopy.step.checks import GradientProbe, compare_replicas
from onecopy.step.consistency import StepFacts, StepStatus
from onecopy.step.gradients import Gradients, gradient_range
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.nonfinite import NonfiniteGuard
from onecopy.step.parameter_groups import Group, names_of, shown_group
from onecopy.step.several_classes import KEY as CLASS_KEY
from onecopy.step.storage import Storage

StepSchedule = Callable[["Engine", Sequence[Group], Callable[[], Any] | None, dict[str, Any]], Any]
"""Makes one step with an engine, parameter groups, a closure and further arguments, and returns the closure's loss."""

StorageClass = Callable[[Sequence[Tensor], Layout], Storage]

_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The number of the next engine, by process group."""


class ClosureError(Exception):
    """Carries an exception of the user's closure past the handling of failures in the update."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class Engine:
    """The phases of a step.

    Attributes:
        collectives: the ranks that share the optimizer state.
        number: the number of this optimizer among those of the process group. Ranks construct optimizers together, so
            equal numbers mean the same optimizer on all ranks.
        params: all parameters, in order. The list is changed in place, because other objects refer to it.
        layout: the owner of each shard of the parameters.
        inner: this rank's instance of the user's optimizer class.
        storage: where the parameters' memory is.
        sharing: the messages that share the updated parameters.
        gradients: where a step finds its gradients.
        gradient_probe: notices in the first steps that nothing averages the gradients.
        status: the vote of a step.
        guard: notices gradients that are not finite, or None.
        check_replicas_every: compare the parameters of all ranks before every so many steps, or None.
        step_refusal: after a load that failed half way, the exception that ``step()`` raises.
    """

    def __init__(
        self,
        collectives: Collectives,
        params: Sequence[Tensor],
        layout: Layout,
        inner: InnerOptimizer,
        storage_class: StorageClass,
    ) -> None:
        self.collectives = collectives
        self.number = next(_numbers.setdefault(collectives.process_group, count()))
        self.inner = inner
        self._storage_class = storage_class
        self.status = StepStatus(collectives)
        self.guard: NonfiniteGuard | None = None
        self.check_replicas_every: int | None = None
        self._steps = 0
        self.step_refusal: Exception | None = None
        self.gradient_probe = GradientProbe(collectives)
        self.params: list[Tensor] = []
        self.gradients = Gradients(self.params, layout)
        self.set_layout(params, layout)

    def set_layout(self, params: Sequence[Tensor], layout: Layout) -> None:
        """Take over these parameters and this layout, and plan storage and messages for them."""
        # Allocations come first: if they fail, parameters may have moved, and everything else is as it was.
        storage = self._storage_class(params, layout)
        sharing = storage.plan_sharing(self.collectives)
        self.params[:] = params
        self.layout = self.gradients.layout = layout
        self._layout_digest = layout.digest()
        self.storage, self.sharing = storage, sharing
        self.inner.repoint(storage.flats)

    def attach(self, layout: Layout, inner: InnerOptimizer, storage_class: StorageClass, gradients: Gradients) -> None:
        """Replace the layout of the same parameters, and everything that depends on it."""
        self.inner, self._storage_class, self.gradients = inner, storage_class, gradients
        self.set_layout(list(self.params), layout)

    def follow_moved_params(self) -> None:
        """Follow parameters whose memory was moved since the last step; raise if their state cannot follow."""
        moved = self.storage.moved()
        if moved:
            self.set_layout(self.params, replace(self.layout, params=self._moved_specs(moved)))

    def _moved_specs(self, moved: Sequence[int]) -> tuple[ParamSpec, ...]:
        specs = list(self.layout.params)
        devices = list(dict.fromkeys(param.device for param in self.params))
        for index in moved:
            param, old = self.params[index], specs[index]
            new = replace(
                old,
                shape=tuple(param.shape),
                stride=param.stride(),
                dtype=param.dtype,
                device_ordinal=devices.index(param.device),
            )
            changed = new != old or param.device != self.storage.flats[index].device
            if new.shape != old.shape or not is_dense(new.shape, new.stride):
                raise RuntimeError(
                    f"parameter {old.name!r} was given other memory that does not fit: it was {old.describe()} and is "
                    f"{new.describe()}; construct a new optimizer after changing a parameter's shape"
                )
            fixed = self.inner.optim.state or self.inner.master_policy.any or not self.storage.convertible
            if changed and fixed:
                raise RuntimeError(
                    f"parameter {old.name!r} was moved or converted too late: it was "
                    f"{old.describe()} on {self.storage.flats[index].device} and is {new.describe()} on "
                    f"{param.device}; move the model before the first step() (with master weights, offload or "
                    "ShardedDataParallel: before constructing them), or construct a new optimizer and load the "
                    "consolidated state into it"
                )
            specs[index] = new
        return tuple(specs)

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raise if steps are refused, or if the user has edited the parameters of a group."""
        if self.step_refusal is not None:
            raise self.step_refusal
        listed = self.inner.params_by_group
        given = chain.from_iterable(group["params"] for group in groups)
        if [len(group["params"]) for group in groups] != list(map(len, listed)) or not all(
            map(is_, given, chain.from_iterable(listed))
        ):
            raise RuntimeError(
                "the parameters of param_groups were edited by hand; use add_param_group() or construct a new optimizer"
            )
        for position, (group, name) in enumerate(zip(groups, self.inner.class_names, strict=True)):
            if group.get(CLASS_KEY) != name:
                shown = shown_group(position, names_of(group, position))
                raise RuntimeError(
                    f"optimizer_class of {shown} was changed by hand from {name!r} to {group.get(CLASS_KEY)!r}; "
                    "construct a new optimizer"
                )

    @profiled("onecopy.update")
    def update(
        self,
        groups: Sequence[Group],
        closure: Callable[[], Any] | None,
        kwargs: dict[str, Any],
        gradient_shards: Mapping[int, Tensor] | None = None,
    ) -> Any:
        """Step the inner optimizer over the owned shards, and return the closure's loss.

        The gradients are those in ``gradient_shards``, by parameter, or by default those in ``param.grad``.
        """
        self.check_groups(groups)
        self.inner.push_options(groups)
        self.inner.master_weights.refresh_from_params()
        last_loss: Any = None

        def evaluate() -> Any:
            nonlocal last_loss
            assert callable(closure)
            self.inner.pull_options(groups)
            try:
                last_loss = closure()
            except Exception as error:
                raise ClosureError(error) from error
            self.inner.push_options(groups)  # the closure may have changed them
            self._bind_gradients()
            return last_loss

        try:
            if callable(closure):
                loss = self.inner.step(evaluate, kwargs)
            else:
                self._bind_gradients(gradient_shards)
                loss = self.inner.step(closure, kwargs)
        finally:
            self.inner.release_gradients()
        return last_loss if loss is None else loss

    def _bind_gradients(self, gradient_shards: Mapping[int, Tensor] | None = None) -> None:
        """Give the inner optimizer its gradients, which it may change."""
        if gradient_shards is None:
            if self.gradients.is_reduce_scattered:
                self.gradient_probe.end()
                gradient_shards = self.gradients.owned(self.inner.owned)
            self.gradient_probe.sample(self.params)
        self.inner.bind_gradients(self.layout, gradient_shards)

    def update_some(self, chosen: Sequence[bool]) -> None:
        """Step the inner optimizer over the owned shards of the chosen parameters, with ``param.grad``."""
        shards = {}
        for owned in self.inner.owned:
            index = owned.shard.param
            if not chosen[index]:
                continue
            gradient = gradient_range(owned.shard, owned.param, self.layout.params[index].name)
            if gradient is not None:
                shards[index] = gradient
        self.inner.step_on(shards)

    def confirm_and_share(
        self, groups: Sequence[Group], has_gradient: Sequence[bool] | None, failure: Exception | None
    ) -> None:
        """Confirm, share, and end the step. Ends most step schedules.

        ``has_gradient`` is None if all parameters may have changed; ``failure`` is this rank's exception in the update.
        """
        self.confirm_and_send(groups, has_gradient, failure)
        self.inner.end_step()

    def confirm_and_send(
        self, groups: Sequence[Group], has_gradient: Sequence[bool] | None, failure: Exception | None
    ) -> None:
        """Confirm, share, and take over options that the inner optimizer wrote, in a step or outside of one."""
        self.confirm(groups, [True] * len(self.params) if has_gradient is None else has_gradient, failure)
        self.share(has_gradient)
        if failure is not None:
            raise failure
        self.inner.pull_options(groups)

    @profiled("onecopy.confirm")
    def confirm(
        self, groups: Sequence[Group], has_gradient: Sequence[bool], failure: Exception | None, at_once: bool = False
    ) -> bool:
        """Vote, and raise on all ranks if one has failed or if the ranks differ; return whether all skip this step.

        On an accelerator the other ranks raise in the next step, unless the vote is read at once.
        """
        self.status.exchange(
            self.facts(groups, has_gradient),
            failure,
            probe=self.gradient_probe,
            guard=self.guard,
            at_once=at_once or not self.status.is_deferred,
        )
        return self.guard is not None and self.guard.take_skip()

    def check_replicas(self, wait: Callable[[], None]) -> None:
        """Wait for parameters in flight and compare the parameters of all ranks, if that is due before this step."""
        self._steps += 1
        if self.check_replicas_every and (self._steps - 1) % self.check_replicas_every == 0:
            self.status.check_previous()
            wait()
            compare_replicas(self.collectives, self.status.replicas, self.params, self.layout)

    def facts(self, groups: Sequence[Group], has_gradient: Sequence[bool]) -> StepFacts:
        """The facts that must be equal on all ranks in a step."""
        return StepFacts(self.layout, self._layout_digest, has_gradient, groups)

    def share_flags(self, flags: DeferredFlags, replicas: Collectives | None) -> None:
        """Keep votes that are read later in a queue that others use, too; with a mesh, vote among all replicas."""
        self.status = StepStatus(self.collectives, flags, replicas)

    def allow_steps(self) -> None:
        """Allow steps again after a load that succeeded, and forget earlier failures."""
        self.step_refusal = None
        self.status.queue.clear()

    @profiled("onecopy.share")
    def share(self, has_gradient: Sequence[bool] | None = None) -> None:
        """Send updated parameters from their owners to all ranks; only those with a gradient, if that is given."""
        # Which messages are sent may depend on the gradients only if the ranks have compared them.
        everything = (
            has_gradient is None or self.inner.updates_without_gradient or self.status.is_deferred or all(has_gradient)
        )
        self.sharing.start(None if everything else has_gradient).drain()
        # Autograd does not see received values, writes through views, and the writes of fused optimizers. The version
        # counter makes a backward pass that still needs the old values raise, on all ranks alike.
        changed = (
            self.params
            if everything or has_gradient is None
            else [param for param, has in zip(self.params, has_gradient, strict=True) if has]
        )
        if changed:
            self.inner.master_weights.increment_versions(changed)


def sequential_step(
    engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
) -> Any:
    """The ordinary step schedule: update, confirm, share, one after the other.

    With ``nonfinite`` the closure is evaluated before anything else, and the ranks agree before the update that all
    gradients are finite. On an accelerator with ``nonfinite="raise"`` they do so in the vote that is cast anyway.

    A rank whose update failed still confirms, which makes every rank raise. An exception of the closure is raised at
    once: other ranks may be in the closure's own collectives.
    """
    loss, failure, guard = None, FirstFailure(), engine.guard
    if guard is not None and callable(closure):
        with torch.enable_grad():
            loss = closure()
        closure = _evaluated(loss, type(engine.inner.optim).__qualname__)
    with failure:
        engine.follow_moved_params()
        if guard is not None:
            guard.look(engine.gradients.owned(engine.inner.owned), engine.layout)
    if (
        guard is not None
        and guard.agrees_first
        and engine.confirm(groups, engine.gradients.has_gradient(), failure.error, at_once=True)
    ):
        return loss
    with failure:
        if not failure:
            loss = engine.update(groups, closure, kwargs)
    if isinstance(failure.error, ClosureError):
        raise failure.error.original from None
    engine.confirm_and_share(groups, engine.gradients.has_gradient(), failure.error)
    engine.gradient_probe.warn_if_not_reduced()
    return loss


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


def change_and_share(engine: Engine, groups: Sequence[Group], change: Callable[[], object]) -> None:
    """Run a function that changes owned parameters outside a step, then share all parameters."""
    failure = FirstFailure()
    with failure:
        engine.follow_moved_params()
        engine.inner.push_options(groups)
        engine.inner.master_weights.refresh_from_params()
        with torch.no_grad():
            change()
        engine.inner.master_weights.write_to_params(everything=True)
    engine.confirm_and_send(groups, None, failure.error)


@contextlib.contextmanager
def restored_on_failure(
    engines: Sequence[Engine],
    params: Iterable[Tensor] = (),
    others: Sequence[object] = (),
    lists: Iterable[list[Any]] = (),
) -> Iterator[None]:
    """If the block raises, put back what it may have changed, without allocating memory.

    Engines are put back with their inner optimizers, groups and layouts, parameters with their memory and gradients,
    and others by their attributes. The values of state are not copied.
    """
    tensors = [(param, param.data, param.grad) for param in params]
    inner = [engine.inner for engine in engines]
    instances = [optimizer for each in inner for optimizer in each.instances]
    attributes = [(each, dict(vars(each))) for each in [*others, *engines, *inner, *instances]]
    of_engines = [(each.params, each.inner.params_by_group) for each in engines]
    contents = [(each, list(each)) for each in chain(lists, *of_engines, (each.param_groups for each in instances))]
    try:
        yield
    except BaseException:
        for param, data, gradient in tensors:
            param.data, param.grad = data, gradient
        for each, before in attributes:
            vars(each).update(before)
        for changed, content in contents:
            changed[:] = content
        for engine in engines:
            engine.inner.repoint(engine.storage.flats)
        raise


def sharded_collectives(optimizers: Sequence[object]) -> Collectives | None:
    """The ranks of the first sharded optimizer, or None if there is none. Raises nothing for wrong arguments."""
    for optimizer in optimizers:
        engine = optimizer if isinstance(optimizer, Engine) else getattr(optimizer, "engine", None)
        if isinstance(engine, Engine):
            return engine.collectives
    return None


def collectives_of(optimizers: Sequence[object]) -> Collectives:
    """The ranks of the first sharded optimizer, or all ranks if there is none. Raises nothing for wrong arguments."""
    return sharded_collectives(optimizers) or Collectives()
