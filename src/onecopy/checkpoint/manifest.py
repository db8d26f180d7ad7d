"""The manifest of a checkpoint, as dataclasses and as ``manifest.json``. Nothing here uses live tensors or processes.

Every tensor is described in full (dtype, shape, strides) and divided into pieces. A piece is a flat range in memory
order, and one tensor of the safetensors file of the rank that wrote it. A *tree* is plain data as tagged JSON, with
keys in place of tensors. Every byte of every file has a CRC-32: one for each block of ``BLOCK_BYTES`` of a piece, one
for the header of each file, and one for the manifest.

A checksum finds damage, but it does not say who wrote a file. So ``parse`` trusts nothing: every value must have its
type and be in its range, every piece must be inside its file, and a tensor must fill its memory without gaps. All
pieces together must fill each file exactly. So loading never takes more memory than the files are long.
"""

from __future__ import annotations

import functools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import torch

from onecopy.common import tagged_json
from onecopy.common.flat_views import is_dense
from onecopy.errors import CheckpointError, CorruptCheckpointError
from onecopy.step.parameter_groups import NOT_OPTIONS

FORMAT = "onecopy checkpoint"
VERSION = 1
NAME = "manifest.json"

FOLDER_NAME = re.compile(r"step-(\d{8,})")
"""The names of the directories of checkpoints."""

FILE_NAME = re.compile(r"rank-[0-9]{5,9}(-[0-9a-f]{8})?\.safetensors")
"""The names that a save gives to files of tensors."""

BLOCK_BYTES = 4 << 20
"""A piece has one checksum for each block of this size, so that a part of the piece can be checked alone."""

MAX_BYTES = 256 << 20
"""The size of the largest manifest that is read."""

MAX_DEPTH = 100
"""The number of containers in which a value may be nested."""

MAX_DIMENSIONS = 64

SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""The dtypes that a checkpoint can have, with their names in safetensors files."""

DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_NAMES}

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_DICTS = ("dict", "Counter", "OrderedDict")
_LIMIT = 1 << 63
_SEAL = re.compile(rb'^\{"crc32":"([0-9a-f]{8})",')
_BLANK = b"0" * 8


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a tensor in memory order, with their file, the offset in it, and checksums."""

    file: str
    offset: int
    start: int
    stop: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One tensor: its dtype, shape, strides, and its pieces in order."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True)
class File:
    """One rank's file: its size, the size of its header with the length in front, and the checksum of the header."""

    size: int
    header: int
    crc32: int


@dataclass(frozen=True)
class SavedGroup:
    """One parameter group: its options, a tree, and the names of its parameters."""

    options: Any
    params: tuple[str, ...]


@dataclass(frozen=True)
class SavedOptimizer:
    """One optimizer."""

    kind: str  # the full name of its class
    named: bool  # whether its parameters have the model's names
    params: dict[str, tuple[int, ...]]  # shapes by name
    groups: tuple[SavedGroup, ...]
    state: dict[str, Any] = field(default_factory=dict)  # a tree of the state of each parameter, by name


@dataclass(frozen=True)
class FrozenParam:
    """A parameter that a checkpoint with ``trainable_only`` does not have: its dtype, shape and ``tensor_digest``."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The description of a whole checkpoint."""

    step: int
    world_size: int  # the number of ranks that wrote it
    written_by: dict[str, str]  # versions of the libraries
    files: dict[str, File]
    tensors: dict[str, Entry]  # by key
    model: dict[str, Any] | None  # a tree for each name of the model's state dict; None if no model was saved
    optimizers: tuple[SavedOptimizer, ...]  # in the order in which they were saved
    extra: Any  # a tree
    per_rank: tuple[Any, ...]  # the tree of each rank's PerRank values
    base: dict[str, FrozenParam] | None = None  # the frozen parameters, if only the trainable ones were saved


def dump(manifest: Manifest | Mapping[str, Any]) -> bytes:
    """Return the manifest, given as such or as JSON data, as JSON that begins with its own checksum."""
    values = vars(manifest) if isinstance(manifest, Manifest) else manifest
    content = {"format": FORMAT, "version": VERSION, "block_bytes": BLOCK_BYTES, **values}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, default=vars).encode()
    blank = b'{"crc32":"' + _BLANK + b'",' + text[1:]
    return blank.replace(_BLANK, b"%08x" % zlib.crc32(blank), 1)


# Parsing


class MalformedError(ValueError):
    """A manifest has a value that no save writes; the message says which."""


