"""One bucket's gradients: how they are taken in, what is kept of them, and how ranks' parts are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffer_pool import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.pairwise_exchange import message_length
from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import version_of
from onecopy.data_parallel.sharded_gradients import ShardGrad
from onecopy.layout import BucketPlan


@dataclass(frozen=True, slots=True)
class Policy:
    """How gradients are reduced.

    Attributes:
        collectives: the ranks among which they are divided.
        replicas: ranks that hold the same part elsewhere, over which parts are then added up.
        reduce_dtype: the type in which they travel; by default their own.
    """

    collectives: Collectives
    replicas: Collectives | None
    reduce_dtype: torch.dtype | None

    @property
    def scale(self) -> float:
        """What makes the sum over all ranks the mean."""
        return 1.0 / (self.collectives.world_size * (self.replicas.world_size if self.replicas else 1))


@dataclass(slots=True)
class GradientSpan:
    """Neighbours in a bucket whose gradients travel together: one that is large, or several that are small.

    Attributes:
        start: where it begins in the bucket.
        numel: how long it is, gaps between parameters (but none at its ends) included.
        alone: whether it is one parameter, whose gradient can be its memory.
        positions: of its parameters in the bucket.
        memory: the gradients, from when the bucket is closed.
    """

    start: int
    numel: int
    alone: bool
    positions: list[int]
    memory: Tensor | None = None


@dataclass(frozen=True, slots=True)
class OwnerMessage:
    """A part of a run that belongs to one rank: what is sent to it, and added up there.

    Attributes:
        run: the run.
        part: which elements of the run.
        home: which elements of its owner's range.
    """

    run: GradientSpan
    part: slice
    owner_slice: slice

    @property
    def values(self) -> Tensor:
        """This rank's gradients."""
        assert self.run.memory is not None
        return self.run.memory[self.part]


