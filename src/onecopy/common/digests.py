"""Digests by which ranks compare values, and by which a checkpoint knows tensors that it does not have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onecopy.common.flat_views import as_bytes, to_bytes
from onecopy.common.tensor_subclasses import leaves_of

_BLOCK_BYTES = 4 << 20
"""Bytes of a tensor that are copied to the CPU at a time."""

_BLOCK_ELEMENTS = 1 << 18
"""Elements of a tensor of which a checksum is computed at a time, because integers need more memory."""

_INTEGERS = {1: torch.int8, 2: torch.int16}
"""The integers with as many bytes as an element; longer elements are seen as several of 4 bytes.

The highest bit of one of 8 bytes would count equally at each position, so that two of them would cancel out.
"""

_FACTOR = 6364136223846793005
"""An odd number: products with it differ, modulo 2**64, where the other factors do."""


def flag_digest(parts: Iterable[bytes]) -> int:
    """Return a digest of byte strings, one after the other, as a number of 40 bits for a vote of the ranks."""
    text = hashlib.blake2b(digest_size=5)
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


def tensor_checksums(flats: Sequence[Tensor]) -> list[int]:
    """Return a checksum of the bits of each flat tensor, computed on its device; the host reads each device once."""
    places: dict[torch.device, list[int]] = {}
    for place, flat in enumerate(flats):
        places.setdefault(flat.device, []).append(place)
    found = [0] * len(flats)
    for device, same in places.items():
        mixed = torch.arange(_BLOCK_ELEMENTS, device=device) * _FACTOR
        weights = (mixed ^ (mixed >> 31)) * _FACTOR * 2 + 1
        checksums = torch.stack([_checksum(flats[place], weights) for place in same]).tolist()
        for place, checksum in zip(same, checksums, strict=True):
            found[place] = checksum
    return found


def _checksum(flat: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the bits of all elements, modulo 2**64, each with the weight of its position.

    Weights are odd, so that one bit that differs always shows. In a sum without weights two elements that differ by
    rounding in opposite directions would cancel out.
    """
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in bits.split(len(weights)):
        total = total * _FACTOR + (block * weights[: len(block)]).sum()
    return total