def parse(text: bytes, where: str) -> Manifest:
    """Parse the JSON of a manifest, of which nothing is trusted; ``where`` is its path, for messages.

    Raises:
        CorruptCheckpointError: if a byte is not as it was written, or if a value is malformed.
        CheckpointError: if it is not a manifest of this version.
    """
    seal = _SEAL.match(text)
    if seal is None or zlib.crc32(text.replace(seal[1], _BLANK, 1)) != int(seal[1], 16):
        raise CorruptCheckpointError(f"{where} is damaged: its checksum does not match its content")
    try:
        return _parsed(_read_json(text), where)
    except (MalformedError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is malformed: {error}") from None


def _read_json(text: bytes) -> dict[str, Any]:
    """Return the object in some JSON text; names that occur twice, NaN and infinities are refused."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except RecursionError:
        raise MalformedError("its values are nested too deep") from None
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(f"it is not JSON as a save writes it: {error}") from None
    if type(found) is not dict:
        raise MalformedError("it is not a JSON object")
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise MalformedError("a name occurs twice in one object")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedError(f"it has a number {name}")


def _parsed(content: dict[str, Any], where: str) -> Manifest:
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not the manifest of a onecopy checkpoint")
    version, block_bytes = content.get("version"), content.get("block_bytes")
    if type(version) is not int or type(block_bytes) is not int:
        raise MalformedError("it has no version")
    if version != VERSION:
        raise CheckpointError(f"{where} has version {version} of the format, and this onecopy reads version {VERSION}")
    if block_bytes != BLOCK_BYTES:
        raise CheckpointError(f"{where} has checksums for blocks of {block_bytes} bytes, not {BLOCK_BYTES}")
    outside = ("crc32", "format", "version", "block_bytes")
    found: Manifest = _typed(Manifest, {name: each for name, each in content.items() if name not in outside}, "it")
    tensors, model = found.tensors, found.model
    _need(found.world_size == len(found.per_rank) > 0, "'per_rank' is not a list with a value for each rank")
    _check_files_are_filled(found.files, tensors)
    for name in found.base or {}:
        _need(model is not None and name not in model, f"{_shown(name)} is in 'base', and the model has its value")
    for name, tree in (model or {}).items():
        keys = _checked_keys(tree, f"{name!r} of the model", tensors, where)
        _need(all(key.startswith("model/") for key in keys), "the tensors of the model have the keys of others")
    for number, tree in enumerate(found.per_rank):
        _check_tree(tree, f"the values of rank {number}", tensors, where, f"rank{number}", named=False)
    _check_tree(found.extra, "'extra'", tensors, where, "extra", named=False)
    for number, optimizer in enumerate(found.optimizers):
        _check_optimizer(optimizer, number, tensors, where)
    return found


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise MalformedError(problem)


def _shown(value: object) -> str:
    return f"{value!r:.60}" if type(value) is not int or abs(value) < _LIMIT else "a number with too many digits"


def is_count(value: object) -> bool:
    """Return whether a value is an integer from 0 on that fits into 63 bits."""
    return type(value) is int and 0 <= value < _LIMIT


def _typed(kind: Any, value: Any, what: str) -> Any:
    """Return JSON data as a value of a type; raise unless every part has exactly its type, and integers are counts.

    Trees, which are of type ``Any``, are checked later.
    """
    if kind is Any or (kind in (str, bool) and type(value) is kind) or (kind is int and is_count(value)):
        return value
    arguments: tuple[Any, ...] = get_args(kind)
    origin = get_origin(kind)
    if arguments and arguments[-1] is type(None):
        return None if value is None else _typed(arguments[0], value, what)
    if kind == _COUNTS and type(value) is list and all(map(is_count, value)):
        return tuple(value)
    if origin is tuple and type(value) is list and kind != _COUNTS:
        return tuple([_typed(arguments[0], item, what) for item in value])
    if origin is dict and type(value) is dict:
        return {key: _typed(arguments[1], item, key) for key, item in value.items()}
    if kind in _TYPES and type(value) is dict and value.keys() == _hints_of(kind).keys():
        return kind(**{name: _typed(hint, value[name], what) for name, hint in _hints_of(kind).items()})
    raise MalformedError(f"a value of {_shown(what)} is {_shown(value)}")


_hints_of = functools.cache(get_type_hints)
_COUNTS = tuple[int, ...]
_TYPES = (Manifest, File, Entry, Piece, SavedOptimizer, SavedGroup, FrozenParam)


def _check_files_are_filled(files: Mapping[str, File], tensors: Mapping[str, Entry]) -> None:
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for key, entry in tensors.items():
        _check_tensor(key, entry, used)
    for name, file in files.items():
        _need(FILE_NAME.fullmatch(name) is not None, f"{_shown(name)} is not the name of a file of a checkpoint")
        _need(8 <= file.header <= file.size, f"the description of {name} is malformed")
        position = file.header
        for start, stop in sorted(used[name]):
            if start != position and not start == stop <= file.size:
                raise MalformedError(f"pieces overlap in {name}, or leave a gap in it")
            position = max(position, stop)
        _need(position == file.size, f"{name} has {file.size} bytes, but its pieces end at {position}")


def _check_tensor(key: str, entry: Entry, used: dict[str, list[tuple[int, int]]]) -> None:
    """Check one tensor, and note in ``used`` where its pieces are in their files."""
    shape, stride = entry.shape, entry.stride
    if entry.dtype not in _DTYPES:
        raise MalformedError(f"{_shown(key)} has dtype {_shown(entry.dtype)}")
    itemsize, high, row_major = _DTYPES[entry.dtype].itemsize, 1, list[int]()
    for size in reversed(shape):
        row_major.insert(0, high)
        high *= size or 1
    if high * itemsize >= _LIMIT or len(shape) > MAX_DIMENSIONS:
        raise MalformedError(f"{_shown(key)} has shape {_shown(shape)}")
    if stride != tuple(row_major) and (len(stride) != len(shape) or not is_dense(shape, stride)):
        raise MalformedError(f"{_shown(key)} has strides {_shown(stride)}, which leave gaps in memory")
    expected = 0
    for piece in entry.pieces:
        nbytes = (piece.stop - piece.start) * itemsize
        if piece.file not in used:
            unknown = f"{_shown(piece.file)}, which is not a file of the checkpoint"
            raise MalformedError(f"the pieces of {_shown(key)} are in {unknown}")
        if piece.start != expected or nbytes < 0 or len(piece.crc32) != -(-nbytes // BLOCK_BYTES):
            raise MalformedError(f"the pieces of {_shown(key)} do not cover it exactly once")
        used[piece.file].append((piece.offset, piece.offset + nbytes))
        expected = piece.stop
    if expected != prod(shape):
        raise MalformedError(f"the pieces of {_shown(key)} end at {expected} of {prod(shape)} elements")


def _check_optimizer(optimizer: SavedOptimizer, number: int, tensors: Mapping[str, Entry], where: str) -> None:
    what, prefix, members = f"optimizer {number}", f"optimizer.{number}", list[str]()
    for place, group in enumerate(optimizer.groups):
        members += group.params
        options = _check_tree(group.options, f"the options of {what}", tensors, where, f"{prefix}/group{place}")
        _need(not options & set(NOT_OPTIONS), f"the options of {what} have an entry for parameters")
    _need(sorted(members) == sorted(optimizer.params), f"the groups of {what} do not have each parameter once")
    for name, tree in optimizer.state.items():
        if name not in optimizer.params:
            raise MalformedError(f"{what} has state for {_shown(name)}, which is not its parameter")
        _check_tree(tree, f"the state of {_shown(name)} in {what}", tensors, where, f"{prefix}/{name}")


# Trees


def _check_tree(
    tree: Any, what: str, tensors: Mapping[str, Entry], where: str, prefix: str, named: bool = True
) -> set[str]:
    """Check a tree that must be a dict, and whose tensors must have the keys of a save; return its text keys.

    Names of a model may share a tensor. Anywhere else a shared one would be two values in the same memory.
    """
    if type(tree) is not list or len(tree) != 2 or tree[0] not in _DICTS:
        raise MalformedError(f"{what} is not a dict")
    keys = _checked_keys(tree, what, tensors, where)
    names = names_of_tensors(tree) if named else range(len(keys))
    if keys != [f"{prefix}/{name}" for name in names] or len(set(keys)) < len(keys):
        raise MalformedError(f"the tensors of {prefix} have the keys of others")
    return {key for key, _ in tree[1] if type(key) is str}


def _checked_keys(tree: Any, what: str, tensors: Mapping[str, Entry], where: str) -> list[str]:
    keys: list[str] = []
    _check_value(tree, what, 0, keys)
    for key in keys:
        if key not in tensors:
            raise CorruptCheckpointError(f"{where} refers to a tensor {key!r} that it does not have")
    return keys


def _check_value(tree: Any, what: str, depth: int, keys: list[str]) -> Any:
    """Check a value; return something that is equal for values that are equal as keys of a dict, or None for no key."""
    if depth > MAX_DEPTH:
        raise MalformedError(f"{what} has values that are nested in more than {MAX_DEPTH} containers")
    if type(tree) is float and not math.isfinite(tree):
        raise MalformedError(f"{what} has a number {tree}")
    if type(tree) is not list:
        _need(type(tree) is not dict, f"{what} is malformed")
        return (tree,)
    if len(tree) != 2 or type(tree[0]) is not str:
        raise MalformedError(f"{what} is malformed")
    kind, content = tree
    if kind == "tensor":
        if type(content) is not str:
            raise MalformedError(f"{what} has a tensor without a key")
        keys.append(content)
        return (kind, content)
    if kind == "float":
        _need(content in ("nan", "inf", "-inf"), f"{what} has a number {_shown(content)}")
        return (object() if content == "nan" else float(content),)
    _need(type(content) is list, f"{what} is malformed")
    if kind in _DICTS:
        seen = set()
        for pair in content:
            if type(pair) is not list or len(pair) != 2:
                raise MalformedError(f"{what} is malformed")
            key = (pair[0],) if type(pair[0]) is str else _check_value(pair[0], what, depth + 1, keys)
            if key is None:
                raise MalformedError(f"{what} has a key that cannot be one")
            if key in seen:
                raise MalformedError(f"{what} has a key twice")
            seen.add(key)
            _check_value(pair[1], what, depth + 1, keys)
        return None
    found = tuple([_check_value(item, what, depth + 1, keys) for item in content])
    _check_kind(kind, content, what)
    return None if kind in ("list", "subclass") or None in found else (kind, found)


def _check_kind(kind: str, content: list[Any], what: str) -> None:
    if kind == "dtype":
        name = content[0] if len(content) == 1 else None
        _need(type(name) is str and isinstance(vars(torch).get(name), torch.dtype), f"{what} has an unknown dtype")
    elif kind == "Size":
        _need(all(type(item) is int and abs(item) <= _LIMIT for item in content), f"{what} has a malformed size")
    elif kind == "subclass":
        _need(len(content) == 5 and type(content[0]) is str, f"{what} has a malformed tensor of a subclass")
        _need(type(content[2]) is list and content[2][0] in _DICTS, f"{what} has a tensor of a subclass without parts")
    else:
        _need(kind in ("tuple", "list"), f"{what} has a value of type {_shown(kind)}")


def value_of(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the value that a tree describes, with ``tensors[key]`` in the place of a key.

    Raises:
        CheckpointError: if a tensor of a subclass cannot be rebuilt.
    """
    try:
        return tagged_json.decode(tree, tensors)  # type: ignore[arg-type]  # keys stand where positions do
    except Exception as error:  # of the subclass, which is given whatever was saved
        raise CheckpointError(f"a saved tensor of a subclass cannot be rebuilt: {error}") from error


def keys_in(tree: Any) -> list[str]:
    """Return the keys of all tensors in a tree of the manifest."""
    return [branch[1] for branch in _branches(tree) if branch[0] == "tensor"]


def part_keys(tree: Any) -> set[str]:
    """Return the keys of the tensors that are parts of tensors of subclasses."""
    return {key for branch in _branches(tree) if branch[0] == "subclass" for key in keys_in(branch)}


def _branches(tree: Any) -> Iterator[list[Any]]:
    if isinstance(tree, list):
        yield tree
        kind, content = tree
        for item in () if kind in ("tensor", "float") else content:
            for part in item if kind in _DICTS else (item,):
                yield from _branches(part)


def with_keys(tree: Any, keys: Sequence[str]) -> Any:
    """Return a tree with keys in place of the tensor numbers of ``tagged_json.encode``."""
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    if kind == "tensor":
        return [kind, keys[content]]
    if kind == "float":
        return tree
    if kind in _DICTS:
        return [kind, [[with_keys(part, keys) if type(part) is list else part for part in pair] for pair in content]]
    return [kind, [with_keys(item, keys) for item in content]]


def names_of_tensors(tree: Any) -> list[str]:
    """Return a name for each tensor in a dict of :func:`tagged_json.encode`, by which its key is made.

    The name is the key in the dict if that is text, else the tensor's number.
    """
    names = {}
    for key, item in tree[1]:
        if type(key) is str and type(item) is list and item[0] == "tensor":
            names[item[1]] = key
    return [names.get(tensor, f"#{number}") for number, tensor in enumerate(keys_in(tree))]
