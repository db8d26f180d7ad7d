"""Digests by which ranks compare values; each fits into one status flag (a 64-bit integer)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def flag_digest(parts: Iterable[bytes]) -> int:
    """Return a digest of byte strings, one after the other, as a number that is never negative."""
    text = hashlib.blake2b(digest_size=7)
    for part in parts:
        text.update(part)
    return int.from_bytes(text.digest(), "big")