class Bucket:
    """One bucket's gradients: those of a backward pass, and the range that this rank keeps of them."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor], names: Sequence[str], policy: Policy) -> None:
        first = params[0]
        self.plan, self.params, self.names = plan, list(params), list(names)
        self.device = first.device
        self.wire_dtype = policy.reduce_dtype if policy.reduce_dtype and first.is_floating_point() else first.dtype
        self.kept_dtype = torch.promote_types(self.wire_dtype, first.dtype)
        self.nbytes = plan.numel * self.wire_dtype.itemsize
        self.mine = plan.range_of(policy.collectives.group_rank)
        self.shard = torch.zeros(0, dtype=self.kept_dtype, device=self.device)
        self.kept = [False] * len(self.params)  # whose range of the shard holds a gradient that is added to
        self.gradients: list[ShardGrad] = []
        self.left: dict[int, tuple[int, int]] = {}  # whole gradients as passes without synchronising left them
        self.policy = policy
        self._local_grads: list[Tensor | None] = [None] * len(self.params)  # the pass's gradients, flat
        self._pool_buffers: list[Tensor] = []  # the pool's memory among them and in the runs
        self._zero = torch.zeros(1, dtype=self.wire_dtype, device=self.device)
        self.runs = self._make_runs()
        self._alone = {run.positions[0] for run in self.runs if run.alone}
        # What leaves its own memory as it is can be sent from there; float16 is scaled before.
        self._sent_as_is = self.wire_dtype is not torch.float16
        ranks = range(policy.collectives.world_size)
        self.messages = [self._messages_for(rank) for rank in ranks]

    def _make_runs(self) -> list[GradientSpan]:
        plan, ranks = self.plan, self.policy.collectives.world_size
        if not self.policy.collectives.uses_pairwise(self.device):
            length = plan.longest * ranks if plan.equal else plan.numel
            return [GradientSpan(0, length, len(self.params) == 1, list(range(len(self.params))))]
        runs: list[GradientSpan] = []
        for position, (param, offset) in enumerate(zip(self.params, plan.offsets, strict=True)):
            large = param.numel() * self.wire_dtype.itemsize >= limits.DIRECT_GRADIENT_BYTES
            if large or not runs or runs[-1].alone:
                runs.append(GradientSpan(offset, param.numel(), large or len(self.params) == 1, [position]))
            else:
                runs[-1].numel = offset + param.numel() - runs[-1].start
                runs[-1].positions.append(position)
        return runs

    def _messages_for(self, rank: int) -> list[OwnerMessage]:
        start, stop = self.plan.range_of(rank)
        step = message_length(self.policy.collectives.world_size, self.wire_dtype.itemsize)
        messages = []
        for run in self.runs:
            low, high = max(run.start, start), min(run.start + run.numel, stop)
            for first in range(low, high, step):
                last = min(first + step, high)
                part, home = slice(first - run.start, last - run.start), slice(first - start, last - start)
                messages.append(OwnerMessage(run, part, home))
        return messages

    def begin(self, pool: BufferPool) -> None:
        """Forget what an earlier backward pass has brought."""
        self.give_back(pool)
        self.arrived = [False] * len(self.params)
        self.missing = sum(param.requires_grad for param in self.params)
        self.launched = False
        self.aside: set[int] = set()  # whose earlier range was taken out of param.grad

    def give_back(self, pool: BufferPool) -> None:
        """Let go of the pass's gradients."""
        pool.give_back(*self._pool_buffers)
        self._pool_buffers.clear()
        self._local_grads = [None] * len(self.params)
        for run in self.runs:
            run.memory = None

    def allocate(self) -> None:
        """Make the memory of this rank's range, once, and what ``param.grad`` shows of it."""
        if self.gradients:
            return
        start, stop = self.mine
        self.shard = torch.zeros(stop - start, dtype=self.kept_dtype, device=self.device)
        for param, offset in zip(self.params, self.plan.offsets, strict=True):
            low, high = max(offset, start), min(offset + param.numel(), stop)
            local = self.shard[low - start : high - start] if low < high else self.shard[:0]
            self.gradients.append(ShardGrad(local, param, self.policy.collectives))

    def put(self, position: int, gradient: Tensor, pool: BufferPool) -> None:
        """Take in one parameter's gradient."""
        param = self.params[position]
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self.names[position]!r} has a sparse gradient, which cannot be divided among ranks; "
                "make its module produce dense ones (sparse=False), or, if that is an nn.Embedding, let "
                "ShardedDataParallel(sparse_embeddings=True) choose"
            )
        self.check_first(position)
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._can_be_held(gradient, param):
            # Nothing to copy. It is only read, because others may hold the same memory.
            self._local_grads[position] = gradient if gradient.dim() == 1 else flat_view(gradient)
        else:
            numel = param.numel()
            if position in self._alone:
                memory = self._take(numel, pool)
            else:
                memory = torch.empty(numel, dtype=self.wire_dtype, device=self.device)
            memory.as_strided(param.shape, param.stride(), memory.storage_offset()).copy_(gradient)
            self._local_grads[position] = memory
        self.note_arrival(position)

    def check_first(self, position: int) -> None:
        """Raise if the pass has brought this gradient already."""
        if self.arrived[position] or self.launched:
            raise RuntimeError(
                f"parameter {self.names[position]!r} got a gradient twice in one backward pass; with activation "
                "checkpointing use use_reentrant=False"
            )

    def note_arrival(self, position: int) -> None:
        """Count a gradient that was taken in."""
        self.missing -= 1
        self.arrived[position] = True

    def _can_be_held(self, gradient: Tensor, param: Tensor) -> bool:
        if gradient.dtype != self.wire_dtype or not self._sent_as_is or gradient.stride() != param.stride():
            return False
        return not gradient.is_conj() and not gradient.is_neg()

    def close(self, pool: BufferPool) -> None:
        """The end of collecting: put small gradients together, and zeros where nothing came."""
        self.note_missing()
        for run in self.runs:
            held = self._local_grads[run.positions[0]]
            if run.alone and held is not None and held.numel() == run.numel:
                run.memory = held
            else:
                run.memory = self._take(run.numel, pool)
                torch.cat(self._parts(run), out=run.memory)
            if not self._sent_as_is:
                run.memory.mul_(self.policy.scale)  # a sum of many could leave its narrow range

    def note_missing(self) -> None:
        """Nothing comes any more: what has not come is as it was."""
        self.launched = True
        for position, arrived in enumerate(self.arrived):
            if not arrived:
                self.kept[position] = position in self.aside or isinstance(self.params[position].grad, ShardGrad)

    def _take(self, numel: int, pool: BufferPool) -> Tensor:
        """Memory of the pool's, until the pass ends."""
        self._pool_buffers.append(pool.take(numel, self.wire_dtype, self.device))
        return self._pool_buffers[-1]

    def _parts(self, run: GradientSpan) -> list[Tensor]:
        """What a run consists of."""
        parts, end = [], run.start
        for position in run.positions:
            offset, numel = self.plan.offsets[position], self.params[position].numel()
            if end < offset:
                parts.append(self._zero.expand(offset - end))
            held = self._local_grads[position]
            parts.append(self._zero.expand(numel) if held is None else held)
            end = offset + numel
        if end < run.start + run.numel:
            parts.append(self._zero.expand(run.start + run.numel - end))
        return parts

    def outgoing(self) -> list[list[Tensor]]:
        """What each rank is sent, by rank."""
        here = self.policy.collectives.group_rank
        return [
            [] if rank == here else [message.values for message in messages]
            for rank, messages in enumerate(self.messages)
        ]

    def clear(self, kept: Sequence[bool]) -> None:
        """Before the shard is added to: clear what belongs to parameters that begin anew."""
        for gradient, keeps in zip(self.gradients, kept, strict=True):
            if not keeps:
                gradient.local.zero_()

    def leave(self, position: int) -> None:
        """Remember a whole gradient that a pass without synchronising has left."""
        gradient = self.params[position].grad
        assert gradient is not None
        self.left[position] = (id(gradient), version_of(gradient))

    def is_as_left(self, position: int) -> bool:
        """Whether a whole gradient is still what :meth:`leave` saw, or at least was not zeroed."""
        gradient = self.params[position].grad
        assert gradient is not None
        same = self.left.get(position) == (id(gradient), version_of(gradient))
        return same or bool(torch.count_nonzero(gradient.coalesce().values() if gradient.is_sparse else gradient))
