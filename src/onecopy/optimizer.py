"""``ZeroRedundancyOptimizer``: a thin face that torch users already know, over the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from onecopy.comm.agreement import Fact, agree, together
from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import flat_views
from onecopy.common.tagged_json import copy_tree
from onecopy.common.torch_private import in_join_context, register_as_torch_zero
from onecopy.ddp_hooks.overlapped_step import OverlappedStep, check_step_arguments
from onecopy.layout import Layout, ShardBy, extend
from onecopy.state_dict.gather import Consolidated, consolidated
from onecopy.state_dict.load import load
from onecopy.step.debug_log import log_layout
from onecopy.step.engine import Engine, StepSchedule, change_and_share, sequential_step
from onecopy.step.gradient_norm import clip, total_norm
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.join import ZeROJoinHook, active_step, joined_step
from onecopy.step.master_weights import STATE_DICT_KEY, MasterWeightPolicy
from onecopy.step.optimizer_classes import check_class, is_elementwise
from onecopy.step.owned_shards import param_or_view, separate_view
from onecopy.step.owned_state import OptimizerOverOwned, OwnedState
from onecopy.step.parameter_groups import normalise, normalise_group, plan_params
from onecopy.step.parameter_storage import BucketStorage, InPlaceStorage
from onecopy.step.rank_comparison import optimizer_facts, sharding_facts

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(OptimizerOverOwned, Joinable):
    r"""Wraps an optimizer class and keeps one copy of its state across all data-parallel ranks.

    Each rank's :attr:`optim`, an ordinary instance of ``optimizer_class``, updates about ``1 / world_size`` of the
    elements and holds the state for those only. After each step the new values are sent to all ranks, so that all
    replicas are equal. Constructing, adding a group, loading and consolidating are calls that all ranks of the group
    make together; they compare what they were given first, and if one rank fails all of them raise.

    Example::

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)

    Args:
        params: tensors, ``(name, tensor)`` pairs, or dicts of parameter groups, as every torch optimizer takes.
        optimizer_class: the class to shard. It must not combine several parameters in one update (LBFGS, Prodigy).
        process_group: the ranks that share the state (default: all).
        parameters_as_bucket_view: keep whole parameters in flat buckets, so that sending them needs no copy. Otherwise
            ``param.data`` stays where it is, and small parameters are packed for the way.
        overlap_with_ddp: step inside the backward pass, through a DDP communication hook.
        shard_by: who owns what. ``"parameter"`` gives whole parameters, largest first, to the least-loaded rank, and
            cuts as few as it takes to balance the ranks (none if the optimizer is not known to work element by
            element); ``"element"`` cuts every parameter evenly; or a function from
            :class:`~onecopy.ParamSpec` s and the world size to one owner per parameter.
        elementwise: whether the update of an element depends on that element alone. Known for torch's own classes;
            an unknown class keeps whole parameters unless this says otherwise.
        master_weights: step float32 copies of parameters that are bf16 or fp16. A copy exists on its owner only.
        offload: ``"cpu"`` keeps the state of parameters that are elsewhere in CPU memory, and updates them there.
        **defaults: the options of ``optimizer_class``.

    Attributes:
        optim: this rank's instance of ``optimizer_class``.
        process_group: the ranks that share the state.
        world_size: how many ranks there are.
        rank, global_rank: this rank in the group, and among all.
        parameters_as_bucket_view, overlap_with_ddp: as given.
        splittable: whether parameters may be cut, because the class works element by element.
        overlap: what steps inside the backward pass, once a hook has been made for this optimizer.
        step_schedule: the function that ``step()`` calls outside a join context.
        wait_for_transfers: waits for parameters in flight, once ShardedDataParallel has taken this optimizer over.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Any | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        shard_by: ShardBy = "parameter",
        elementwise: bool | None = None,
        master_weights: bool = False,
        offload: str | None = None,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        collectives = Collectives(process_group)
        register_as_torch_zero(ZeroRedundancyOptimizer)
        failure: Exception | None = None
        facts: list[Fact] = []
        has_state = False
        try:
            check_class(optimizer_class, ZeroRedundancyOptimizer)
            if offload not in (None, "cpu"):
                raise ValueError(f"offload must be None or 'cpu', got {offload!r}")
            groups = normalise(params)
            tensors, specs = plan_params(groups)
            Optimizer.__init__(self, groups, defaults)
            Joinable.__init__(self)
            self._shard_by = shard_by
            self.splittable = is_elementwise(optimizer_class, elementwise)
            layout = extend(None, specs, collectives.world_size, shard_by, self.splittable)
            local = InnerOptimizer(
                optimizer_class,
                defaults,
                self.param_groups,
                layout,
                tensors,
                flat_views(tensors),
                collectives.group_rank,
                separate_view if overlap_with_ddp else param_or_view,
                MasterWeightPolicy(master_weights, offload == "cpu"),
            )
            local.pull_all_options(self.param_groups)
            has_state = bool(local.optim.state)
            facts = optimizer_facts(
                optimizer_class,
                layout,
                shard_by,
                self.param_groups,
                parameters_as_bucket_view=parameters_as_bucket_view,
                overlap_with_ddp=overlap_with_ddp,
                master_weights=master_weights,
                offload=offload,
            )
        except Exception as error:
            failure = error
        # Until here nothing was sent and no parameter was touched.
        local.has_state = agree(collectives, "constructing the optimizer", facts, failure, flag=has_state)
        if parameters_as_bucket_view and overlap_with_ddp:
            logger.warning("parameters_as_bucket_view=True is ignored: overlap_with_ddp=True sends DDP's buckets")
        storage_class = BucketStorage if parameters_as_bucket_view and not overlap_with_ddp else InPlaceStorage
        self.engine = engine = together(
            collectives,
            "constructing the optimizer",
            lambda: Engine(collectives, tensors, layout, local, storage_class),
        )
        self.step_schedule: StepSchedule = sequential_step
        self.wait_for_transfers: Callable[[], None] | None = None
        self.overlap_with_ddp = overlap_with_ddp
        self.overlap: OverlappedStep | None = None
        # A GradScaler that sees this announces itself to step(), which then refuses it instead of training wrongly.
        self._step_supports_amp_scaling = overlap_with_ddp
        self._consolidated: Consolidated | None = None
        self._all_params: list[Tensor] = self.engine.params
        self.defaults = local.optim.defaults
        self._shown_state = OwnedState(lambda: engine.inner)
        self.process_group: Any = collectives.process_group
        self.world_size: int = collectives.world_size
        self.rank: int = collectives.group_rank
        self.global_rank: int = collectives.global_rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.initialized = True
        log_layout(self.engine)

    @property
    def optim(self) -> Optimizer:
        """This rank's instance of the optimizer class."""
        return self.engine.inner.optim

    @property
    def layout(self) -> Layout:
        """Who owns what; print it for a table."""
        return self.engine.layout

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Update what this rank owns and make all replicas equal.

        Args:
            closure: re-evaluates the model and returns the loss.
            **kwargs: passed on to the inner optimizer's ``step``.

        Returns:
            The closure's loss, or None without one.

        Raises:
            RanksDisagreeError: if ranks have gradients for different parameters, differ in their layout, or (on gloo)
                are at different calls. What this rank owns may have been updated.
            PeerFailedError: if another rank's inner ``step`` failed; that rank raises its own error. Owned parameters
                may then have been updated without having been shared: load a checkpoint before going on.
        """
        if self.overlap_with_ddp:
            check_step_arguments(self.__dict__, closure, kwargs)
        in_join = in_join_context(self)
        if in_join:
            self.wait()
            Join.notify_join_context(self)
        if self.overlap is not None:
            self.overlap.step_was_called = True
            if self.overlap.finish_step(self.param_groups):
                return None
        step_schedule = active_step if in_join else self.step_schedule
        loss: float | None = step_schedule(self.engine, self.param_groups, closure, kwargs)
        return loss

    def wait(self) -> None:
        """Wait until this replica is up to date, which ``ShardedDataParallel(overlap_forward=True)`` leaves for later.

        Call it before reading parameters outside the model's forward.
        """
        if self.wait_for_transfers is not None:
            self.wait_for_transfers()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters.

        Args:
            set_to_none: set them to None instead of zero.
        """
        self.engine.clear_accumulated()
        super().zero_grad(set_to_none)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, from what each rank owns; right also after the reduce-scatter hook.

        All ranks make this call together.

        Args:
            norm_type: the order of the norm, or infinity.
        """
        return total_norm([self.engine], norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm they had.

        All ranks make this call together. For several optimizers over one model: :func:`onecopy.clip_grad_norm_`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the order of the norm, or infinity.
            error_if_nonfinite: raise if the norm is infinite or not a number.
        """
        return clip([self.engine], max_norm, norm_type, error_if_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; ownership of what is there already does not move.

        All ranks make this call together. If one of them fails, all raise and nothing has changed anywhere.

        Args:
            param_group: a dict with ``params`` and the group's options.
        """
        if not self.initialized:
            super().add_param_group(param_group)  # torch's constructor adds the first groups through this method
            return
        if self.wait_for_transfers is not None:
            raise RuntimeError("a group cannot be added to an optimizer that ShardedDataParallel has taken over")
        engine, known = self.engine, len(self.param_groups)
        before = list(engine.params), engine.layout
        failure: Exception | None = None
        facts: list[Fact] = []
        try:
            group = normalise_group(param_group, known)
            tensors, specs = plan_params([*self.param_groups, group])
            layout = extend(
                engine.layout, specs[len(engine.params) :], self.world_size, self._shard_by, self.splittable
            )
            engine.inner.push_options(self.param_groups)
            super().add_param_group(group)
            engine.inner.add_group(group, layout, tensors, flat_views(tensors))
            facts = sharding_facts(layout, self._shard_by, self.param_groups, self.optim.param_groups)
        except Exception as error:
            failure = error
        try:
            has_state = agree(engine.collectives, "add_param_group()", facts, failure, flag=bool(self.optim.state))
            together(engine.collectives, "add_param_group()", lambda: engine.set_layout(tensors, layout))
        except Exception:
            del self.param_groups[known:]
            engine.inner.keep_groups(known, before[1])
            if engine.layout is not before[1]:
                engine.set_layout(*before)
            raise
        engine.inner.pull_options(self.param_groups)
        engine.inner.has_state = engine.inner.has_state or has_state
        self._consolidated = None
        log_layout(engine)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on one of them, as tensors on the CPU, for :meth:`state_dict` there.

        All ranks make this call together. A step, a load or a new group makes the result stale, which counts as none.

        Args:
            to: the group rank that receives the state.

        Raises:
            ValueError: if there is no such rank.
            TypeError: if the state holds something other than plain data and tensors.
            RanksDisagreeError: if ranks differ in options, or in state under keys that are not parameters.
        """
        self._consolidated = None
        self._consolidated = consolidated(self.engine, self.param_groups, to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer's state dict, exactly as the plain optimizer's would be; never communicates.

        Master weights come in an entry of their own, ``master_weights``, by the parameter's position.

        Raises:
            RuntimeError: if there is state that was not consolidated on this rank since it last changed.
        """
        local, held = self.engine.inner, self._consolidated or Consolidated({}, {}, -1)
        if held.version != local.version and (local.has_state or local.uses_master_weights):
            raise RuntimeError(
                f"rank {self.rank} does not hold the whole optimizer state, or no longer the current one: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks first, and state_dict() on that rank (with "
                "torch.distributed.checkpoint: onecopy.checkpoint.get_optimizer_state_dict)"
            )
        live, self._shown_state = self._shown_state, copy_tree(held.by_param)
        try:
            return super().state_dict() | ({STATE_DICT_KEY: copy_tree(held.masters)} if held.masters else {})
        finally:
            self._shown_state = live

    def sharded_state_dict(self, to_load: bool = False) -> dict[str, Any]:
        """What this rank owns of the state, by name, for torch.distributed.checkpoint to save, load and reshard.

        Names are those of ``named_parameters()`` if the optimizer was given that. See
        :func:`onecopy.checkpoint.get_optimizer_state_dict` for a model's names, and for how it is put back.

        Args:
            to_load: give parameters that have no state yet memory to load it into; the optimizer is left as it is.
        """
        from onecopy.state_dict.dcp_tensor import sharded_state_dict  # needs torch.distributed.checkpoint

        names = [spec.name for spec in self.layout.params]
        return sharded_state_dict(self.engine.inner, self.layout, self.param_groups, names, to_load)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the plain optimizer or of this class, saved with any number of ranks and any policy.

        All ranks make this call together, with the whole state dict; each copies what it owns, and the caller's dict
        is left as it is. If a rank refuses, all raise and nothing has changed anywhere. If a hook that runs after the
        load fails on a rank, all raise too, and the state has been loaded.

        Args:
            state_dict: an optimizer's state dict.
        """
        load(self.engine, self, state_dict, self.splittable)
        self._consolidated = None

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002 - torch passes what other joinables need
        """Return the hook with which a rank that has run out of inputs goes on serving its shard.

        Args:
            **kwargs: not used; shared with the other joinables.
        """

        def serve() -> None:
            self.wait()
            if self.overlap is None or not self.overlap.finish_step(self.param_groups):
                joined_step(self.engine, self.param_groups)

        return ZeROJoinHook(serve, self.engine, lambda: self.param_groups)

    @property
    def join_device(self) -> torch.device:
        """The device for the join context's own communication."""
        return self.engine.collectives.control_device

    @property
    def join_process_group(self) -> Any:
        """The process group for the join context's own communication."""
        return self.process_group

    def __getattr__(self, name: str) -> Any:
        """Forward ``train`` and ``eval`` of inner optimizers that have them (schedule-free ones); share afterwards."""
        if name in ("train", "eval") and "engine" in self.__dict__ and callable(getattr(self.optim, name, None)):
            return lambda: change_and_share(self.engine, self.param_groups, getattr(self.optim, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or deep-copied."""
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled or deep-copied: it belongs to a process group and holds only "
            "this rank's share; save consolidate_state_dict() + state_dict(), and construct a new one"
        )

    @property
    def _overlap_with_ddp(self) -> NoReturn:
        """What torch's hooks ask first; they would go on to call what only torch's class has."""
        raise ValueError(
            "torch's hooks go with torch's class: use onecopy.hook_with_zero_step or "
            "onecopy.hook_with_zero_step_interleaved with a onecopy.ZeroRedundancyOptimizer"
        )
