"""One training step over one layout: update what this rank owns, confirm that all ranks did, share the result.

The engine is the only owner of ordering. Drivers (sequential stepping, uneven inputs) call its phases; they do not
reach inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import flat_like, is_dense
from onecopy.common.profiling import profiled
from onecopy.common.torch_private import after_backward, in_backward
from onecopy.layout import Layout, ParamSpec
from onecopy.step.gradient_scale_check import UNKNOWN, Probe, common_factor, probed_params, remember
from onecopy.step.gradients import FullGradients, Gradients
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import Group
from onecopy.step.parameter_storage import Storage
from onecopy.step.parameter_sync import ParameterSync
from onecopy.step.status import StepFacts, make_status

StepSchedule = Callable[["Engine", Sequence[Group], Callable[[], Any] | None, dict[str, Any]], Any]
"""What does one step: from an engine, the groups, a closure and further arguments to the closure's loss."""

MakeStorage = Callable[[Sequence[Tensor], Layout], Storage]

_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The numbers of the engines that are constructed next, by process group."""


class ClosureError(Exception):
    """Carries an exception of the user's closure past the handling of our own failures."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class Engine:
    """The phases of a step. ``storage_class`` says where parameters live."""

    def __init__(
        self,
        collectives: Collectives,
        params: Sequence[Tensor],
        layout: Layout,
        local: InnerOptimizer,
        storage_class: MakeStorage,
    ) -> None:
        self.collectives = collectives
        # Ranks construct optimizers together, so equal numbers mean the same optimizer on all ranks of the group.
        self.number = next(_numbers.setdefault(collectives.process_group, count()))
        self.inner = local
        self._storage_class = storage_class
        self._status = make_status(collectives)
        # This rank's reduced ranges, by parameter, for a rank whose param.grad DDP does not fill (uneven inputs).
        self.reduced_shards: dict[int, Tensor] = {}
        self.params_with_reduced_grad: set[int] = (
            set()
        )  # identities of parameters whose gradient was reduced, also after it has been used
        self._probes: list[Probe] = []
        self.step_refusal: Exception | None = None  # why no step may be made, after a load that failed half way
        self.params: list[Tensor] = []  # filled in place, because others hold on to this list
        self.gradients: Gradients = FullGradients(self.params)
        self.set_layout(params, layout)

    def forget_gradients(self) -> None:
        """Note that the gradients have been used or thrown away."""
        self.gradients.forget()
        self.reduced_shards.clear()
        self._probes = []

    def forget_accumulated(self) -> None:
        """Note that no gradient is left on which a later backward pass could build."""
        self.forget_gradients()
        self.gradients.forget_accumulated()
        self.params_with_reduced_grad.clear()

    def note_reduce_scattered(self) -> None:
        """Note that a hook has given every owner its gradients, which are in ``reduced``."""
        self.gradients.is_reduce_scattered = True
        self.params_with_reduced_grad = {id(param) for param in self.params}
        self._probes = []
        if self.collectives.control_device.type == "cpu" and in_backward():
            after_backward(self._probe)  # when DDP has put them into param.grad

    def note_scaled(self) -> None:
        """Note that this rank's part of the gradients was multiplied by what all ranks agree on."""
        self._probes = []

    def _probe(self) -> None:
        self._probes = remember(self._probe_params, self.params)

    def set_layout(self, params: Sequence[Tensor], layout: Layout) -> None:
        """Take over these parameters and this layout; storage and transfers are planned anew."""
        # First what needs memory: if that fails, parameters may lie elsewhere, and everything else is as it was.
        storage = self._storage_class(params, layout)
        sharing = ParameterSync(self.collectives, storage.pieces, storage.direct_bytes)
        self.params[:] = params
        self.layout = layout
        self._layout_digest = layout.digest()
        self._probe_params = probed_params(layout)
        self.storage, self.param_sync = storage, sharing
        self.inner.repoint(storage.flats)

    def take_over(
        self, layout: Layout, local: InnerOptimizer, storage_class: MakeStorage, gradients: Gradients
    ) -> None:
        """Go on with another layout of the same parameters, and all that depends on it."""
        self.inner, self._storage_class, self.gradients = local, storage_class, gradients
        self.set_layout(list(self.params), layout)

    def follow_moved_params(self) -> None:
        """Notice parameters whose memory was moved, and follow; refuse where the state could not."""
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
        """Raise if no step may be made, or if someone has changed which parameters the groups hold."""
        if self.step_refusal is not None:
            raise self.step_refusal
        listed = self.inner.listed
        given = chain.from_iterable(group["params"] for group in groups)
        if [len(group["params"]) for group in groups] != list(map(len, listed)) or not all(
            map(is_, given, chain.from_iterable(listed))
        ):
            raise RuntimeError(
                "the parameters of param_groups were edited by hand; use add_param_group() or construct a new optimizer"
            )

    @profiled("onecopy.update")
    def update(
        self,
        groups: Sequence[Group],
        closure: Callable[[], Any] | None,
        kwargs: dict[str, Any],
        gradient_shards: Mapping[int, Tensor] | None = None,
    ) -> Any:
        """Step the inner optimizer over what this rank owns, with the parameters' gradients or lent ones.

        Returns the loss, if there is a closure.
        """
        self.check_groups(groups)
        self.inner.push_options(groups)
        self.inner.copies.refresh_from_params()
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
            self.inner.bind_gradients(self.layout, self.gradients.owned_shards())
            return last_loss

        try:
            if callable(closure):
                loss = self.inner.step(evaluate, kwargs)
            else:
                self.inner.bind_gradients(
                    self.layout, self.gradients.owned_shards() if gradient_shards is None else gradient_shards
                )
                loss = self.inner.step(closure, kwargs)
        finally:
            self.inner.release_gradients()
        return last_loss if loss is None else loss

    def update_some(self, chosen: Sequence[bool]) -> None:
        """Step the inner optimizer over this rank's part of some parameters only, with their own gradients."""
        ranges = {}
        for owned in self.inner.owned:
            gradient = owned.param.grad
            if chosen[owned.shard.param] and gradient is not None:
                ranges[owned.shard.param] = flat_like(gradient, owned.param)[owned.shard.start : owned.shard.stop]
        self.inner.step_on(ranges)

    def confirm_and_share(
        self, groups: Sequence[Group], has_gradient: Sequence[bool] | None, failure: Exception | None
    ) -> None:
        """The end of every driver: confirm, share (all parameters if ``has_gradient`` is None), take over options."""
        self.confirm(groups, [True] * len(self.params) if has_gradient is None else has_gradient, failure)
        self.share(has_gradient)
        if failure is not None:
            raise failure
        self.inner.pull_options(groups)

    @profiled("onecopy.confirm")
    def confirm(self, groups: Sequence[Group], has_gradient: Sequence[bool], failure: Exception | None) -> None:
        """Raise on all ranks if one has failed or if they differ, before parameters travel."""
        factor = common_factor(self._probes, self.params) if self._probes else UNKNOWN
        facts = StepFacts(self.layout, self._layout_digest, has_gradient, groups)
        self._status.exchange(facts, factor, failure)

    def allow_steps(self) -> None:
        """Note that a load has succeeded: steps may be made again, and no old failure is heard of any more."""
        self.step_refusal = None
        self._status.forget()

    def clear_status(self) -> None:
        """Note that all ranks have heard of a failure in this step."""
        self._status.forget()

    @property
    def defers_status(self) -> bool:
        """Whether ranks that differ in their gradients learn of it only after a step has sent parameters."""
        return self._status.late

    @profiled("onecopy.share")
    def share(self, has_gradient: Sequence[bool] | None = None) -> None:
        """Make all replicas equal again; with ``has_gradient``, where only those parameters can have changed."""
        # What is sent may depend on the gradients only where the ranks have already agreed on them.
        everything = has_gradient is None or self.inner.moves_all or self._status.late or all(has_gradient)
        self.param_sync.share(None if everything else has_gradient)
        # Received values and aliases are written behind autograd's back, and torch's fused optimizers write unseen. The
        # version counter makes a backward pass that still needs the old values raise, on all ranks alike.
        changed = (
            self.params
            if everything or has_gradient is None
            else [param for param, has in zip(self.params, has_gradient, strict=True) if has]
        )
        if changed:
            increment_version(changed)


