"""Checks every value of a manifest that anybody may have written, before a file is opened or memory is allocated.

A checksum finds damage, but it does not say who wrote a file. So these checks trust nothing: every value must have its
type and be in its range, every piece must be inside its file, and a tensor must fill its memory without gaps. All
pieces together must fill each file exactly. So loading never takes more memory than the files are long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

import torch

from onecopy.common.flat_views import is_dense
from onecopy.step.parameter_groups import NOT_OPTIONS

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

MAX_BYTES = 256 << 20
"""The size of the largest manifest that is read."""

MAX_DEPTH = 100
"""The number of containers in which a value may be nested."""

MAX_DIMENSIONS = 64

DICTS = ("dict", "Counter", "OrderedDict")
"""Tags of the dict classes in a tree."""

FILE_NAME = re.compile(r"rank-[0-9]{5,9}\.safetensors")
"""The names that a save gives to files of tensors."""

_LIMIT = 1 << 63
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_NAMES}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = {
    "step": int,
    "world_size": int,
    "written_by": dict,
    "fingerprint": str,
    "files": dict,
    "tensors": dict,
    "optimizers": list,
    "extra": list,
    "per_rank": list,
}


class MalformedError(ValueError):
    """A manifest has a value that no save writes; the message says which."""


def read_json(text: bytes) -> dict[str, Any]:
    """Return the object in some JSON text; names that occur twice, NaN and infinities are refused."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except RecursionError:
        raise MalformedError("its values are nested too deep") from None
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(f"it is not JSON as a save writes it: {error}") from None
    _need(type(found) is dict, "it is not a JSON object")
    return found  # type: ignore[no-any-return]


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    _need(len(made) == len(pairs), "a name occurs twice in one object")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedError(f"it has a number {name}")


def check_content(content: Mapping[str, Any], block_bytes: int) -> None:
    """Raise :class:`MalformedError` unless every value of a manifest is as a save writes it.

    Args:
        content: the JSON object.
        block_bytes: the size of the blocks that have a checksum each.
    """
    for name, kind in _FIELDS.items():
        _need(type(content.get(name)) is kind, f"{name!r} is not of type {kind.__name__}")
    _need(is_count(content["step"]), f"the step is {_shown(content['step'])}")
    _need(is_count(content["world_size"], 1), f"the number of ranks is {_shown(content['world_size'])}")
    _need(all(type(text) is str for text in content["written_by"].values()), "'written_by' is not text")
    for name, file in content["files"].items():
        _check_file(name, file)
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in content["files"]}
    for key, fields in content["tensors"].items():
        _check_tensor(key, fields, content["files"], block_bytes, used)
    for name, ranges in used.items():
        _check_filled(name, content["files"][name], ranges)
    model = content.get("model", 0)
    _need(model is None or type(model) is dict, "'model' is not of type dict")
    for name, tree in (model or {}).items():
        _check_tree(tree, f"{name!r} of the model")
    _check_base(content.get("base"), model)
    for number, optimizer in enumerate(content["optimizers"]):
        _check_optimizer(optimizer, f"optimizer {number}")
    _check_dict(content["extra"], "'extra'")
    _need(len(content["per_rank"]) == content["world_size"], "'per_rank' is not a list with a value for each rank")
    for number, tree in enumerate(content["per_rank"]):
        _check_dict(tree, f"the values of rank {number}")


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise MalformedError(problem)


def _shown(value: object) -> str:
    return f"{value!r:.60}" if type(value) is not int or abs(value) < _LIMIT else "a number with too many digits"


def is_count(value: object, low: int = 0, limit: int = _LIMIT) -> bool:
    """Return whether a value is an integer from ``low`` on and below ``limit``."""
    return type(value) is int and low <= value < limit


def _are_counts(values: object, limit: int = _LIMIT) -> bool:
    return type(values) is list and all(is_count(value, limit=limit) for value in values)


def _are_texts(values: object) -> bool:
    return type(values) is list and all(type(value) is str for value in values)


