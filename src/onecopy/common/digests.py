"""Digests by which ranks compare values, and by which a checkpoint knows tensors that it does not have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

from onecopy.common.flat_views import as_bytes, to_bytes
from onecopy.common.tensor_subclasses import leaves_of

_BLOCK_BYTES = 4 << 20
"""Bytes of a tensor that are copied to the CPU at a time."""


def flag_digest(parts: Iterable[bytes]) -> int:
    """Return a digest of byte strings, one after the other, as a number for one status flag, never negative."""
    text = hashlib.blake2b(digest_size=7)
    for part in parts:
        text.update(part)
    return int.from_bytes(text.digest(), "big")


def tensor_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bytes, which does not depend on its strides or device."""
    text = hashlib.blake2b(digest_size=16)
    for leaf in leaves_of(tensor):
        text.update(f"{leaf.dtype} {tuple(leaf.shape)}\0".encode())
        flat = leaf.detach().contiguous().view(-1)
        for block in as_bytes(flat).split(_BLOCK_BYTES) if flat.numel() else ():
            text.update(to_bytes(block))
    return text.hexdigest()
