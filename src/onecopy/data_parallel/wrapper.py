"""``ShardedDataParallel``: in place of DDP, with gradients and optimizer state sharded among the ranks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.comm.status_flags import DeferredFlags
from onecopy.common.nested_tensors import cast_floating, tensors_in
from onecopy.common.torch_private import accumulates_into_leaves, in_backward
from onecopy.data_parallel.backward import BackwardReducer
from onecopy.data_parallel.bucket import ReductionPolicy
from onecopy.data_parallel.construction import (
    AttachedOptimizer,
    MixedPrecision,
    OptimizerPlan,
    check_mixed_precision,
    check_module,
    check_optimizers,
    construction_facts,
    convert_params,
    params_to_convert,
    plan_optimizer,
    replicas_of,
    resolve_uses,
)
from onecopy.data_parallel.forward_wait import ForwardWaitHooks
from onecopy.data_parallel.module_sync import ModuleSync
from onecopy.data_parallel.step import PipelinedStep
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.state_dict.shards import WrapsModule
from onecopy.step.engine import Engine, collectives_of, restored_on_failure
from onecopy.step.join import JOIN_REFUSAL
from onecopy.step.norms import clip, total_norm
from onecopy.step.sharded_gradient import GradientGroup

_CONSTRUCTING = "constructing ShardedDataParallel"


class ShardedDataParallel(nn.Module, WrapsModule):
    r"""Trains a replica of ``module`` on every rank, and keeps 1/N of gradients and optimizer state on each.

    It replaces DistributedDataParallel. Parameters stay plain tensors in flat buckets. The backward pass reduces each
    bucket's gradients to their owners and then releases them. ``optimizer.step()`` updates this rank's shards and
    shares them. After ``backward()`` a ``param.grad`` shows this rank's range only.

    Example::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        model = ShardedDataParallel(model, optimizer)

    Args:
        module: the model; all ranks begin with the parameters and buffers of rank 0.
        optimizer: a :class:`ZeroRedundancyOptimizer` that has not stepped yet, or several; together they must have
            every parameter of the module that needs a gradient.
        broadcast_buffers: broadcast the buffers of rank 0 before the forward passes before which DDP does.
        bucket_bytes: the size from which a bucket is full; the last ones are smaller, one parameter may be larger. By
            default 8 MB on gloo, and with other backends 64 MB or more, growing with the number of ranks.
        overlap_forward: let ``step()`` return while parameters are in flight; each submodule waits for its own
            parameters just before its forward. Read :attr:`uses` first.
        uses: with ``overlap_forward``, parameters or submodules that a submodule reads beside its own, by name, such as
            ``{"head": ["embed.weight"]}``; the empty name is the module itself.
        mixed_precision: the types to compute and communicate in.
        mesh: a mesh of (replicate, shard): gradients and state are sharded along the second dimension, whose group the
            optimizers must be on, and gradients are reduced over both.

    Attributes:
        module: as given.
        mixed_precision: as given, or the default.
        require_backward_grad_sync: whether backward passes reduce, as in DDP.
        process_group: the optimizers' group, whose ranks share gradients and state.
        device: the device of the module's first parameter.
        device_type: the type of that device, such as ``"cpu"``.
        is_multi_device_module: whether the module has parameters on several devices.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
        *,
        broadcast_buffers: bool = True,
        bucket_bytes: int | None = None,
        overlap_forward: bool = False,
        uses: Mapping[str, Sequence[str]] | None = None,
        mixed_precision: MixedPrecision | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        nn.Module.__init__(self)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        collectives = collectives_of(optimizers)
        mixed_precision = mixed_precision or MixedPrecision()
        uses = uses or {}
        with FailTogether(collectives, _CONSTRUCTING) as together:
            # First of all, because the mesh determines the ranks that compare the other arguments.
            replicas = None if mesh is None else replicas_of(mesh, collectives)
            together.facts = [Fact("mesh", str(None if mesh is None else tuple(mesh.shape)))]
        # Compared inside the shard group first, then across replicas, so that all ranks of the mesh raise together.
        with FailTogether(replicas, _CONSTRUCTING) as across, FailTogether(collectives, _CONSTRUCTING) as together:
            check_optimizers(optimizers, collectives)
            check_mixed_precision(mixed_precision)
            check_module(module, optimizers)
            if bucket_bytes is None:
                bucket_bytes = collectives.bucket_bytes(next(module.parameters()).device)
            plans = [plan_optimizer(module, each, bucket_bytes, mixed_precision) for each in optimizers]
            if uses and not overlap_forward:
                raise ValueError("uses says what to wait for with overlap_forward=True, and means nothing without it")
            resolve_uses(module, uses)
            arguments = {
                "broadcast_buffers": bool(broadcast_buffers),
                "bucket_bytes": bucket_bytes,
                "overlap_forward": bool(overlap_forward),
                "uses": {name: list(used) for name, used in sorted(uses.items())},
                "mixed_precision": mixed_precision,
            }
            together.facts = across.facts = construction_facts(arguments, module, plans)
        self.module = module
        self.mixed_precision = mixed_precision
        self._collectives = collectives
        self._set_ddp_attributes()
        self._reduction_policy = ReductionPolicy(
            GradientGroup(collectives, module.parameters()), replicas, mixed_precision.reduce_dtype
        )
        self._module_sync = ModuleSync(module, broadcast_buffers, collectives, replicas)
        self._module_sync.broadcast_all()
        self._pipelines: list[tuple[ZeroRedundancyOptimizer, PipelinedStep]] = []
        self._deferred_flags = DeferredFlags()  # of backward passes and steps, in the order of their exchange
        attached = self._attach(plans)
        names = {id(param): name for name, param in module.named_parameters()}
        self._reducer = BackwardReducer(attached, names, self._reduction_policy, self._deferred_flags)
        for plan in plans:
            engine, is_only = plan.optimizer.engine, len(plans) == 1
            pipeline = PipelinedStep(engine, self._reducer, overlap_forward, is_only, replicas is not None)
            self._pipelines.append((plan.optimizer, pipeline))
            plan.optimizer.step_schedule, plan.optimizer.wait_for_transfers = pipeline.step, pipeline.wait
        pipelines = {
            id(param): (pipeline, index)
            for optimizer, pipeline in self._pipelines
            for index, param in enumerate(optimizer.engine.params)
        }
        self._wait_hooks = ForwardWaitHooks(module, pipelines, uses) if overlap_forward else None
        module.register_state_dict_pre_hook(functools.partial(_wait_before_state_dict, weakref.ref(self)))

    def _set_ddp_attributes(self) -> None:
        """Set the attributes that DDP has too, under the names it has them."""
        devices = list(dict.fromkeys(param.device for param in self.module.parameters()))
        self.process_group: Any = self._collectives.process_group
        self.device: torch.device = devices[0]
        self.device_type: str = devices[0].type
        self.is_multi_device_module: bool = len(devices) > 1
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True  # whether the last pass synchronises

    def _attach(self, plans: Sequence[OptimizerPlan]) -> list[AttachedOptimizer]:
        """Attach the optimizers. If a rank has no memory for its buckets, all ranks raise, and nothing has changed."""
        module, policy = self.module, self._reduction_policy
        to_convert = params_to_convert(module, self.mixed_precision)
        across, together = FailTogether(policy.replicas, _CONSTRUCTING), FailTogether(self._collectives, _CONSTRUCTING)
        engines = [plan.optimizer.engine for plan in plans]
        with restored_on_failure(engines, module.parameters()), across, together:
            attached = [AttachedOptimizer(plan, policy, to_convert, self.mixed_precision) for plan in plans]
            for engine in engines:
                engine.share_flags(self._deferred_flags, policy.replicas)
            convert_params(module.parameters(), to_convert, self.mixed_precision)  # parameters that no optimizer has
        return attached

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, after buffers are broadcast and failures of the last step are raised."""
        self._deferred_flags.check_arrived()
        if not in_backward():
            self._reducer.reset()
        if self._wait_hooks is not None:
            self._wait_hooks.before_forward()
        self._before_forward()
        dtype = self.mixed_precision.param_dtype
        if dtype is not None and self.mixed_precision.cast_inputs:
            inputs, kwargs = cast_floating(inputs, dtype), cast_floating(kwargs, dtype)
        output = self.module(*inputs, **kwargs)
        self._raise_deferred_failures()
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._watch_backward(output)
        return output

    def _before_forward(self) -> None:
        """Prepare the reducer for a pass with gradients, and broadcast buffers if the last pass synchronised."""
        buffers = self._module_sync.buffers_to_broadcast(self.require_forward_param_sync)
        if buffers:
            self._raise_deferred_failures()
        if torch.is_grad_enabled():
            self._reducer.attach_hooks()
            self._reducer.synchronises = self.require_backward_grad_sync
        self._module_sync.broadcast_buffers(buffers)

    def _raise_deferred_failures(self) -> None:
        """Before the ranks exchange anything: raise if the last step has failed on any rank.

        An accelerator is not waited for: the host does not wait in the exchange either, and the next step raises.
        """
        if self._collectives.defers_host_reads:
            self._deferred_flags.check_arrived()
        else:
            self._deferred_flags.check_all()

    def _watch_backward(self, output: Any) -> None:
        """Begin the reducer's pass with every ``backward()`` from the output, even if it reaches no parameter."""
        reducer = weakref.ref(self._reducer)
        found = list(tensors_in(output))
        tensors = [tensor for tensor in found if tensor.grad_fn is not None]
        if not found and output is not None and not isinstance(output, (int, float, str)):
            self._reducer.note_unfollowed(output)
        # Not the outputs' own nodes: a hook on an output that refers to its node would keep the output alive.
        producers = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        inner_nodes = [node for producer in producers for node, _ in producer.next_functions if node is not None]

        def begin(_gradient: Tensor) -> None:
            live = reducer()
            if live is not None and (live.reaches_params() or accumulates_into_leaves(inner_nodes)):
                live.begin_pass()

        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, begin, mode="any")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the whole local gradients of forward passes inside in ``param.grad``; a later pass reduces them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def wait(self) -> None:
        """Wait for the parameters that ``overlap_forward`` has left in flight."""
        for _, pipeline in self._pipelines:
            pipeline.wait()

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients; all ranks make this call together.

        Args:
            norm_type: the order of the norm, or infinity.
        """
        return total_norm(self._engines, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return the norm they had.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the order of the norm, or infinity.
            error_if_nonfinite: raise if the norm is infinite or not a number.
        """
        return clip(self._engines, max_norm, norm_type, error_if_nonfinite)

    @property
    def _engines(self) -> list[Engine]:
        return [optimizer.engine for optimizer, _ in self._pipelines]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, with the values that all ranks have after the last step."""
        self.wait()
        return super().named_parameters(*args, **kwargs)

    def train(self, mode: bool = True) -> ShardedDataParallel:
        """Switch between training and evaluation, which may read parameters in any order."""
        if "_pipelines" in self.__dict__:
            self.wait()
        super().train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict, or this wrapper's, whose names begin with ``module.``; without ``assign``."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would take parameters out of their buckets")
        self.wait()
        if any(name.startswith("module.") for name in state_dict):
            return super().load_state_dict(state_dict, strict)
        return self.module.load_state_dict(state_dict, strict)

    def join_hook(self, **kwargs: Any) -> NoReturn:  # noqa: ARG002 - torch passes the arguments of other joinables
        """Raise ``RuntimeError``: with this class all ranks must have equally many inputs."""
        raise RuntimeError(JOIN_REFUSAL)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """The attribute that DDP reads first: it raises, because DDP would reduce reduced gradients again."""
        raise TypeError("ShardedDataParallel takes the place of DDP: do not wrap it in DDP")


def _wait_before_state_dict(model: Callable[[], ShardedDataParallel | None], *_arguments: object) -> None:
    live = model()
    if live is not None:
        live.wait()
