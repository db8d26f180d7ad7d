"""``ZeroRedundancyOptimizer``: the public optimizer class; it checks arguments and delegates to the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from onecopy.comm.agreement import FailTogether, FirstFailure
from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import flat_views
from onecopy.common.nested_tensors import copy_tree
from onecopy.common.torch_private import in_join_context, not_compiled, register_as_torch_zero
from onecopy.ddp_hooks.overlap import OverlappedStep, check_step_arguments
from onecopy.layout import CostFunction, ShardBy, extend
from onecopy.state_dict.gather import Consolidated, StateElsewhere, consolidated
from onecopy.state_dict.load import load
from onecopy.step.consistency import optimizer_facts, sharding_facts
from onecopy.step.engine import Engine, StepSchedule, change_and_share, restored_on_failure, sequential_step
from onecopy.step.gradients import param_or_view, separate_view
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.join import JOIN_REFUSAL, ZeROJoinHook, active_step, joined_step
from onecopy.step.master_weights import MasterWeightPolicy
from onecopy.step.nonfinite import NonfiniteGuard, check_guards
from onecopy.step.norms import clip, total_norm
from onecopy.step.optimizer_classes import check_class, is_elementwise
from onecopy.step.owned_state import OwnedState, OwnedStateOptimizer
from onecopy.step.parameter_groups import Group, device_of, normalise, normalise_group, options_of, plan_params
from onecopy.step.several_classes import OptimizerClasses
from onecopy.step.storage import storage_class_for


class ZeroRedundancyOptimizer(OwnedStateOptimizer, Joinable):
    r"""Shards the state of any optimizer class across the data-parallel ranks.

    Each rank's :attr:`optim`, an ordinary instance of ``optimizer_class``, updates about ``1 / world_size`` of the
    elements and has optimizer state for these elements only. After each update the owners send the updated parameters
    to all ranks, so that all replicas are equal.

    All ranks of the process group make these calls together, with the same arguments: constructing, ``step()``,
    ``grad_norm()``, ``clip_grad_norm_()``, ``add_param_group()``, ``load_state_dict()``, ``consolidate_state_dict()``,
    and ``train()`` and ``eval()`` if ``optimizer_class`` has them. If a call fails on one rank, it raises on all ranks.
    One rank calls ``state_dict()`` alone, after ``consolidate_state_dict()`` on all ranks.

    Example::

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    A parameter group may name a class of its own under ``optimizer_class``; the others are of the constructor's class::

        matrices = {"params": hidden_weights, "optimizer_class": torch.optim.Muon, "lr": 0.02}
        optimizer = ZeroRedundancyOptimizer([matrices, {"params": others}], torch.optim.AdamW, lr=3e-4)

    Then all groups have the name of their class, also in the state dict. :func:`onecopy.split_state_dict` and
    :func:`onecopy.join_state_dicts` convert it to the state dicts of plain optimizers and back.

    Args:
        params: tensors, ``(name, tensor)`` pairs, or dicts of parameter groups, as every torch optimizer takes.
        optimizer_class: the class to shard. It must not combine several parameters in one update (LBFGS, Prodigy).
        process_group: the ranks that share the state (default: all).
        parameters_as_bucket_view: store parameters in flat buckets, so that sending them needs no copy. Otherwise
            ``param.data`` is not moved, and small parameters are packed into buffers to be sent.
        overlap_with_ddp: update inside the backward pass, through a DDP communication hook.
        shard_by: how parameters are divided among ranks. ``"element"`` cuts every parameter evenly, and is the default
            for groups whose class is known to work element by element. ``"parameter"``, the default for others, gives
            whole parameters, largest first, to the least-loaded rank. A function takes a list of
            :class:`~onecopy.ParamSpec` and the world size, and returns one owner per parameter.
        elementwise: whether the update of an element depends on that element alone, in ``optimizer_class``. Known for
            torch's own classes. Parameters of an unknown class are not cut unless this is True.
        cost: the cost of an update of a parameter as a function of its shape. Ranks get about equal costs of parameters
            that stay whole. By default it is that of the Newton-Schulz iteration for Muon, and the number of elements
            for other classes.
        master_weights: update fp32 copies of bf16 and fp16 parameters. Only the owner has a copy.
        offload: ``"cpu"`` stores the state of parameters on other devices in CPU memory, and updates them there.
        nonfinite: if a gradient has an infinity or a NaN, ``step()`` raises on all ranks (``"raise"``) or does nothing
            on any (``"skip"``). By default it updates.
        check_replicas_every: compare the parameters of all ranks bit by bit before every so many steps.
        **defaults: the options of ``optimizer_class``. Groups of another class have the defaults of that class.

    Attributes:
        optim: this rank's instance of ``optimizer_class``; with several classes, one optimizer made of theirs, with the
            ``param_groups`` and the ``state`` of all.
        process_group: the ranks that share the state.
        world_size: the number of ranks in the group.
        rank, global_rank: this rank's number in the group, and among all ranks.
        parameters_as_bucket_view, overlap_with_ddp: as given.
        splittable: whether parameters of the groups of ``optimizer_class`` may be cut, because it works element by
            element.
        overlap: runs the update inside the backward pass; None before an overlap hook has been made.
        step_schedule: the function that ``step()`` calls outside a join context.
        wait_for_transfers: waits for parameters in flight; None without ShardedDataParallel.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer] = Optimizer,  # refused, with the line to write
        process_group: Any | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        shard_by: ShardBy | None = None,
        elementwise: bool | None = None,
        cost: CostFunction | None = None,
        master_weights: bool = False,
        offload: str | None = None,
        nonfinite: str | None = None,
        check_replicas_every: int | None = None,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        given, groups = FirstFailure(), list[Group]()
        with given:
            groups = normalise(params)
        # The ranks exchange control data on the device of the parameters.
        collectives = Collectives(process_group, device_of(groups))
        with FailTogether(collectives, "constructing the optimizer") as together:
            given.raise_if_any()
            check_class(optimizer_class, ZeroRedundancyOptimizer)
            check_guards(nonfinite, check_replicas_every, overlap_with_ddp)
            if cost is not None and not callable(cost):
                raise TypeError(f"cost must be a function of a shape, got {cost!r}")
            self.splittable = is_elementwise(optimizer_class, elementwise)
            classes = OptimizerClasses(optimizer_class, defaults, elementwise, cost)
            classes = classes.with_groups(groups, 0, ZeroRedundancyOptimizer)
            tensors, specs = plan_params(groups)
            classes.check_shapes(groups, specs)
            specs = classes.with_costs(groups, specs)
            Optimizer.__init__(self, groups, {})  # the inner optimizer sets the defaults of each group's class
            Joinable.__init__(self)
            self._shard_by = shard_by
            layout = extend(None, specs, collectives.world_size, shard_by, classes.splittable(groups))
            flats, group_rank = flat_views(tensors), collectives.group_rank
            stepped = separate_view if overlap_with_ddp else param_or_view
            masters = MasterWeightPolicy.of_arguments(master_weights, offload)
            inner = InnerOptimizer(classes, self.param_groups, layout, tensors, flats, group_rank, stepped, masters)
            inner.pull_all_options(self.param_groups)
            together.flag = bool(inner.optim.state)
            together.facts = optimizer_facts(
                optimizer_class,
                layout,
                shard_by,
                self.param_groups,
                parameters_as_bucket_view=parameters_as_bucket_view,
                overlap_with_ddp=overlap_with_ddp,
                master_weights=master_weights,
                offload=offload,
                nonfinite=nonfinite,
                check_replicas_every=check_replicas_every,
            )
        # Until here no parameter was changed.
        inner.has_state = together.any_flag
        self.parameters_as_bucket_view, self.overlap_with_ddp = parameters_as_bucket_view, overlap_with_ddp
        storage_class = storage_class_for(parameters_as_bucket_view, overlap_with_ddp)
        with FailTogether(collectives, "constructing the optimizer"):
            self.engine = Engine(collectives, tensors, layout, inner, storage_class)
        self.engine.check_replicas_every = check_replicas_every
        if nonfinite is not None:
            self.engine.guard = NonfiniteGuard(nonfinite == "skip", collectives)
        self._set_attributes(self.engine)

    def _set_attributes(self, engine: Engine) -> None:
        """Set the attributes of a new optimizer that depend on its engine."""
        self.step_schedule: StepSchedule = sequential_step
        self.wait_for_transfers: Callable[[], None] | None = None
        self.overlap: OverlappedStep | None = None
        # With this set, a GradScaler passes its scale to step(), which then refuses it instead of training wrongly.
        self._step_supports_amp_scaling = self.overlap_with_ddp
        self._consolidated: Consolidated | None = None
        self._join_hook: weakref.ref[ZeROJoinHook] | None = None  # of the last join context
        self._all_params: list[Tensor] = engine.params
        self.defaults = engine.inner.optim.defaults
        self._shown_state = OwnedState(lambda: engine.inner)
        self.process_group: Any = engine.collectives.process_group
        self.world_size: int = engine.collectives.world_size
        self.rank: int = engine.collectives.group_rank
        self.global_rank: int = engine.collectives.global_rank
        self.initialized = True

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...

    @not_compiled
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Update this rank's shards and send the updated parameters to all ranks.

        Args:
            closure: re-evaluates the model and returns the loss.
            **kwargs: arguments for the inner optimizer's ``step``.

        Returns:
            The closure's loss, or None without a closure.

        Raises:
            RanksDisagreeError: if ranks have gradients for different parameters, differ in their layout, or (on gloo)
                are in different calls. This rank's shards may have been updated.
            NonfiniteError: with ``nonfinite="raise"``, if a gradient is not finite. Nothing has changed.
            PeerFailedError: if another rank's inner ``step`` failed; that rank raises its own error. Shards may have
                been updated on their owners and not sent to the other ranks: load a checkpoint before going on.
        """
        if self.overlap_with_ddp:
            check_step_arguments(self.__dict__, closure, kwargs)
        in_join = in_join_context(self)
        if in_join:
            hook = None if self._join_hook is None else self._join_hook()
            if hook is not None:
                hook.check_step()
            with self.engine.collectives.explained_errors("step() in a join context"):
                Join.notify_join_context(self)
        self.engine.check_replicas(self.wait)
        if self.overlap is not None:
            self.overlap.step_was_called = True
            if self.overlap.finish_step(self.param_groups):
                return None
        step_schedule = active_step if in_join else self.step_schedule
        loss: float | None = step_schedule(self.engine, self.param_groups, closure, kwargs)
        return loss

    def wait(self) -> None:
        """Wait for updated parameters that are still in flight to this rank.

        With ``ShardedDataParallel(overlap_forward=True)``, ``step()`` returns before all parameters have arrived. Call
        this before reading parameters outside the model's forward.
        """
        if self.wait_for_transfers is not None:
            self.wait_for_transfers()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all parameters, also after the reduce-scatter hook.

        All ranks make this call together.

        Args:
            norm_type: the order of the norm, or infinity.
        """
        return total_norm([self.engine], norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``.

        All ranks make this call together. For several optimizers over one model use :func:`onecopy.clip_grad_norm_`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the order of the norm, or infinity.
            error_if_nonfinite: raise if the norm is infinite or not a number.

        Returns:
            The norm before scaling.
        """
        return clip([self.engine], max_norm, norm_type, error_if_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; shards of earlier groups stay on their owners.

        All ranks make this call together. If it fails on one rank, it raises on all ranks and nothing has changed.

        Args:
            param_group: a dict with ``params`` and the group's options, among them ``optimizer_class``.
        """
        if not self.initialized:
            super().add_param_group(param_group)  # torch's constructor adds the first groups through this method
            return
        if self.wait_for_transfers is not None:
            raise RuntimeError("a group cannot be added to an optimizer that ShardedDataParallel has taken over")
        engine = self.engine
        with restored_on_failure([engine], others=[self], lists=[self.param_groups]):
            with FailTogether(engine.collectives, "add_param_group()") as together:
                group = normalise_group(param_group, len(self.param_groups))
                groups = [*self.param_groups, group]
                classes = engine.inner.classes.with_groups([group], len(self.param_groups), ZeroRedundancyOptimizer)
                tensors, specs = plan_params(groups)
                new_specs = classes.with_costs(groups, specs[len(engine.params) :])
                classes.check_shapes(groups, new_specs)
                layout = extend(engine.layout, new_specs, self.world_size, self._shard_by, classes.splittable(groups))
                engine.inner.push_options(self.param_groups)
                engine.inner.add_group(group, classes, layout, tensors, flat_views(tensors))
                # With all options set, torch adds no defaults, which may be those of another class.
                self.defaults = self.optim.defaults
                super().add_param_group({**options_of(self.optim.param_groups[-1]), **group})
                together.flag = bool(self.optim.state)
                together.facts = sharding_facts(layout, self._shard_by, self.param_groups, self.optim.param_groups)
            with restored_on_failure([], tensors), FailTogether(engine.collectives, "add_param_group()"):
                engine.set_layout(tensors, layout)
        engine.inner.pull_options(self.param_groups)
        engine.inner.has_state = engine.inner.has_state or together.any_flag
        self._consolidated = None

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on one rank, as CPU tensors, for :meth:`state_dict` on that rank.

        All ranks make this call together. After a step, a load or a new group the state must be gathered again.

        Args:
            to: the group rank that receives the state.

        Raises:
            ValueError: if ``to`` is not a rank of the group.
            TypeError: if the state contains objects other than plain data and tensors.
            RanksDisagreeError: if ranks differ in options, or in state under keys that are not parameters.
        """
        self._consolidated = None
        self._consolidated = consolidated(self.engine, self.param_groups, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, in the format of the plain optimizer's state dict.

        This call does not communicate: :meth:`consolidate_state_dict` has gathered the state on this rank. On the other
        ranks ``state`` raises when it is read. Before the first step the state is empty, on every rank. Master weights
        are in an entry ``master_weights``, by position of the parameter, and averages in an entry ``averages``.

        Raises:
            RuntimeError: if the state was not gathered since the last step, load or edit of the state.
        """
        inner, gathered = self.engine.inner, self._consolidated
        if not (inner.has_state or inner.uses_master_weights):
            return self._plain_form({})
        if gathered is None or gathered.version != inner.version:
            raise RuntimeError(
                self._not_gathered("was not gathered" if gathered is None else "has changed since it was gathered")
            )
        if not gathered.is_here:
            return self._plain_form({}) | {"state": StateElsewhere(self._not_gathered("was gathered on another rank"))}
        extras: dict[str, Any] = copy_tree(gathered.extras)
        return self._plain_form(gathered.by_param) | extras

    def _not_gathered(self, reason: str) -> str:
        """The text of the error of ``state_dict()``: the line to write, and where."""
        return (
            f"rank {self.rank}: the optimizer state of all ranks {reason}. Add this line, which gathers it on rank 0 "
            "(on another one with to=): `optimizer.consolidate_state_dict()  # on all ranks, before state_dict()`. Or "
            "save with onecopy.checkpoint.save, which gathers nothing (with torch.distributed.checkpoint: "
            "onecopy.checkpoint.get_optimizer_state_dict)"
        )

    def _plain_form(self, by_param: dict[Any, Any]) -> dict[str, Any]:
        """Return torch's state dict of some state, with parameters by position."""
        owned_state, self._shown_state = self._shown_state, copy_tree(by_param)
        try:
            return super().state_dict()
        finally:
            self._shown_state = owned_state

    def sharded_state_dict(self, to_load: bool = False) -> dict[str, Any]:
        """Return the state of this rank's shards by name, for torch.distributed.checkpoint to save, load and reshard.

        Names come from ``named_parameters()`` if the optimizer was constructed with it. See
        :func:`onecopy.checkpoint.get_optimizer_state_dict` for a model's names, and for loading the result.

        Args:
            to_load: also return memory for parameters that have no state yet, without changing the optimizer.
        """
        from onecopy.state_dict.dcp import sharded_state_dict  # needs torch.distributed.checkpoint

        names = [spec.name for spec in self.layout.params]
        return sharded_state_dict(self.engine, self.param_groups, names, to_load)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the plain optimizer or of this class, saved with any world size and any ``shard_by``.

        All ranks make this call together, with the whole state dict. Each rank copies the state of its shards and does
        not change the given dict. If one rank refuses it, all ranks raise and nothing has changed. If a hook that runs
        after the load fails on one rank, all ranks raise, and the state has been loaded.

        Args:
            state_dict: an optimizer's state dict.
        """
        load(self.engine, self, state_dict)
        self._consolidated = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook with which a rank that has run out of inputs goes on updating its shards.

        Args:
            **kwargs: ``model``, the DDP model, so that no step follows its passes under ``no_sync()``; arguments of
                other joinables are not used.
        """
        if self.overlap_with_ddp or self.wait_for_transfers is not None:
            raise RuntimeError(JOIN_REFUSAL)

        def step_without_inputs() -> None:
            self.engine.check_replicas(self.wait)
            joined_step(self.engine, self.param_groups)

        hook = ZeROJoinHook(step_without_inputs, self.engine, lambda: self.param_groups, kwargs.get("model"))
        self._join_hook = weakref.ref(hook)
        return hook

    @property
    def join_device(self) -> torch.device:
        """The device of the join context's own collectives."""
        return self.engine.collectives.control_device

    @property
    def join_process_group(self) -> Any:
        """The process group of the join context's own collectives."""
        return self.process_group

    def __getattr__(self, name: str) -> Any:
        """Return ``train`` or ``eval`` of a schedule-free inner optimizer; a call sends the parameters it changes."""
        if name in ("train", "eval") and "engine" in self.__dict__ and callable(getattr(self.optim, name, None)):
            self.wait()  # parameters in flight would arrive after the change
            return lambda: change_and_share(self.engine, self.param_groups, getattr(self.optim, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


register_as_torch_zero(ZeroRedundancyOptimizer)
