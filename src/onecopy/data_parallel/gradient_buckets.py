"""Gradient buckets: each collects the gradients of its parameters in a backward pass, and reduces them to their owners.

In one backward pass a bucket goes through these calls:

1. ``begin_pass`` resets it.
2. ``put`` takes in one parameter's gradient, without a copy where possible.
3. ``launch`` packs small gradients and starts the reduction.
4. ``add_up`` writes the reduced gradients into this rank's shard, or adds them to the shard.
5. ``release_gradients`` frees the local gradients when the reduction has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.pairwise_exchange import message_length
from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import version_of
from onecopy.data_parallel.gradient_reduction import (
    CollectiveReduction,
    GradientSpan,
    InFlightReduction,
    OwnerMessage,
    PairwiseReduction,
)
from onecopy.data_parallel.sharded_gradients import ShardGrad
from onecopy.layout import BucketPlan


@dataclass(frozen=True, slots=True)
class ReductionPolicy:
    """The process groups and the data type of all reductions.

    Attributes:
        collectives: the ranks among which gradients are sharded.
        replicas: the ranks that own the same shards in other replicas (with a mesh), or None.
        reduce_dtype: the type in which gradients are sent; None for the type of the parameters.
    """

    collectives: Collectives
    replicas: Collectives | None
    reduce_dtype: torch.dtype | None

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
        nbytes: the size of the bucket's gradients as they are sent.
        shard: this rank's range of the reduced gradients. It is empty until :meth:`allocate_shard`.
        shard_grads: for each parameter, the ``param.grad`` that shows its range of the shard.
        has_reduced_grad: for each parameter, whether the shard holds a reduced gradient of earlier passes, to which
            the current pass adds.
        states: for each parameter, the progress of its gradient in the current pass.
        pending_count: the number of gradients that the current pass has not produced yet.
        accumulates: whether the reduction that was launched adds to the shard.
        messages: for each owner, the messages of a reduction between pairs of ranks.
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
        self.nbytes = plan.numel * self.wire_dtype.itemsize
        self.shard = torch.zeros(0, dtype=self._shard_dtype, device=self.device)
        self.shard_grads: list[ShardGrad] = []
        self.has_reduced_grad = [False] * len(self.params)
        # Identity and version of whole gradients that no_sync() passes have left in param.grad, by position.
        self._no_sync_grads: dict[int, tuple[int, int]] = {}
        self.states = [GradState.PENDING] * len(self.params)
        self.pending_count = 0
        self.accumulates = False
        self._is_launched = False
        self._local_grads: list[Tensor | None] = [None] * len(self.params)  # of the current pass, flat
        self._pool_buffers: list[Tensor] = []  # buffers of the pool among the local gradients and in the spans
        self._zero = torch.zeros(1, dtype=self.wire_dtype, device=self.device)
        # The sum of many float16 gradients could overflow, so these are scaled before they are sent. All other
        # gradients are scaled after the sum, and so can be sent from autograd's own memory.
        self._scales_before = self.wire_dtype is torch.float16
        self._spans = self._make_spans()
        self._single_positions = {span.positions[0] for span in self._spans if span.is_single}
        self.messages = [self._messages_for(owner) for owner in range(policy.collectives.world_size)]

    def _make_spans(self) -> list[GradientSpan]:
        plan, world_size = self.plan, self.policy.collectives.world_size
        if not self.policy.collectives.uses_pairwise(self.device):
            length = plan.longest * world_size if plan.equal else plan.numel
            return [GradientSpan(0, length, len(self.params) == 1, list(range(len(self.params))))]
        spans: list[GradientSpan] = []
        for position, (param, offset) in enumerate(zip(self.params, plan.offsets, strict=True)):
            is_large = param.numel() * self.wire_dtype.itemsize >= limits.DIRECT_GRADIENT_BYTES
            if is_large or not spans or spans[-1].is_single:
                spans.append(GradientSpan(offset, param.numel(), is_large or len(self.params) == 1, [position]))
            else:
                spans[-1].numel = offset + param.numel() - spans[-1].start
                spans[-1].positions.append(position)
        return spans

    def _messages_for(self, owner: int) -> list[OwnerMessage]:
        start, stop = self.plan.range_of(owner)
        length = message_length(self.policy.collectives.world_size, self.wire_dtype.itemsize)
        messages = []
        for span in self._spans:
            low, high = max(span.start, start), min(span.start + span.numel, stop)
            for first in range(low, high, length):
                last = min(first + length, high)
                span_slice = slice(first - span.start, last - span.start)
                messages.append(OwnerMessage(span, span_slice, slice(first - start, last - start)))
        return messages

    def begin_pass(self, pool: BufferPool) -> None:
        """Reset the bucket for a new backward pass."""
        self.release_gradients(pool)
        self.states = [GradState.PENDING] * len(self.params)
        self.pending_count = sum(param.requires_grad for param in self.params)
        self._is_launched = False

    def release_gradients(self, pool: BufferPool) -> None:
        """Release the local gradients of the pass."""
        pool.give_back(*self._pool_buffers)
        self._pool_buffers.clear()
        self._local_grads = [None] * len(self.params)
        for span in self._spans:
            span.gradients = None

    def allocate_shard(self) -> None:
        """Allocate this rank's shard and the ``ShardGrad`` of each parameter, once."""
        if self.shard_grads:
            return
        start, stop = self.plan.range_of(self.policy.collectives.group_rank)
        self.shard = torch.zeros(stop - start, dtype=self._shard_dtype, device=self.device)
        for param, offset in zip(self.params, self.plan.offsets, strict=True):
            low, high = max(offset, start), min(offset + param.numel(), stop)
            local = self.shard[low - start : high - start] if low < high else self.shard[:0]
            self.shard_grads.append(ShardGrad(local, param, self.policy.collectives))

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in one parameter's gradient."""
        param = self.params[position]
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self.names[position]!r} has a sparse gradient, which cannot be divided among ranks; "
                "make its module produce dense ones (sparse=False), or, if that is an nn.Embedding, let "
                "ShardedDataParallel(sparse_embeddings=True) choose"
            )
        self.check_not_arrived(position)
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._can_send_in_place(gradient, param):
            # No copy. The gradient is only read, because another parameter may have the same memory.
            self._local_grads[position] = gradient if gradient.dim() == 1 else flat_view(gradient)
        else:
            numel = param.numel()
            if position in self._single_positions:
                memory = self._take_buffer(numel, pool)
            else:
                memory = torch.empty(numel, dtype=self.wire_dtype, device=self.device)
            memory.as_strided(param.shape, param.stride(), memory.storage_offset()).copy_(gradient)
            self._local_grads[position] = memory
        self.mark_arrived(position)

    def check_not_arrived(self, position: int) -> None:
        """Raise if the pass has already produced this gradient."""
        if self.states[position] is GradState.ARRIVED or self._is_launched:
            raise RuntimeError(
                f"parameter {self.names[position]!r} got a gradient twice in one backward pass; with activation "
                "checkpointing use use_reentrant=False"
            )

    def mark_arrived(self, position: int) -> None:
        """Count a gradient that was taken in."""
        self.pending_count -= 1
        self.states[position] = GradState.ARRIVED

    def _can_send_in_place(self, gradient: Tensor, param: Tensor) -> bool:
        if gradient.dtype != self.wire_dtype or self._scales_before or gradient.stride() != param.stride():
            return False
        return not gradient.is_conj() and not gradient.is_neg()

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
        return self.start_reduction(pool, tag, is_last)

    def start_reduction(self, pool: BufferPool, tag: int, is_last: bool) -> InFlightReduction:
        """Pack the gradients and start their reduction."""
        self.pack(pool)
        collectives = self.policy.collectives
        if not collectives.uses_pairwise(self.device):
            (span,) = self._spans
            assert span.gradients is not None
            sizes = [stop - start for start, stop in pairwise(self.plan.bounds)]
            return CollectiveReduction(collectives, span.gradients, sizes, pool)
        # The shard can receive one rank's values, unless the sum is added to the shard or computed elsewhere.
        is_free = self.wire_dtype == self._shard_dtype and self.policy.replicas is None and not self.accumulates
        shard = self.shard if is_free else None
        # All ranks go from the launch of the last bucket to the end of the pass without waiting for anything else.
        return PairwiseReduction(
            collectives, self.messages, self.wire_dtype, self.device, pool, tag, shard, in_turns=is_last
        )

    def pack(self, pool: BufferPool) -> None:
        """Fill the buffer of each span: with the gradient itself, or with packed small gradients and zeros."""
        for span in self._spans:
            gradient = self._local_grads[span.positions[0]]
            if span.is_single and gradient is not None and gradient.numel() == span.numel:
                span.gradients = gradient
            else:
                span.gradients = self._take_buffer(span.numel, pool)
                torch.cat(self._parts_of(span), out=span.gradients)
            if self._scales_before:
                span.gradients.mul_(self.policy.scale)

    def _take_buffer(self, numel: int, pool: BufferPool) -> Tensor:
        """A buffer of the pool, until :meth:`release_gradients`."""
        self._pool_buffers.append(pool.take(numel, self.wire_dtype, self.device))
        return self._pool_buffers[-1]

    def _parts_of(self, span: GradientSpan) -> list[Tensor]:
        """The gradients of a span, with zeros in the gaps and for missing gradients."""
        parts, end = [], span.start
        for position in span.positions:
            offset, numel = self.plan.offsets[position], self.params[position].numel()
            if end < offset:
                parts.append(self._zero.expand(offset - end))
            gradient = self._local_grads[position]
            parts.append(self._zero.expand(numel) if gradient is None else gradient)
            end = offset + numel
        if end < span.start + span.numel:
            parts.append(self._zero.expand(span.start + span.numel - end))
        return parts

    def add_up(self, reduction: InFlightReduction) -> None:
        """Write the mean gradients over all ranks into the shard, or add them to the shard."""
        if self.accumulates:
            self.zero_ranges(self.has_reduced_grad)
        scale = 1.0 if self._scales_before else self.policy.scale
        if self.policy.replicas is None:
            reduction.add_up(self.shard, scale, self.accumulates)
            return
        # Zeros, because the gaps between parameters are not written.
        total = torch.zeros_like(self.shard)
        reduction.add_up(total, scale, keep=False)
        self.policy.replicas.all_reduce(total).wait()
        self.shard.add_(total) if self.accumulates else self.shard.copy_(total)

    def zero_ranges(self, has_reduced_grad: Sequence[bool]) -> None:
        """Before the shard is added to: zero the ranges of parameters without a reduced gradient."""
        for gradient, has in zip(self.shard_grads, has_reduced_grad, strict=True):
            if not has:
                gradient.local.zero_()

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
