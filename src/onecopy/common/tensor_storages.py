"""The memory of tensors: the bytes of each distinct storage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch import Tensor

from onecopy.common.tensor_subclasses import leaves_of


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each distinct storage of some tensors, by address.

    A tensor that consists of others counts with their storages, and a sharded gradient with this rank's range.
    """
    found = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # the tensor has no storage
            for leaf in leaves_of(getattr(tensor, "local", tensor)):
                storage = leaf.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all distinct storages of some tensors."""
    return sum(storages(tensors).values())
