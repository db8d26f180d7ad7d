"""Tensors seen as flat memory, in storage order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape fills a contiguous stretch of memory, each element once, in any order."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor as one dimension, in the order in which memory holds them, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The flat memory of each tensor, without its history."""
    return [flat_view(tensor.detach()) for tensor in tensors]


def flat_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of ``tensor`` in the order in which ``like`` holds its own; a copy only if the strides differ."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return flat_view(tensor)


def as_bytes(flat: Tensor) -> Tensor:
    """A flat tensor's memory as bytes, so that one message can carry several data types."""
    return flat.view(torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """The content of contiguous byte memory."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())


def dense_copy(tensor: Tensor) -> Tensor:
    """The tensor itself if its memory is dense, else a contiguous copy."""
    if is_dense(tuple(tensor.shape), tensor.stride()):
        return tensor
    return tensor.contiguous()
