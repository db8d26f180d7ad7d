"""``ShardedDataParallel``: in place of DDP, with gradients and optimizer state divided among the ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm import limits
from onecopy.comm.agreement import Fact, agree
from onecopy.comm.collectives import Collectives
from onecopy.common.torch_private import accumulates_into_leaves, in_backward, in_join_context
from onecopy.data_parallel.backward import BackwardReducer
from onecopy.data_parallel.forward_wait import ForwardWaitHooks, resolve_uses
from onecopy.data_parallel.gradient_buckets import Bucket, Policy
from onecopy.data_parallel.module_sync import ModuleState, cast_floating, tensors_in
from onecopy.data_parallel.optimizer_takeover import (
    MixedPrecision,
    Planned,
    agree_with_replicas,
    check_module,
    check_optimizers,
    convert,
    module_facts,
    plan,
    replicas_of,
    sparse_embeddings_of,
    take_over,
    to_convert,
)
from onecopy.data_parallel.pipelined_step import PipelinedStep
from onecopy.data_parallel.sparse_rows import RowBucket
from onecopy.errors import RanksDisagreeError
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.step.debug_log import log_layout
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.gradient_norm import clip, total_norm
from onecopy.step.join import naming_the_rule
from onecopy.step.rank_comparison import layout_facts


class ShardedDataParallel(nn.Module, Joinable):
    r"""Trains a replica of ``module`` on every rank, and keeps 1/N of gradients and optimizer state on each.

    It replaces DistributedDataParallel. Parameters stay plain tensors in flat buckets; each bucket's gradients are
    reduced to their owners during the backward pass and then let go, ``optimizer.step()`` updates what this rank owns
    and shares it. After ``backward()`` a ``param.grad`` shows this rank's range only.

    Example::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        model = ShardedDataParallel(model, optimizer)

    Args:
        module: the model; its parameters and buffers are made equal on all ranks, those of rank 0.
        optimizer: a :class:`ZeroRedundancyOptimizer` that has not stepped yet, or several; together they must have
            every parameter of the module that needs a gradient.
        broadcast_buffers: send rank 0's buffers to all before each training forward.
        bucket_bytes: the size from which a bucket is full; the last ones are smaller, one parameter may be larger.
        overlap_forward: let ``step()`` return while new values are on their way, and each submodule wait for its own
            just before its forward. Read :attr:`uses` first.
        uses: with ``overlap_forward``, parameters or submodules that a submodule reads beside its own, by name, such as
            ``{"head": ["embed.weight"]}``; the empty name is the module itself.
        sparse_embeddings: let large embeddings produce sparse gradients, of which only the rows that a batch has used
            are sent; what is stepped on is the same. On gloo only, elsewhere it changes nothing.
        mixed_precision: the types to compute and communicate in.
        mesh: a mesh of (replicate, shard): gradients and state are divided along the second dimension, whose group the
            optimizers must be on, and reduced over both.

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
        bucket_bytes: int = limits.BUCKET_BYTES,
        overlap_forward: bool = False,
        uses: Mapping[str, Sequence[str]] | None = None,
        sparse_embeddings: bool = False,
        mixed_precision: MixedPrecision | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        collectives = collectives_of(optimizers)
        replicas: Collectives | None = None
        policy = mixed_precision or MixedPrecision()
        failure: Exception | None = None
        facts: list[Fact] = []
        planned: list[Planned] = []
        embeddings: list[nn.Embedding] = []
        apart: set[int] = set()
        try:
            check_optimizers(optimizers, collectives)
            replicas = None if mesh is None else replicas_of(mesh, collectives)
            facts = [Fact("mesh", str(None if mesh is None else tuple(mesh.shape)))]
        except Exception as error:
            failure = error
        # Before anything else: the mesh says with which ranks the rest is compared.
        agree(collectives, "constructing ShardedDataParallel", facts, failure)
        try:
            if not isinstance(policy, MixedPrecision):
                raise TypeError(
                    f"mixed_precision must be a onecopy.MixedPrecision, as in MixedPrecision(param_dtype={policy!r}), "
                    f"not {policy!r}"
                )
            check_module(module, optimizers)
            if sparse_embeddings:
                found = sparse_embeddings_of(module)
                embeddings = [each for each in found if collectives.uses_pairwise(each.weight.device)]
            apart = {id(each.weight) for each in embeddings}
            planned = [plan(module, each, bucket_bytes, policy, apart) for each in optimizers]
            if uses and not overlap_forward:
                raise ValueError("uses says what to wait for with overlap_forward=True, and means nothing without it")
            resolve_uses(module, uses or {})
            facts = [
                Fact("broadcast_buffers", str(bool(broadcast_buffers))),
                Fact("bucket_bytes", str(bucket_bytes)),
                Fact("overlap_forward", str(bool(overlap_forward))),
                Fact("uses", str({name: list(others) for name, others in sorted((uses or {}).items())})),
                Fact("sparse_embeddings", str(bool(sparse_embeddings))),
                Fact("mixed_precision", str(policy)),
            ]
            facts += module_facts(module)
            facts.append(Fact("embeddings whose gradients travel by rows", str(len(embeddings))))
            facts += [fact for each in planned for fact in layout_facts(each.layout, "bucket")]
            facts += [Fact("bucket", str(bucket)) for each in planned for bucket in each.plans]
        except Exception as error:
            failure = error
        agree_with_replicas(collectives, replicas, "constructing ShardedDataParallel", facts, failure)
        self.module = module
        self.mixed_precision = policy
        self.require_backward_grad_sync = True
        devices = list(dict.fromkeys(param.device for param in module.parameters()))
        self.process_group: Any = collectives.process_group
        self.device: torch.device = devices[0]
        self.device_type: str = devices[0].type
        self.is_multi_device_module: bool = len(devices) > 1
        self.require_forward_param_sync = True  # as DDP calls it: whether the last pass synchronises
        self._collectives, self._replicas = collectives, replicas
        self._state = ModuleState(module, broadcast_buffers)
        self._state.share_all(collectives, replicas)
        names = {id(param): name for name, param in module.named_parameters()}
        how = Policy(collectives, replicas, policy.reduce_dtype)
        buckets: list[tuple[int, Bucket]] = []
        taken = []
        chosen = to_convert(module, policy)
        self._pipelines: list[tuple[ZeroRedundancyOptimizer, PipelinedStep]] = []
        order = {id(param): place for place, param in enumerate(reversed(list(module.parameters())))}
        for each in planned:
            engine = each.optimizer.engine
            taken.append(take_over(each, chosen, policy))
            pipeline = PipelinedStep(engine, each.plans, overlap_forward, len(planned) == 1, replicas)
            self._pipelines.append((each.optimizer, pipeline))
            each.optimizer.step_schedule = pipeline.step
            each.optimizer.wait_for_transfers = pipeline.wait
            for bucket in each.plans:
                params = [engine.params[index] for index in bucket.params]
                last = max(order[id(param)] for param in params)
                kind = RowBucket if id(params[0]) in apart else Bucket
                buckets.append((last, kind(bucket, params, [names[id(param)] for param in params], how)))
            log_layout(engine)
        convert(module.parameters(), chosen, policy)  # what no optimizer has
        self._made_sparse = [embedding for embedding in embeddings if not embedding.sparse]
        buckets.sort(key=lambda entry: entry[0])
        self._reducer = BackwardReducer([bucket for _, bucket in buckets], how)
        for gradients in taken:
            gradients.on_zero = self._reducer.forget_accumulated
        self._waiting = ForwardWaitHooks(module, self._pipelines_by_param(), uses or {}) if overlap_forward else None
        me = weakref.ref(self)
        module.register_state_dict_pre_hook(lambda *_: _wait_for(me))

    def _pipelines_by_param(self) -> dict[int, tuple[PipelinedStep, int]]:
        return {
            id(param): (pipeline, index)
            for optimizer, pipeline in self._pipelines
            for index, param in enumerate(optimizer.engine.params)
        }

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, after what its replicas must agree on."""
        if not in_backward():
            self._reducer.reset()
        if self._waiting is not None:
            self._waiting.begin()
        if torch.is_grad_enabled():
            self._before_training_forward()
        dtype = self.mixed_precision.param_dtype
        if dtype is not None and self.mixed_precision.cast_inputs:
            inputs, kwargs = cast_floating(inputs, dtype), cast_floating(kwargs, dtype)
        with self._sparse():
            output = self.module(*inputs, **kwargs)
        self._raise_deferred_failures()
        if torch.is_grad_enabled():
            self._watch(output)
        return output

    @contextlib.contextmanager
    def _sparse(self) -> Iterator[None]:
        """Let the chosen embeddings make sparse gradients of what is run inside, and of nothing else."""
        for embedding in self._made_sparse:
            embedding.sparse = True
        try:
            yield
        finally:
            for embedding in self._made_sparse:
                embedding.sparse = False

    def _before_training_forward(self) -> None:
        self._reducer.attach()
        buffers = self._state.buffers_to_share() if self.module.training else []
        if in_join_context(self) or buffers:
            self._raise_deferred_failures()
        source = 0
        if in_join_context(self):
            Join.notify_join_context(self)
            source = self._exchange_join_flags(active=True, synchronises=self.require_backward_grad_sync)[0]
        self._reducer.synchronises = self.require_forward_param_sync = self.require_backward_grad_sync
        for engine in self._engines:
            engine.gradients.accumulating = not self.require_backward_grad_sync
        self._state.share_buffers(buffers, self._collectives, self._replicas, source)

    def _raise_deferred_failures(self) -> None:
        """Before ranks exchange anything: raise if the last step has failed on one of them."""
        for _, pipeline in self._pipelines:
            pipeline.raise_deferred_failure()

    def _watch(self, output: Any) -> None:
        """Let the reducer know when a backward pass begins, even if it reaches no parameter on this rank."""
        reducer = weakref.ref(self._reducer)
        watched = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        # What the outputs are made of, and not the outputs, which would then hold themselves.
        made_by = [tensor.grad_fn for tensor in watched if tensor.grad_fn is not None]
        behind = [node for maker in made_by for node, _ in maker.next_functions if node is not None]

        def begin(_gradient: Tensor) -> None:
            live = reducer()
            if live is not None and (live.reached() or accumulates_into_leaves(behind)):
                live.begin()

        if watched:
            torch.autograd.graph.register_multi_grad_hook(watched, begin, mode="any")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes inside leave their whole local gradients in ``param.grad``, for a later pass to reduce."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def wait(self) -> None:
        """End transfers that ``overlap_forward`` has left for the next forward."""
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
        """Switch between training and evaluation, which may read parameters in any order.

        Args:
            mode: True for training.
        """
        if "_pipelines" in self.__dict__:
            self.wait()
        super().train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state dict, or this wrapper's, whose names begin with ``module.``.

        Args:
            state_dict: names and tensors.
            strict: whether names must match exactly.
            assign: not supported, because parameters live in buckets.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would take parameters out of their buckets")
        self.wait()
        if any(name.startswith("module.") for name in state_dict):
            return super().load_state_dict(state_dict, strict)
        return self.module.load_state_dict(state_dict, strict)

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002 - torch passes what other joinables need
        """Return the hook with which a rank that has run out of inputs takes part in the others' backward passes.

        Args:
            **kwargs: not used; shared with the other joinables.
        """
        return _BackwardJoinHook(self)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What DDP asks a module for first; around this one it would reduce what has been reduced."""
        raise TypeError("ShardedDataParallel takes the place of DDP: do not wrap it in DDP")

    @property
    def join_device(self) -> torch.device:
        """The device for the join context's own communication."""
        return self._collectives.control_device

    @property
    def join_process_group(self) -> Any:
        """The process group for the join context's own communication."""
        return self.process_group

    def serve_backward(self) -> None:
        """Take part in a forward and backward pass of ranks that still have inputs."""
        self.wait()
        self._raise_deferred_failures()
        source, synchronises = self._exchange_join_flags(active=False, synchronises=False)
        self.require_forward_param_sync = synchronises
        self._state.share_buffers(self._state.buffers_to_share(), self._collectives, self._replicas, source)
        if synchronises:
            self._reducer.take_part()

    def _exchange_join_flags(self, active: bool, synchronises: bool) -> tuple[int, bool]:
        """The lowest rank that has inputs, and whether the backward passes of those that have will synchronise."""
        with naming_the_rule():
            flags = self._collectives.all_gather_flags([int(active), int(synchronises)], "forward()")
        having = {group_rank: bool(flag[1]) for group_rank, flag in enumerate(flags) if flag[0]}
        if len(set(having.values())) > 1:
            accumulating = [group_rank for group_rank, flag in having.items() if not flag]
            raise RanksDisagreeError(
                f"rank {self._collectives.group_rank}: forward() runs under no_sync() on ranks {accumulating}, and on "
                "the other ranks that have inputs it does not; use no_sync() on all of them or on none"
            )
        return next(iter(having.items()))


def _wait_for(model: weakref.ref[ShardedDataParallel]) -> None:
    live = model()
    if live is not None:
        live.wait()


class _BackwardJoinHook(JoinHook):
    """What a rank that has run out of inputs does for each pass of the others."""

    def __init__(self, model: ShardedDataParallel) -> None:
        self._model = model

    def main_hook(self) -> None:
        """Serve one pass."""
        self._model.serve_backward()
