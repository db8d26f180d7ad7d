"""What a checkpoint holds, as plain values and as ``manifest.json``. Nothing here touches live tensors or processes.

Every tensor is described in full (type, shape, strides) and divided into pieces: flat ranges in memory order, each one
a tensor of the safetensors file of the rank that wrote it. Trees of plain data are tagged JSON in which a tensor
stands as its key. Every byte of every file is covered by a CRC-32: the pieces in blocks of ``BLOCK_BYTES``, the files'
headers, and the manifest by one of its own.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch

from onecopy.errors import CheckpointError, CorruptCheckpointError

FORMAT = "onecopy checkpoint"
VERSION = 1
NAME = "manifest.json"
BLOCK_BYTES = 4 << 20
"""A piece has one checksum for each block of this size, so that a part of it can be checked without the rest."""

DICTS = ("dict", "Counter", "OrderedDict")
"""Kinds of dicts in a tree."""

_SEAL = re.compile(rb'^\{"crc32":"([0-9a-f]{8})"')
_BLANK = b"0" * 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor, in memory order: which file, where in it, and a checksum per block."""

    file: str
    offset: int
    start: int
    stop: int
    crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: how it lies in memory, and its pieces in order."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its data type."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class File:
    """One rank's file: its size, that of its header with the length in front, and the checksum of those bytes."""

    size: int
    header: int
    crc32: int


@dataclass(frozen=True, slots=True)
class SavedParam:
    """What one optimizer knew of one parameter; the shape is None if a converted file does not tell it."""

    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """One optimizer: its class (empty if unknown), its groups (options as a tree, parameters by name), its state."""

    kind: str
    named: bool
    params: dict[str, SavedParam]
    groups: tuple[dict[str, Any], ...]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: the number it was saved under.
        world_size: how many ranks wrote it.
        written_by: versions of the libraries.
        fingerprint: of names, shapes and types of the model, and of class, parameters and groups of the optimizers.
        files: by name.
        tensors: by key.
        model: for each name of the model's state dict the key of its tensor, or a tree; None if none was saved.
        optimizers: in the order in which they were given.
        extra: the tree of what else was saved, and for each rank what it alone had.
    """

    step: int
    world_size: int
    written_by: dict[str, str]
    fingerprint: str
    files: dict[str, File]
    tensors: dict[str, Entry]
    model: dict[str, Any] | None
    optimizers: tuple[SavedOptimizer, ...]
    extra: Any
    per_rank: tuple[Any, ...]


def dump(manifest: Manifest) -> bytes:
    """The manifest as JSON that begins with its own checksum."""
    content = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES, **asdict(manifest)}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    blank = b'{"crc32":"' + _BLANK + b'",' + text[1:]
    return blank.replace(_BLANK, b"%08x" % zlib.crc32(blank), 1)


def parse(text: bytes, where: str) -> Manifest:
    """The manifest from JSON; ``where`` is its path, for messages.

    Raises:
        CorruptCheckpointError: if a byte is not as it was written.
        CheckpointError: if it was written by a newer version.
    """
    seal = _SEAL.match(text)
    if seal is None or zlib.crc32(text.replace(seal[1], _BLANK, 1)) != int(seal[1], 16):
        raise CorruptCheckpointError(f"{where} is damaged: its checksum does not match its content")
    content = json.loads(text)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a onecopy checkpoint")
    if content["version"] > VERSION:
        raise CheckpointError(
            f"{where} was written in version {content['version']} of the format, and this onecopy reads up to version "
            f"{VERSION}: install a newer onecopy"
        )
    if content["block_bytes"] != BLOCK_BYTES:
        raise CheckpointError(f"{where} has checksums for blocks of {content['block_bytes']} bytes, not {BLOCK_BYTES}")
    manifest = Manifest(
        step=content["step"],
        world_size=content["world_size"],
        written_by=content["written_by"],
        fingerprint=content["fingerprint"],
        files={name: File(**fields) for name, fields in content["files"].items()},
        tensors={key: _entry(fields) for key, fields in content["tensors"].items()},
        model=content["model"],
        optimizers=tuple(_optimizer(fields) for fields in content["optimizers"]),
        extra=content["extra"],
        per_rank=tuple(content["per_rank"]),
    )
    check_cover(manifest, where)
    return manifest


def _entry(fields: Mapping[str, Any]) -> Entry:
    pieces = tuple(Piece(**{**piece, "crc32": tuple(piece["crc32"])}) for piece in fields["pieces"])
    return Entry(fields["dtype"], tuple(fields["shape"]), tuple(fields["stride"]), pieces)


def _optimizer(fields: Mapping[str, Any]) -> SavedOptimizer:
    params = {
        name: SavedParam(_shape(param["shape"]), tuple(param["stride"]), param["dtype"])
        for name, param in fields["params"].items()
    }
    return SavedOptimizer(fields["kind"], fields["named"], params, tuple(fields["groups"]), fields["state"])


def _shape(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def check_cover(manifest: Manifest, where: str) -> None:
    """Raise unless every tensor is covered exactly once by pieces in known files, with the right checksums' number."""
    for key, entry in manifest.tensors.items():
        size, expected = entry.torch_dtype.itemsize, 0
        for piece in entry.pieces:
            blocks = -(-(piece.stop - piece.start) * size // BLOCK_BYTES)
            if piece.start != expected or piece.file not in manifest.files or len(piece.crc32) != blocks:
                raise CorruptCheckpointError(f"{where}: the pieces of {key!r} do not cover it exactly once")
            expected = piece.stop
        if expected != entry.numel:
            raise CorruptCheckpointError(f"{where}: the pieces of {key!r} end at {expected} of {entry.numel} elements")
    trees: list[Any] = [manifest.extra, *manifest.per_rank, *(manifest.model or {}).values()]
    for optimizer in manifest.optimizers:
        trees += [*optimizer.state.values(), *(group["options"] for group in optimizer.groups)]
    for tree in trees:
        for key in keys_in(tree):
            if key not in manifest.tensors:
                raise CorruptCheckpointError(f"{where} refers to a tensor {key!r} that it does not have")


def keys_in(tree: Any) -> Iterator[str]:
    """The keys of all tensors in a tree."""
    if isinstance(tree, list):
        kind, content = tree
        if kind == "tensor":
            yield content
        elif kind in DICTS:
            for key, item in content:
                yield from keys_in(key)
                yield from keys_in(item)
        elif kind != "float":
            for item in content:
                yield from keys_in(item)


def with_keys(tree: Any, keys: Sequence[str]) -> Any:
    """A tree whose tensors, numbered by the codec, stand as their keys instead."""
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind == "tensor":
        return [kind, keys[content]]
    if kind in DICTS:
        return [kind, [[with_keys(key, keys), with_keys(item, keys)] for key, item in content]]
    return tree if kind == "float" else [kind, [with_keys(item, keys) for item in content]]


def names_of_tensors(tree: Any, count: int) -> list[str]:
    """A name for each of the tensors in a tree: the key under which it lies in a dict of strings, or its number."""
    names = [f"#{number}" for number in range(count)]
    if isinstance(tree, list) and tree[0] in DICTS:
        for key, item in tree[1]:
            if isinstance(key, str) and isinstance(item, list) and item[0] == "tensor":
                names[item[1]] = key
    return names
