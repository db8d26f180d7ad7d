"""Gradient buckets: each collects the gradients of its parameters in a backward pass, and reduces them to their owners.

In one backward pass a bucket goes through these calls:

1. ``begin_pass`` resets it.
2. ``put`` takes in one parameter's gradient, without a copy where possible.
3. ``launch`` starts the reduction.
4. ``add_up`` writes the reduced gradients into this rank's shard, or adds them to the shard.
5. ``release_gradients`` frees the local gradients when the reduction has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from onecopy.comm.bucket_reduce_scatter import BucketGradients, InFlightReduction
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.transports import transport_for
from onecopy.common.torch_private import version_of, zero_each
from onecopy.layout import BucketPlan
from onecopy.step.sharded_gradient import GradientGroup, ShardGrad


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """The process groups and the data type of all reductions.

    Attributes:
        gradients: the gradients of all buckets, with the ranks among which they are sharded.
        replicas: the ranks that own the same shards in other replicas (with a mesh), or None.
        reduce_dtype: the type in which gradients are sent; None for the type of the parameters.
    """

    gradients: GradientGroup
    replicas: Collectives | None
    reduce_dtype: torch.dtype | None

    @property
    def collectives(self) -> Collectives:
        """The ranks among which gradients are sharded."""
        return self.gradients.collectives

    @property
    def scale(self) -> float:
        """The factor from the sum over all ranks to the mean."""
        return 1.0 / (self.collectives.world_size * (self.replicas.world_size if self.replicas else 1))


class GradState(Enum):
    """The progress of one parameter's gradient in the current backward pass."""

    PENDING = auto()
    """The pass has not produced a gradient yet."""

    SHARD_REMOVED = auto()
    """A hook has removed the ``ShardGrad`` of earlier passes from ``param.grad``; the new gradient comes next."""

    ARRIVED = auto()
    """The bucket has the gradient."""


