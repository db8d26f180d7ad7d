"""The manifest of a checkpoint, as dataclasses and as ``manifest.json``. Nothing here uses live tensors or processes.

Every tensor is described in full (dtype, shape, strides) and divided into pieces. A piece is a flat range in memory
order, and one tensor of the safetensors file of the rank that wrote it. A *tree* is plain data as tagged JSON, with
keys in place of tensors. Every byte of every file has a CRC-32: one for each block of ``BLOCK_BYTES`` of a piece, one
for the header of each file, and one for the manifest. With a key there are SHA-256 digests beside these checksums, and
the manifest begins with an HMAC of itself.
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

from onecopy.checkpoint.manifest_checks import DICTS, MalformedError, check_content, is_count, read_json
from onecopy.checkpoint.signing import SigningKey
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError, CorruptCheckpointError

FORMAT = "onecopy checkpoint"
VERSION = 3
"""The newest version of the format. A checkpoint has the lowest version that can describe it."""

_TAGS_OF_2 = (b'["subclass",', b'["dtype",', b'["Size",')
"""Tensors of subclasses, dtypes and sizes are not in version 1. The tags are not found inside a string, where quotation
marks are escaped. Version 3 has the field ``base``, or a signature."""

NAME = "manifest.json"
FOLDER_NAME = re.compile(r"step-(\d{8,})")
"""The names of the directories of checkpoints."""

BLOCK_BYTES = 4 << 20
"""A piece has one checksum for each block of this size, so that a part of the piece can be checked alone."""

_SEAL = re.compile(rb'^\{"crc32":"([0-9a-f]{8})",')
_SIGNATURE = re.compile(rb'^"hmac":"([0-9a-f]{64})",')
_BLANK = b"0" * 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor in memory order, with their file, the offset in it, and checksums.

    ``sha256`` has a digest for each checksum if the checkpoint is signed.
    """

    file: str
    offset: int
    start: int
    stop: int
    crc32: tuple[int, ...]
    sha256: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype, shape, strides, and its pieces in order."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class File:
    """One rank's file: its size, the size of its header with the length in front, and the checksum of the header.

    ``sha256`` is the digest of the header if the checkpoint is signed.
    """

    size: int
    header: int
    crc32: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class SavedParam:
    """Shape, strides and dtype of an optimizer's parameter; the shape is None if a converted file does not have it."""

    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """One optimizer.

    Attributes:
        kind: the full name of its class; empty if unknown.
        named: whether its parameters have the model's names.
        params: its parameters by name.
        groups: for each parameter group ``options``, a tree, and ``params``, names.
        state: a tree of the state of each parameter, by name.
    """

    kind: str
    named: bool
    params: dict[str, SavedParam]
    groups: tuple[dict[str, Any], ...]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrozenParam:
    """A parameter that a checkpoint with ``trainable_only`` does not have: its dtype, shape and ``tensor_digest``."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a whole checkpoint.

    Attributes:
        step: the step it was saved under.
        world_size: the number of ranks that wrote it.
        written_by: versions of the libraries.
        fingerprint: a digest of the model's names, shapes and dtypes and of the optimizers' classes and groups.
        files: the files by name.
        tensors: the tensors by key.
        model: a tree for each name of the model's state dict; None if no model was saved.
        optimizers: the optimizers, in the order in which they were saved.
        extra: the tree of ``extra``.
        per_rank: the tree of each rank's ``PerRank`` values.
        base: the frozen parameters by name, if only the trainable ones were saved; else None.
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
    base: dict[str, FrozenParam] | None = None


def dump(manifest: Manifest, key: SigningKey | None = None) -> bytes:
    """Return the manifest as JSON that begins with its own checksum and, with a key, an HMAC of all that follows."""
    content = {"format": FORMAT, "version": 1, "block_bytes": BLOCK_BYTES, **asdict(manifest)}
    if manifest.base is None:
        del content["base"]
    if key is None:
        pieces = [piece for entry in content["tensors"].values() for piece in entry["pieces"]]
        for described in (*content["files"].values(), *pieces):
            del described["sha256"]
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    version = 2 if any(tag in text for tag in _TAGS_OF_2) else 1
    if manifest.base is not None or key is not None:
        version = 3
    if version > 1:
        content["version"] = version
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    front = b'{"crc32":"' + _BLANK + b'",' + (b'"hmac":"' + key.sign(text[1:]) + b'",' if key else b"")
    blank = front + text[1:]
    return blank.replace(_BLANK, b"%08x" % zlib.crc32(blank), 1)


def parse(text: bytes, where: str, key: SigningKey | None = None) -> Manifest:
    """Parse the JSON of a manifest, of which nothing is trusted; ``where`` is its path, for messages.

    Raises:
        CorruptCheckpointError: if a byte is not as it was written, if a value is malformed, or if ``key`` is given and
            the manifest was not signed with it.
        CheckpointError: if a newer version wrote it.
    """
    seal = _SEAL.match(text)
    if seal is None or zlib.crc32(text.replace(seal[1], _BLANK, 1)) != int(seal[1], 16):
        raise CorruptCheckpointError(f"{where} is damaged: its checksum does not match its content")
    if key is not None:
        _check_signature(text[seal.end() :], where, key)
    try:
        return _parsed(read_json(text), where, key is not None)
    except (MalformedError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is malformed: {error}") from None


def _check_signature(signed: bytes, where: str, key: SigningKey) -> None:
    """Raise unless the text after the checksum begins with the HMAC of the rest."""
    signature = _SIGNATURE.match(signed)
    if signature is None:
        raise CorruptCheckpointError(f"{where} is not signed, and a key was given: it may be from anybody")
    if not key.verify(signed[signature.end() :], signature[1]):
        raise CorruptCheckpointError(f"{where} was changed after it was signed, or was signed with another key")


def _parsed(content: dict[str, Any], where: str, signed: bool) -> Manifest:
    """Return the manifest in a JSON object; raise if a value is malformed."""
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a onecopy checkpoint")
    version, block_bytes = content.get("version"), content.get("block_bytes")
    if not (is_count(version, 1) and is_count(block_bytes)):
        raise MalformedError("it has no version")
    assert isinstance(version, int)
    if version > VERSION:
        raise CheckpointError(
            f"{where} was written in version {version} of the format, and this onecopy reads up to version "
            f"{VERSION}: install a newer onecopy"
        )
    if block_bytes != BLOCK_BYTES:
        raise CheckpointError(f"{where} has checksums for blocks of {block_bytes} bytes, not {BLOCK_BYTES}")
    check_content(content, BLOCK_BYTES)
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
        base=_base(content.get("base")),
    )
    _check_references(manifest, where)
    if signed:
        _check_digests(manifest)
    return manifest


def _entry(fields: Mapping[str, Any]) -> Entry:
    pieces = tuple(
        Piece(**{**piece, "crc32": tuple(piece["crc32"]), "sha256": tuple(piece.get("sha256", ()))})
        for piece in fields["pieces"]
    )
    return Entry(fields["dtype"], tuple(fields["shape"]), tuple(fields["stride"]), pieces)


def _base(fields: Mapping[str, Any] | None) -> dict[str, FrozenParam] | None:
    if fields is None:
        return None
    return {name: FrozenParam(each["dtype"], tuple(each["shape"]), each["digest"]) for name, each in fields.items()}


def _optimizer(fields: Mapping[str, Any]) -> SavedOptimizer:
    params = {
        name: SavedParam(_shape(param["shape"]), tuple(param["stride"]), param["dtype"])
        for name, param in fields["params"].items()
    }
    return SavedOptimizer(fields["kind"], fields["named"], params, tuple(fields["groups"]), fields["state"])


def _shape(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def _check_references(manifest: Manifest, where: str) -> None:
    """Raise unless each tree refers to tensors that exist, by the keys that a save gives them, each once.

    Names of a model may share a tensor. Anywhere else a shared one would be two values in the same memory.
    """
    trees: list[tuple[str | None, Any]] = [(None, tree) for tree in (manifest.model or {}).values()]
    trees += [("extra", manifest.extra), *((f"rank{rank}", tree) for rank, tree in enumerate(manifest.per_rank))]
    for number, optimizer in enumerate(manifest.optimizers):
        trees += [(f"optimizer.{number}/{name}", tree) for name, tree in optimizer.state.items()]
        trees += [(f"optimizer.{number}/group{place}", g["options"]) for place, g in enumerate(optimizer.groups)]
    for prefix, tree in trees:
        keys = list(keys_in(tree))
        for key in keys:
            if key not in manifest.tensors:
                raise CorruptCheckpointError(f"{where} refers to a tensor {key!r} that it does not have")
        if prefix is None:
            expected = [key if key.startswith("model/") else "" for key in keys]
        elif "/" not in prefix:
            expected = [f"{prefix}/{number}" for number in range(len(keys))]
        else:
            positions: Any = {key: position for position, key in enumerate(keys)}
            expected = [f"{prefix}/{name}" for name in names_of_tensors(with_keys(tree, positions), len(keys))]
        if keys != expected:
            raise MalformedError(f"the tensors of {prefix or 'the model'} have the keys of others")


def _check_digests(manifest: Manifest) -> None:
    """Raise unless everything that a signed checkpoint has a checksum for has a digest, too."""
    pieces = (piece for entry in manifest.tensors.values() for piece in entry.pieces)
    if not all(file.sha256 for file in manifest.files.values()) or any(
        len(piece.sha256) != len(piece.crc32) for piece in pieces
    ):
        raise MalformedError("it is signed, but has no digests of the data")


def value_of(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the value that a tree describes, with ``tensors[key]`` in the place of a key.

    Raises:
        CheckpointError: if a tensor of a subclass cannot be rebuilt.
    """
    try:
        return tagged_json.decode(tree, tensors)  # type: ignore[arg-type]  # keys stand where positions do
    except Exception as error:  # of the subclass, which is given whatever was saved
        raise CheckpointError(f"a saved tensor of a subclass cannot be rebuilt: {error}") from error