def _check_file(name: str, file: Any) -> None:
    _need(FILE_NAME.fullmatch(name) is not None, f"{_shown(name)} is not the name of a file of a checkpoint")
    _need(
        type(file) is dict
        and file.keys() - {"sha256"} == {"size", "header", "crc32"}
        and is_count(file["size"])
        and is_count(file["header"], 8, file["size"] + 1)
        and is_count(file["crc32"], limit=1 << 32)
        and ("sha256" not in file or _is_sha256(file["sha256"])),
        f"the description of {name} is malformed",
    )


def _is_sha256(value: object) -> bool:
    return type(value) is str and _SHA256.fullmatch(value) is not None


def _check_tensor(
    key: str, fields: Any, files: Mapping[str, Any], block_bytes: int, used: dict[str, list[tuple[int, int]]]
) -> None:
    """Check one tensor, and note in ``used`` where its pieces are in their files."""
    shown = _shown(key)
    _need(type(fields) is dict and fields.keys() == {"dtype", "shape", "stride", "pieces"}, f"{shown} is malformed")
    _need(type(fields["dtype"]) is str and fields["dtype"] in _DTYPES, f"{shown} has dtype {_shown(fields['dtype'])}")
    shape, stride, itemsize = fields["shape"], fields["stride"], _DTYPES[fields["dtype"]].itemsize
    _need(_are_counts(shape) and len(shape) <= MAX_DIMENSIONS, f"{shown} has shape {_shown(shape)}")
    _need(_are_counts(stride) and len(stride) == len(shape), f"{shown} has strides {_shown(stride)}")
    _need(prod(size or 1 for size in shape) * itemsize < _LIMIT, f"{shown} has shape {_shown(shape)}")
    _need(is_dense(tuple(shape), tuple(stride)), f"{shown} has strides {_shown(stride)}, which leave gaps in memory")
    _need(type(fields["pieces"]) is list, f"the pieces of {shown} are malformed")
    numel, expected = prod(shape), 0
    for piece in fields["pieces"]:
        _check_piece(piece, f"the pieces of {shown}", files)
        nbytes = (piece["stop"] - piece["start"]) * itemsize
        blocks = -(-nbytes // block_bytes)
        covers = piece["start"] == expected and nbytes >= 0 and len(piece["crc32"]) == blocks
        covers = covers and len(piece.get("sha256", piece["crc32"])) == blocks
        _need(covers, f"the pieces of {shown} do not cover it exactly once")
        used[piece["file"]].append((piece["offset"], piece["offset"] + nbytes))
        expected = piece["stop"]
    _need(expected == numel, f"the pieces of {shown} end at {expected} of {numel} elements")


def _check_piece(piece: Any, what: str, files: Mapping[str, Any]) -> None:
    _need(
        type(piece) is dict
        and piece.keys() - {"sha256"} == {"file", "offset", "start", "stop", "crc32"}
        and all(is_count(piece[name]) for name in ("offset", "start", "stop"))
        and _are_counts(piece["crc32"], limit=1 << 32)
        and (type(piece.get("sha256", [])) is list and all(map(_is_sha256, piece.get("sha256", []))))
        and type(piece["file"]) is str,
        f"{what} are malformed",
    )
    _need(piece["file"] in files, f"{what} are in {_shown(piece['file'])}, which is not a file of the checkpoint")


def _check_filled(name: str, file: Mapping[str, int], ranges: list[tuple[int, int]]) -> None:
    """Raise unless the pieces fill a file after its header, each byte once."""
    position = file["header"]
    for start, stop in sorted(ranges):
        _need(start == position or start == stop <= file["size"], f"pieces overlap in {name}, or leave a gap in it")
        position = max(position, stop)
    _need(position == file["size"], f"{name} has {file['size']} bytes, but its pieces end at {position}")


def _check_base(base: Any, model: Any) -> None:
    """Check the frozen parameters whose values the checkpoint does not have."""
    _need(base is None or type(base) is dict, "'base' is not of type dict")
    for name, param in (base or {}).items():
        _need(type(param) is dict and param.keys() == {"dtype", "shape", "digest"}, "'base' is malformed")
        _need(type(param["dtype"]) is str and type(param["digest"]) is str, "'base' is malformed")
        _need(_are_counts(param["shape"]), "'base' is malformed")
        _need(model is not None and name not in model, f"{_shown(name)} is in 'base', and the model has its value")


def _check_optimizer(optimizer: Any, what: str) -> None:
    kinds = {"kind": str, "named": bool, "params": dict, "groups": list, "state": dict}
    malformed = f"{what} is malformed"
    _need(type(optimizer) is dict, malformed)
    _need(all(type(optimizer.get(name)) is kind for name, kind in kinds.items()), malformed)
    for param in optimizer["params"].values():
        _need(type(param) is dict and param.keys() == {"shape", "stride", "dtype"}, malformed)
        _need(param["shape"] is None or _are_counts(param["shape"]), malformed)
        _need(_are_counts(param["stride"]) and type(param["dtype"]) is str, malformed)
    members: list[str] = []
    for group in optimizer["groups"]:
        _need(type(group) is dict and _are_texts(group.get("params")), malformed)
        members += group["params"]
        names = _check_dict(group.get("options"), f"the options of {what}")
        _need(not names & set(NOT_OPTIONS), f"the options of {what} have an entry for parameters")
    _need(sorted(members) == sorted(optimizer["params"]), f"the groups of {what} do not have each parameter once")
    for name, tree in optimizer["state"].items():
        _need(name in optimizer["params"], f"{what} has state for {_shown(name)}, which is not its parameter")
        _check_dict(tree, f"the state of {_shown(name)} in {what}")


def _check_dict(tree: Any, what: str) -> set[Any]:
    """Check a tree that must be a dict; return its keys."""
    _need(type(tree) is list and len(tree) == 2 and tree[0] in DICTS, f"{what} is not a dict")
    _check_tree(tree, what)
    return {key for key, _ in tree[1] if type(key) is str}


def _check_tree(tree: Any, what: str, depth: int = 0) -> Any:
    """Check a tree; return a value that is equal for trees that are equal as keys of a dict, or None for no key."""
    _need(depth <= MAX_DEPTH, f"{what} has values that are nested in more than {MAX_DEPTH} containers")
    if type(tree) is float:
        _need(math.isfinite(tree), f"{what} has a number {tree}")
    if type(tree) is not list:
        _need(type(tree) is not dict, f"{what} is malformed")
        return (tree,)
    _need(len(tree) == 2 and type(tree[0]) is str, f"{what} is malformed")
    kind, content = tree
    if kind == "float":
        _need(content in ("nan", "inf", "-inf"), f"{what} has a number {_shown(content)}")
        return (object() if content == "nan" else float(content),)
    if kind == "tensor":
        _need(type(content) is str, f"{what} has a tensor without a key")
        return (kind, content)
    _need(type(content) is list, f"{what} is malformed")
    if kind in DICTS:
        _check_pairs(content, what, depth)
        return None
    found = tuple(_check_tree(item, what, depth + 1) for item in content)
    if kind == "dtype":
        name = content[0] if len(content) == 1 else None
        _need(type(name) is str and isinstance(vars(torch).get(name), torch.dtype), f"{what} has an unknown dtype")
    elif kind == "Size":
        _need(all(is_count(item, -_LIMIT) for item in content), f"{what} has a malformed size")
    elif kind == "subclass":
        _need(len(content) == 5 and type(content[0]) is str, f"{what} has a malformed tensor of a subclass")
        _need(type(content[2]) is list and content[2][0] in DICTS, f"{what} has a tensor of a subclass without parts")
    else:
        _need(kind in ("tuple", "list"), f"{what} has a value of type {_shown(kind)}")
    return None if kind in ("list", "subclass") or None in found else (kind, found)


def _check_pairs(pairs: list[Any], what: str, depth: int) -> None:
    """Check the pairs of a dict: every key can be a key, and none occurs twice."""
    seen = set()
    for pair in pairs:
        _need(type(pair) is list and len(pair) == 2, f"{what} is malformed")
        key = _check_tree(pair[0], what, depth + 1)
        _need(key is not None, f"{what} has a key that cannot be one")
        _need(key not in seen, f"{what} has a key twice")
        seen.add(key)
        _check_tree(pair[1], what, depth + 1)
