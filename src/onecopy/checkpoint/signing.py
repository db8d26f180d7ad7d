"""Signs manifests with a key, so that a load can refuse checkpoints that others have written or changed."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

MIN_BYTES = 16


class SigningKey:
    """A secret with which checkpoints are signed (HMAC with SHA-256). It is in no message, log or ``repr``.

    Args:
        secret: at least 16 bytes that cannot be guessed, for example of ``secrets.token_bytes(32)``.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes):
            raise TypeError(f"the secret of a SigningKey must be bytes, got {type(secret).__qualname__}")
        if len(secret) < MIN_BYTES:
            raise ValueError(f"the secret of a SigningKey must have at least {MIN_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SigningKey:
        """Read the secret from a file, without line ends after it.

        Args:
            path: a file that only the user of the training can read.
        """
        return cls(Path(path).read_bytes().rstrip(b"\r\n"))

    @classmethod
    def from_environment(cls, name: str = "ONECOPY_CHECKPOINT_KEY") -> SigningKey:
        """Read the secret from an environment variable.

        Args:
            name: the name of the variable.
        """
        if name not in os.environ:
            raise KeyError(f"the environment variable {name} has no key to sign checkpoints with: set it on all ranks")
        return cls(os.environ[name].encode())

    def __repr__(self) -> str:
        return "SigningKey(...)"

    def sign(self, text: bytes) -> bytes:
        """Return the HMAC of a text as hexadecimal digits."""
        return hmac.digest(self._secret, text, "sha256").hex().encode()

    def verify(self, text: bytes, signature: bytes) -> bool:
        """Return whether a signature is that of a text, in a time that does not depend on the bytes that differ."""
        return hmac.compare_digest(self.sign(text), signature)


def check_key(key: object) -> None:
    """Raise ``TypeError`` if a ``key`` argument is not a key; the message does not have its value."""
    if key is not None and not isinstance(key, SigningKey):
        raise TypeError(
            f"key must be a checkpoint.SigningKey, got {type(key).__qualname__}: use SigningKey.from_file(path) or "
            "SigningKey.from_environment()"
        )


def digest(content: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of some bytes as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