def sequential_step(
    engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
) -> Any:
    """The ordinary driver: update, confirm, share, one after the other.

    A rank that fails in its update still takes part in the confirmation, which makes every rank raise. An exception
    of the closure is passed on at once: other ranks may be in the middle of its own collectives.
    """
    loss, failure = None, None
    try:
        engine.follow_moved_params()
        loss = engine.update(groups, closure, kwargs)
    except ClosureError as error:
        raise error.original from None
    except Exception as error:
        failure = error
    engine.confirm_and_share(groups, engine.gradients.has_gradient(), failure)
    engine.forget_gradients()
    return loss


def reshare(engine: Engine, groups: Sequence[Group], change: Callable[[], object]) -> None:
    """Run something that changes the owned parameters outside a step, then make all replicas equal again."""
    failure = None
    try:
        engine.follow_moved_params()
        engine.inner.push_options(groups)
        engine.inner.copies.refresh_from_params()
        with torch.no_grad():
            change()
        engine.inner.copies.write_to_params(everything=True)
    except Exception as error:
        failure = error
    engine.confirm_and_share(groups, None, failure)


def collectives_of(optimizers: Sequence[object]) -> Collectives:
    """The ranks to agree with: those of the first of our optimizers, or all if there is none. Checks nothing."""
    for optimizer in optimizers:
        engine = getattr(optimizer, "engine", None)
        if isinstance(engine, Engine):
            return engine.collectives
    return Collectives()
