"""Where the parameters' memory is: left in place, or gathered in flat buckets.

Both kinds answer which pieces of memory each owner sends after a step, and which parameters have been moved since by
``model.to()``, ``param.data = ...`` and the like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.common.flat_views import as_bytes, flat_view
from onecopy.layout import Layout

ALIGNMENT = 64
"""Bytes to which a parameter's start in a bucket is aligned, for vectorised kernels."""


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """Contiguous memory (as bytes) of some parameters that one rank owns."""

    owner: int
    params: tuple[int, ...]
    memory: Tensor


class Storage(Protocol):
    """What the engine asks of either kind."""

    flats: list[Tensor]
    pieces: tuple[OwnedMemory, ...]
    direct_bytes: int
    convertible: bool  # whether parameters may get another type or device before there is state

    def moved(self) -> list[int]:
        """The parameters whose memory is no longer where it was."""


class InPlaceStorage:
    """Every parameter stays where it is; one piece per shard, and small pieces are packed for the way."""

    direct_bytes = limits.DIRECT_BYTES
    convertible = True

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = list(params)
        # These views keep the old memory alive if a parameter moves, so that its address is not used again and a
        # changed address always means changed memory.
        self.flats = [flat_view(param.detach()) for param in self._params]
        self._addresses = [flat.data_ptr() for flat in self.flats]
        # The same memory read in another order is another parameter, too; one dimension has only one order.
        self._matrices = [param for param in self._params if param.dim() > 1]
        self._strides = [param.stride() for param in self._matrices]
        self.pieces = tuple(
            OwnedMemory(shard.owner, (shard.param,), as_bytes(self.flats[shard.param][shard.start : shard.stop]))
            for shard in layout.shards
        )

    def moved(self) -> list[int]:
        """The parameters whose memory is no longer where it was."""
        addresses = list(map(Tensor.data_ptr, self._params))
        strides = [param.stride() for param in self._matrices]
        if addresses == self._addresses and strides == self._strides:
            return []
        restrided = {
            id(param) for param, old, new in zip(self._matrices, self._strides, strides, strict=True) if old != new
        }
        return [
            index
            for index, param in enumerate(self._params)
            if addresses[index] != self._addresses[index] or id(param) in restrided
        ]


class BucketStorage(InPlaceStorage):
    """Whole parameters live side by side in flat buckets, one owner to a bucket, so that nothing is packed.

    A parameter that is cut is contiguous by itself and needs no bucket. A bucket has at most
    ``limits.MESSAGE_BYTES`` (or one
    parameter), so that moving in needs little extra memory.
    """

    direct_bytes = 1

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        buckets = [_move_in(params, members) for members in _plan_buckets(layout)]
        super().__init__(params, layout)
        cut = set(layout.cut_params)
        owner = {shard.param: shard.owner for shard in layout.shards}
        self.pieces = (
            *(OwnedMemory(owner[members[0]], members, memory) for members, memory in buckets),
            *(piece for piece in self.pieces if piece.params[0] in cut),
        )


def _plan_buckets(layout: Layout) -> list[tuple[int, ...]]:
    """Which whole parameters share a bucket, in the order in which they lie there."""
    kinds: dict[tuple[int, int, torch.dtype], list[list[int]]] = {}
    sizes: dict[tuple[int, int, torch.dtype], int] = {}
    for shard in layout.shards:
        spec = layout.params[shard.param]
        if not layout.is_whole(shard) or spec.numel == 0:
            continue
        kind = (shard.owner, spec.device_ordinal, spec.dtype)
        if kind not in kinds or sizes[kind] + spec.nbytes > limits.MESSAGE_BYTES:
            kinds.setdefault(kind, []).append([])
            sizes[kind] = 0
        kinds[kind][-1].append(shard.param)
        sizes[kind] += _aligned(spec.nbytes)
    return [tuple(members) for buckets in kinds.values() for members in buckets]


def _move_in(params: Sequence[Tensor], members: tuple[int, ...]) -> tuple[tuple[int, ...], Tensor]:
    """Allocate one bucket, move its parameters in, and return them with the bucket's bytes."""
    first = params[members[0]]
    sizes = [_aligned(params[index].numel() * first.element_size()) for index in members]
    # Zeroed, because the gaps between parameters travel too.
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=first.device)
    flat = memory.view(first.dtype)
    offset = 0
    for index, size in zip(members, sizes, strict=True):
        param = params[index]
        home = flat.as_strided(param.shape, param.stride(), offset // first.element_size())
        home.copy_(param.detach())
        param.data = home
        offset += size
    return members, memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
