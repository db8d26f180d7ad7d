"""Buckets: parameters that are shared in place, and their gradients, which are reduced to their owners.

Both kinds of buckets follow the same :class:`~onecopy.layout.BucketPlan`: each rank owns one contiguous range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

import torch
from torch import Tensor

from onecopy.comm.buffers import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.reduce_scatter import Piece, ReduceScatterPlan, Reduction
from onecopy.comm.sharing import SharedBucket, Sharing
from onecopy.comm.streams import UsedStreams
from onecopy.common.flat_views import flat_like
from onecopy.common.torch_private import version_of, zero_each
from onecopy.layout import BucketPlan, Layout
from onecopy.step.sharded_gradient import GradientGroup, ShardGrad
from onecopy.step.storage import Storage


class ParameterBuckets(Storage):
    """Parameters are views into the flat buckets of their plans; a rank's range of a bucket is sent in place.

    A parameter of no plan stays where it is and is never sent: it is frozen.
    """

    convertible = False

    def __init__(self, params: Sequence[Tensor], layout: Layout, plans: Sequence[BucketPlan]) -> None:
        # In the order in which the backward pass computes their gradients.
        self.buckets = [SharedBucket(_flat_bucket(params, plan), plan.padded_parts, plan.params) for plan in plans]
        super().__init__(params, layout)

    def plan_sharing(self, collectives: Collectives) -> Sharing:
        """Plan to share bucket by bucket. The forward pass reads the last buckets first, so these are sent first."""
        return Sharing(collectives, buckets=self.buckets[::-1])


def _flat_bucket(params: Sequence[Tensor], plan: BucketPlan) -> Tensor:
    """The flat memory of a bucket. Its parameters are moved there, unless they are there already."""
    members = [(params[index], offset) for index, offset in zip(plan.params, plan.offsets, strict=True)]
    first = members[0][0]
    memory = first.untyped_storage()
    if memory.nbytes() == plan.padded_numel * first.element_size() and all(
        param.untyped_storage().data_ptr() == memory.data_ptr() and param.storage_offset() == offset
        for param, offset in members
    ):
        return first.detach().as_strided((plan.padded_numel,), (1,), 0)
    # Zeroed, because gaps between parameters and padding are sent, too.
    flat = torch.zeros(plan.padded_numel, dtype=first.dtype, device=first.device)
    for param, offset in members:
        view = flat.as_strided(param.shape, param.stride(), offset)
        view.copy_(param.detach())
        param.data = view
    return flat


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """The process groups and the data type of all reductions."""

    gradients: GradientGroup  # the gradients of all buckets, with the ranks among which they are sharded
    replicas: Collectives | None  # the ranks that own the same shards in other replicas (with a mesh), or None
    reduce_dtype: torch.dtype | None  # the type in which gradients are sent; None for the type of the parameters

    @property
    def collectives(self) -> Collectives:
        """The ranks among which gradients are sharded."""
        return self.gradients.collectives


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

    In one backward pass a bucket goes through these calls:

    1. ``begin_pass`` resets it.
    2. ``put`` takes in one parameter's gradient, without a copy.
    3. ``launch`` starts the reduction, and releases the gradients when it has ended.
    4. ``add_up`` writes the mean into this rank's shard, or adds it to the shard.
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
        self.nbytes = plan.numel * self.wire_dtype.itemsize  # of the gradients as they are sent
        self._shard_memory = torch.zeros(0)  # the shard, padded as the plan is
        # This rank's range of the reduced gradients, which is empty until the first reduction; and for each parameter
        # the ``param.grad`` that shows its range of the shard.
        self.shard = torch.zeros(0, dtype=self._shard_dtype, device=self.device)
        self.shard_grads: list[ShardGrad] = []
        # Whether the shard holds a reduced gradient of earlier passes, to which the current pass adds.
        self.has_reduced_grad = [False] * len(self.params)
        # Identity and version of whole gradients that no_sync() passes have left in param.grad, by position.
        self._no_sync_grads: dict[int, tuple[int, int]] = {}
        self.states = [GradState.PENDING] * len(self.params)
        self.pending_count = 0  # of gradients that the current pass has not produced yet
        self.accumulates = False  # whether the reduction that was launched adds to the shard
        self._is_launched = False
        self._gradients: list[Tensor | None] = [None] * len(self.params)  # of the current pass, until the launch
        self._streams = UsedStreams(self.device)  # on which they were computed
        self._mean = self.shard  # the memory in which the mean arrives
        self._reduce_scatter = ReduceScatterPlan(
            policy.collectives,
            list(_pieces(plan, self.params)),
            first.dtype,
            self.wire_dtype,
            self.device,
            plan.padded_parts,
            policy.replicas,
        )

    def begin_pass(self) -> None:
        """Reset the bucket for a new backward pass; gradients of a pass that was interrupted are released."""
        self._streams.release()
        self._gradients = [None] * len(self.params)
        self.states = [GradState.PENDING] * len(self.params)
        self.pending_count = sum(param.requires_grad for param in self.params)
        self._is_launched = False

    def put(self, position: int, gradient: Tensor) -> None:
        """Take in one parameter's gradient. It is only read, because another parameter may have the same memory."""
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
        self._gradients[position] = gradient
        if not gradient.is_cpu:  # the CPU has no streams
            self._streams.note()
        self.pending_count -= 1
        self.states[position] = GradState.ARRIVED

    def put_no_sync_grads(self) -> None:
        """Take in the gradients that ``no_sync()`` passes have left, of parameters that this pass does not use."""
        for position, param in enumerate(self.params):
            if self.states[position] is GradState.ARRIVED or param.grad is None or isinstance(param.grad, ShardGrad):
                continue
            if self.was_zeroed(position):
                self.has_reduced_grad[position] = False
            self.put(position, param.grad)
            param.grad = None

    def launch(self, pool: BufferPool, tag: int) -> Reduction:
        """Start the reduction of the pass's gradients; gradients that have not arrived count as zeros.

        No other bucket of the pass has the same message tag.
        """
        self._is_launched = True
        for position, state in enumerate(self.states):
            if state is not GradState.ARRIVED:
                self.has_reduced_grad[position] = state is GradState.SHARD_REMOVED or isinstance(
                    self.params[position].grad, ShardGrad
                )
        self.accumulates = any(self.has_reduced_grad)
        if not self.shard_grads:
            self._allocate_shard()
        is_free = self.wire_dtype == self._shard_dtype and not self.accumulates
        shard = self._shard_memory
        self._mean = shard if is_free else pool.take(shard.numel(), self.wire_dtype, self.device)
        self._streams.join()
        flats = [
            None if gradient is None else flat_like(gradient.resolve_conj().resolve_neg(), param)
            for gradient, param in zip(self._gradients, self.params, strict=True)
        ]
        reduction = self._reduce_scatter.start(flats, pool, tag, self._mean)
        self._streams.release()
        self._gradients = [None] * len(self.params)
        return reduction

    def _allocate_shard(self) -> None:
        """Allocate this rank's shard and the ``ShardGrad`` of each parameter."""
        group_rank = self.policy.collectives.group_rank
        start, stop = self.plan.range_of(group_rank)
        padded = self.plan.padded_parts[group_rank]
        self._shard_memory = torch.zeros(padded, dtype=self._shard_dtype, device=self.device)
        self.shard = self._shard_memory[: stop - start]
        for param, offset in zip(self.params, self.plan.offsets, strict=True):
            low, high = max(offset, start), min(offset + param.numel(), stop)
            local = self.shard[low - start : high - start] if low < high else self.shard[:0]
            self.shard_grads.append(ShardGrad(local, param, self.policy.gradients))

    def add_up(self, reduction: Reduction, pool: BufferPool) -> None:
        """Write the mean gradients over all ranks into the shard, or add them to the shard."""
        reduction.wait()
        self.policy.gradients.forget_norms()
        mean, self._mean = self._mean, self.shard
        if mean is self._shard_memory:
            return
        if self.accumulates:
            pairs = zip(self.shard_grads, self.has_reduced_grad, strict=True)
            unused = [gradient.local for gradient, has in pairs if not has]
            if unused:
                zero_each(unused)
            self.shard.add_(mean[: self.shard.numel()])
        else:
            self.shard.copy_(mean[: self.shard.numel()])
        pool.give_back(mean)

    @property
    def present(self) -> list[bool]:
        """For each parameter, whether it has a gradient of this pass or of an earlier one."""
        arrived = GradState.ARRIVED
        return [state is arrived or has for state, has in zip(self.states, self.has_reduced_grad, strict=True)]

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


def _pieces(plan: BucketPlan, params: Sequence[Tensor]) -> Iterator[Piece]:
    """The pieces of the parameters' gradients, by owner, where the plan has them."""
    for owner, (start, stop) in enumerate(pairwise(plan.bounds)):
        for source, (param, offset) in enumerate(zip(params, plan.offsets, strict=True)):
            low, high = max(offset, start), min(offset + param.numel(), stop)
            if low < high:
                yield Piece(source, low - offset, high - offset, owner, low - start)
