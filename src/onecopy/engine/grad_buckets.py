"""One bucket's gradients: how they are taken in, what is kept of them, and how ranks' parts are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.engine.collectives import Collectives
from onecopy.engine.flat import flat_view
from onecopy.engine.pool import Pool
from onecopy.engine.shard_grad import ShardGrad
from onecopy.engine.torch_private import version_of
from onecopy.layout import BucketPlan

CACHED_ELEMENTS = 1 << 18
"""Adding up goes over so many elements at a time: they stay in the processor's cache for the next operation."""


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


class Bucket:
    """One bucket's gradients: those of a backward pass, and the range that this rank keeps of them."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor], names: Sequence[str], policy: Policy) -> None:
        first = params[0]
        self.plan, self.params, self.names = plan, list(params), list(names)
        self.device = first.device
        self.wire_dtype = policy.reduce_dtype if policy.reduce_dtype and first.is_floating_point() else first.dtype
        self.kept_dtype = torch.promote_types(self.wire_dtype, first.dtype)
        self.mine = plan.range_of(policy.collectives.group_rank)
        self.shard = torch.zeros(0, dtype=self.kept_dtype, device=self.device)
        self.kept = [False] * len(self.params)  # whose range of the shard holds a gradient that is added to
        self.gradients: list[ShardGrad] = []
        self.left: dict[int, tuple[int, int]] = {}  # whole gradients as passes without synchronising left them
        self.buffer: Tensor | None = None
        self._policy = policy
        ranks = policy.collectives.world_size
        self._capacity = plan.longest * ranks if plan.equal else plan.numel

    def begin(self, pool: Pool) -> None:
        """Forget what an earlier backward pass has brought."""
        if self.buffer is not None:
            pool.give_back(self.buffer)
        self.arrived = [False] * len(self.params)
        self.missing = sum(param.requires_grad for param in self.params)
        self.launched = False
        self.aside: set[int] = set()  # whose earlier range was taken out of param.grad
        self.buffer = None
        self._borrowed = False

    def allocate(self) -> None:
        """Make the memory of this rank's range, once, and what ``param.grad`` shows of it."""
        if self.gradients:
            return
        start, stop = self.mine
        self.shard = torch.zeros(stop - start, dtype=self.kept_dtype, device=self.device)
        for param, offset in zip(self.params, self.plan.offsets, strict=True):
            low, high = max(offset, start), min(offset + param.numel(), stop)
            local = self.shard[low - start : high - start] if low < high else self.shard[:0]
            self.gradients.append(ShardGrad(local, param, self._policy.collectives))

    def put(self, position: int, gradient: Tensor, pool: Pool) -> None:
        """Take in one parameter's gradient, or add it to what has come before in this pass."""
        param, offset = self.params[position], self.plan.offsets[position]
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"parameter {self.names[position]!r} has a sparse gradient, which cannot be divided among ranks; "
                "make its module produce dense ones (sparse=False)"
            )
        if self.launched:
            raise RuntimeError(
                f"parameter {self.names[position]!r} got a gradient twice in one backward pass, after it had been "
                "reduced; with activation checkpointing use use_reentrant=False"
            )
        alone = len(self.params) == 1 and not self.arrived[position] and self.wire_dtype is not torch.float16
        if alone and gradient.stride() == param.stride() and gradient.dtype == self.wire_dtype:
            # It is the bucket: nothing to copy. It is only read, because others may hold the same memory.
            self.buffer = flat_view(gradient)
            self._borrowed = True
        else:
            if self.buffer is None or self._borrowed:
                mine = self._take(pool)
                if self.buffer is not None:
                    mine[: self.buffer.numel()].copy_(self.buffer)
                self.buffer = mine
                self._borrowed = False
            home = self.buffer.as_strided(param.shape, param.stride(), self.buffer.storage_offset() + offset)
            if self.arrived[position]:
                home.add_(gradient)
            else:
                home.copy_(gradient)
        self.missing -= not self.arrived[position]
        self.arrived[position] = True

    def close(self, pool: Pool) -> Tensor:
        """All gradients, with zeros for those that did not come."""
        self.launched = True
        for position, param in enumerate(self.params):
            if not self.arrived[position]:
                self.kept[position] = position in self.aside or isinstance(param.grad, ShardGrad)
        if self.buffer is None:
            self.buffer = self._take(pool)
        end = 0
        for param, offset, arrived in zip(self.params, self.plan.offsets, self.arrived, strict=True):
            self.buffer[end:offset].zero_()
            end = offset + param.numel()
            if not arrived:
                self.buffer[offset:end].zero_()
        self.buffer[end:].zero_()
        return self.buffer

    def _take(self, pool: Pool) -> Tensor:
        return pool.take(self._capacity, self.wire_dtype, self.device)

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
        return same or bool(torch.count_nonzero(gradient))


def sum_into(target: Tensor, rows: Sequence[Tensor], scale: float, keep: bool = False) -> None:
    """Write (or, with ``keep``, add) the sum of ``rows`` in rank order, times ``scale``, into ``target``.

    The order is fixed, so that the result depends neither on who owns what nor on where buckets end. Scaling the sum
    of two is bit by bit the sum of two scaled, short of the smallest numbers.
    """
    for start in range(0, target.numel(), CACHED_ELEMENTS):
        part = target[start : start + CACHED_ELEMENTS]
        first, *others = [row[start : start + CACHED_ELEMENTS] for row in rows]
        total = torch.empty_like(part) if keep else part
        if others:
            torch.add(first, others[0], out=total)
            for other in others[1:]:
                total.add_(other)
            if scale != 1.0:
                total.mul_(scale)
        else:
            torch.mul(first, scale, out=total)
        if keep:
            part.add_(total)