class GradientBucket:
    """The gradients of one bucket of parameters: whole and local during a pass, then this rank's reduced shard.

    Attributes:
        plan: the parameters and the range of each rank.
        params: the parameters.
        names: their names.
        policy: the process groups and the data type of the reduction.
        wire_dtype: the type in which gradients are sent.
        transport: how the bucket's device sends to other ranks.
        nbytes: the size of the bucket's gradients as they are sent.
        shard: this rank's range of the reduced gradients. It is empty until :meth:`allocate_shard`.
        shard_grads: for each parameter, the ``param.grad`` that shows its range of the shard.
        has_reduced_grad: for each parameter, whether the shard holds a reduced gradient of earlier passes, to which
            the current pass adds.
        states: for each parameter, the progress of its gradient in the current pass.
        pending_count: the number of gradients that the current pass has not produced yet.
        accumulates: whether the reduction that was launched adds to the shard.
    """

    def __init__(
        self, plan: BucketPlan, params: Sequence[Tensor], names: Sequence[str], policy: ReductionPolicy
    ) -> None:
        first = params[0]
        self.plan, self.params, self.names = plan, list(params), list(names)
        self.policy = policy
        self.device = first.device
        self.wire_dtype = policy.reduce_dtype if policy.reduce_dtype and first.is_floating_point() else first.dtype
        self._shard_dtype = torch.promote_types(self.wire_dtype, first.dtype)
        self.transport = transport_for(policy.collectives, self.device)
        self.nbytes = plan.numel * self.wire_dtype.itemsize
        self._shard_memory = torch.zeros(0)  # the shard, padded as the plan is
        self.shard = torch.zeros(0, dtype=self._shard_dtype, device=self.device)
        self.shard_grads: list[ShardGrad] = []
        self.has_reduced_grad = [False] * len(self.params)
        # Identity and version of whole gradients that no_sync() passes have left in param.grad, by position.
        self._no_sync_grads: dict[int, tuple[int, int]] = {}
        self.states = [GradState.PENDING] * len(self.params)
        self.pending_count = 0
        self.accumulates = False
        self._is_launched = False
        self._reduce_scatter = self.transport.plan_reduce_scatter(
            BucketGradients(plan, self.params, self.wire_dtype, policy.replicas, policy.scale)
        )

    def begin_pass(self, pool: BufferPool) -> None:
        """Reset the bucket for a new backward pass."""
        self.release_gradients(pool)
        self.states = [GradState.PENDING] * len(self.params)
        self.pending_count = sum(param.requires_grad for param in self.params)
        self._is_launched = False

    def release_gradients(self, pool: BufferPool) -> None:
        """Release the local gradients of the pass."""
        self._reduce_scatter.release(pool)

    def allocate_shard(self) -> None:
        """Allocate this rank's shard and the ``ShardGrad`` of each parameter, once."""
        if self.shard_grads:
            return
        group_rank = self.policy.collectives.group_rank
        start, stop = self.plan.range_of(group_rank)
        padded = self.plan.padded_part(group_rank)
        self._shard_memory = torch.zeros(padded, dtype=self._shard_dtype, device=self.device)
        self.shard = self._shard_memory[: stop - start]
        for param, offset in zip(self.params, self.plan.offsets, strict=True):
            low, high = max(offset, start), min(offset + param.numel(), stop)
            local = self.shard[low - start : high - start] if low < high else self.shard[:0]
            self.shard_grads.append(ShardGrad(local, param, self.policy.gradients))

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in one parameter's gradient."""
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self.names[position]!r} has a sparse gradient, which cannot be divided among ranks; "
                "make its module produce dense ones (sparse=False)"
            )
        if self.states[position] is GradState.ARRIVED or self._is_launched:
            raise RuntimeError(
                f"parameter {self.names[position]!r} got a gradient twice in one backward pass; with activation "
                "checkpointing use use_reentrant=False"
            )
        if gradient.requires_grad:
            gradient = gradient.detach()
        self._reduce_scatter.put(position, gradient, pool)
        self.pending_count -= 1
        self.states[position] = GradState.ARRIVED

    def launch(self, pool: BufferPool, tag: int, is_last: bool) -> InFlightReduction:
        """Start the reduction of the pass's gradients; gradients that have not arrived count as zeros.

        Args:
            pool: the pool that gives buffers.
            tag: a message tag that no other bucket of the pass has.
            is_last: whether this is the last bucket of the pass.
        """
        self._is_launched = True
        for position, state in enumerate(self.states):
            if state is not GradState.ARRIVED:
                self.has_reduced_grad[position] = state is GradState.SHARD_REMOVED or isinstance(
                    self.params[position].grad, ShardGrad
                )
        self.accumulates = any(self.has_reduced_grad)
        self.allocate_shard()
        is_free = self.wire_dtype == self._shard_dtype and not self.accumulates
        return self._reduce_scatter.start(pool, tag, is_last, self._shard_memory if is_free else None)

    def add_up(self, reduction: InFlightReduction) -> None:
        """Write the mean gradients over all ranks into the shard, or add them to the shard."""
        if self.accumulates:
            self.zero_ranges(self.has_reduced_grad)
        reduction.add_up(self.shard, self.accumulates)
        self.policy.gradients.forget_norms()

    def zero_ranges(self, has_reduced_grad: Sequence[bool]) -> None:
        """Before the shard is added to: zero the ranges of parameters without a reduced gradient."""
        unused = [gradient.local for gradient, has in zip(self.shard_grads, has_reduced_grad, strict=True) if not has]
        if unused:
            zero_each(unused)

    def clear_accumulated(self) -> None:
        """Note that all gradients were zeroed: the next pass adds to none."""
        self.has_reduced_grad = [False] * len(self.params)
        self._no_sync_grads.clear()

    def note_no_sync_grad(self, position: int) -> None:
        """Note that a ``no_sync()`` pass has left a whole local gradient in ``param.grad``."""
        gradient = self.params[position].grad
        assert gradient is not None
        self._no_sync_grads[position] = (id(gradient), version_of(gradient))

    def was_zeroed(self, position: int) -> bool:
        """Whether the whole gradient in ``param.grad`` was changed since :meth:`note_no_sync_grad`, and is zero."""
        gradient = self.params[position].grad
        assert gradient is not None
        if self._no_sync_grads.get(position) == (id(gradient), version_of(gradient)):
            return False
        return not torch.count_nonzero(gradient.coalesce().values() if gradient.is_sparse else gradient)
