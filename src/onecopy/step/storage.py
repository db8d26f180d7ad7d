"""Where the memory of the parameters is: in place, or in flat buckets.

A storage has the memory ranges that each owner sends after a step. It notices parameters that were moved since, by
``model.to()``, ``param.data = ...`` and the like.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.comm.sharing import OwnedMemory, Sharing
from onecopy.common.flat_views import as_bytes, flat_view
from onecopy.layout import Layout

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes to which a parameter's start in a bucket is aligned, for vectorised kernels."""


class Storage:
    """Every parameter stays in place. There is one memory range per shard; small ranges are packed to be sent.

    Attributes:
        flats: the flat memory of each parameter.
        ranges: the memory that each owner sends.
        convertible: whether parameters may get another dtype or device while there is no state.
    """

    convertible = True

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = list(params)
        # These views keep the old memory alive if a parameter moves. So its address is not used again, and an equal
        # address means the same memory.
        self.flats = [flat_view(param.detach()) for param in self._params]
        self._addresses = [flat.data_ptr() for flat in self.flats]
        # A change of strides is a move, too. Tensors of one dimension have only one order of elements.
        self._matrices = [param for param in self._params if param.dim() > 1]
        self._strides = [param.stride() for param in self._matrices]
        self.ranges = tuple(
            _owned_memory(shard.owner, (shard.param,), self.flats[shard.param][shard.start : shard.stop])
            for shard in layout.shards
        )

    def moved(self) -> list[int]:
        """The indices of parameters that were moved."""
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

    def plan_sharing(self, collectives: Collectives) -> Sharing:
        """Plan the messages that share all memory ranges."""
        return Sharing(collectives, self.ranges)


class BucketStorage(Storage):
    """Whole parameters are in flat buckets with one owner each, so that nothing is packed to be sent.

    A parameter that is cut needs no bucket: its shards are contiguous. A bucket has at most ``limits.MESSAGE_BYTES``,
    or one parameter, so that filling it needs little extra memory.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        buckets = [_fill_bucket(params, members) for members in _plan_buckets(layout)]
        super().__init__(params, layout)
        cut = set(layout.cut_params)
        owner = {shard.param: shard.owner for shard in layout.shards}
        self.ranges = (
            *(_owned_memory(owner[members[0]], members, memory) for members, memory in buckets),
            *(each for each in self.ranges if each.params[0] in cut),
        )


def storage_class_for(parameters_as_bucket_view: bool, overlap_with_ddp: bool) -> type[Storage]:
    """Return the storage class for an optimizer's arguments."""
    if parameters_as_bucket_view and overlap_with_ddp:
        logger.warning("parameters_as_bucket_view=True is ignored: overlap_with_ddp=True sends DDP's buckets")
    return BucketStorage if parameters_as_bucket_view and not overlap_with_ddp else Storage


def _plan_buckets(layout: Layout) -> list[tuple[int, ...]]:
    """The whole parameters of each bucket, in order."""
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


def _fill_bucket(params: Sequence[Tensor], members: tuple[int, ...]) -> tuple[tuple[int, ...], Tensor]:
    """Allocate one bucket and move its parameters into it; return them with the memory of the bucket."""
    first = params[members[0]]
    sizes = [_aligned(params[index].numel() * first.element_size()) for index in members]
    # Zeroed, because the gaps between parameters are sent, too.
    memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=first.device)
    flat = memory.view(first.dtype)
    offset = 0
    for index, size in zip(members, sizes, strict=True):
        param = params[index]
        view = flat.as_strided(param.shape, param.stride(), offset // first.element_size())
        view.copy_(param.detach())
        param.data = view
        offset += size
    return members, flat


def _owned_memory(owner: int, params: tuple[int, ...], flat: Tensor) -> OwnedMemory:
    return OwnedMemory(owner, params, as_bytes(flat), flat.element_size())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