def keys_in(tree: Any) -> Iterator[str]:
    """Yield the keys of all tensors in a tree of the manifest."""
    return (content for kind, content in _branches(tree) if kind == "tensor")


def part_keys(tree: Any) -> set[str]:
    """Return the keys of the tensors that are parts of tensors of subclasses."""
    return {key for branch in _branches(tree) if branch[0] == "subclass" for key in keys_in(branch)}


def _branches(tree: Any) -> Iterator[list[Any]]:
    """Yield a tree and all trees in it, except plain values."""
    if isinstance(tree, list):
        yield tree
        kind, content = tree
        if kind in DICTS:
            for pair in content:
                for item in pair:
                    yield from _branches(item)
        elif kind not in ("tensor", "float"):
            for item in content:
                yield from _branches(item)


def with_keys(tree: Any, keys: Sequence[str]) -> Any:
    """Return a tree with keys in place of the tensor numbers of ``tagged_json.encode``."""
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind == "tensor":
        return [kind, keys[content]]
    if kind in DICTS:
        return [kind, [[with_keys(key, keys), with_keys(item, keys)] for key, item in content]]
    return tree if kind == "float" else [kind, [with_keys(item, keys) for item in content]]


def names_of_tensors(tree: Any, count: int) -> list[str]:
    """Return a name for each tensor in a tree: its key if the tree is a dict and the key a string, else its number."""
    names = [f"#{number}" for number in range(count)]
    if isinstance(tree, list) and tree[0] in DICTS:
        for key, item in tree[1]:
            if isinstance(key, str) and isinstance(item, list):
                _name_parts(names, item, key)
    else:
        _name_parts(names, tree, "")
    return names


def _name_parts(names: list[str], tree: Any, name: str) -> None:
    """Set the name of a tensor, or of each part of a tensor of a subclass: ``name.part``."""
    if isinstance(tree, list) and tree[0] == "tensor" and name:
        names[tree[1]] = name
    elif isinstance(tree, list) and tree[0] == "subclass":
        for part, item in tree[1][2][1]:
            _name_parts(names, item, f"{name}.{part}" if name else part)
