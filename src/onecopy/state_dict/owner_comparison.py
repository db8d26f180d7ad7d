"""The comparison of the owners of a cut parameter.

A parameter is *cut* if several ranks own a range of it. Its state then has tensors that are per element, of which each
owner has its range, and others (step counters) of which each owner has an equal copy. These copies are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor

from onecopy.common.flat_views import as_bytes, flat_view, to_bytes


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a CRC-32 of dense tensors, to compare the copies that several owners have."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(to_bytes(as_bytes(flat_view(tensor))), found)
    return found


def owners_differ(name: str, owners: str, values: str = "") -> str:
    """Return the error text for owners of a cut parameter whose state that is not per element differs."""
    return (
        f"parameter {name!r} is cut among ranks, but {owners} differ in state that is not per element{values}; "
        "keep parameters whole with elementwise=False"
    )
