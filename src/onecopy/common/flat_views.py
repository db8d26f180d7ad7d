"""Flat, one-dimensional views of tensors, in storage order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor's elements fill a contiguous range of memory without gaps or overlap, in any order."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a dense tensor, in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a detached flat view of each tensor."""
    return [flat_view(tensor.detach()) for tensor in tensors]


def flat_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of ``tensor`` in the storage order of ``like``, and copy only if the strides differ."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return flat_view(tensor)


def as_bytes(flat: Tensor) -> Tensor:
    """Return a view of a flat tensor as bytes, so that one message can contain several data types."""
    return flat.view(torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """Return the content of a contiguous tensor of bytes."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())


def dense_copy(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is dense, else a contiguous copy."""
    if is_dense(tuple(tensor.shape), tensor.stride()):
        return tensor
    return tensor.contiguous()
