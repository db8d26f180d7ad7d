"""Checkpoints without processes: files of any number of ranks are read by any other, bit by bit; manifests, trees."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from onecopy import Layout, ParamSpec
from onecopy.checkpoint import files, latest, load, manifest, save
from onecopy.checkpoint.files import LivePiece, Reader, whole_tensor, write_file
from onecopy.checkpoint.loading import Copy
from onecopy.checkpoint.manifest import Entry, File, Manifest, Piece
from onecopy.checkpoint.save_plan import divide
from onecopy.common import tagged_json
from onecopy.common.flat_views import flat_view
from onecopy.layout import CUT_MULTIPLE, extend, plan_buckets
from tests.support.state_dicts import expect_same

POLICIES = ("parameter", "element", "bucket")
STORABLE = tuple(manifest.SAFETENSORS_NAMES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
Shape = tuple[int, ...]


# Tensors and layouts


def random_bits(shape: Shape, dtype: torch.dtype, order: Sequence[int], seed: int) -> Tensor:
    """A dense tensor of any bits, NaNs among them, whose dimensions lie in memory in the given order."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    memory = torch.randint(high, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    stride, step = [0] * len(shape), 1
    for axis in reversed(order):
        stride[axis] = step
        step *= max(shape[axis], 1)
    return memory.view(dtype).as_strided(shape, stride)


def bits(flat: Tensor) -> bytes:
    return bytes(flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def specs_of(tensors: Sequence[Tensor]) -> list[ParamSpec]:
    return [
        ParamSpec(index, f"p{index}", tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        for index, tensor in enumerate(tensors)
    ]


def layout_of(tensors: Sequence[Tensor], world_size: int, policy: str) -> Layout:
    """Return the layout of some tensors."""
    specs = specs_of(tensors)
    if policy == "bucket":
        return plan_buckets(specs, range(len(specs))[::-1], world_size, splittable=True, bucket_bytes=4096)[0]
    return extend(None, specs, world_size, policy, splittable=True)


def entry_of(tensor: Tensor) -> Entry:
    return Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def manifest_of(tensors: dict[str, Entry], written: dict[str, File], world_size: int) -> Manifest:
    nothing = tagged_json.encode({}, [], "")
    return Manifest(1, world_size, {}, written, tensors, None, (), nothing, (nothing,) * world_size)


def write(folder: Path, tensors: Sequence[Tensor], layout: Layout) -> Manifest:
    """Write one file for each rank, and return the manifest as it is read back."""
    entries = {f"p{index}": entry_of(tensor) for index, tensor in enumerate(tensors)}
    pieces: dict[str, list[Piece]] = {key: [] for key in entries}
    written: dict[str, File] = {}
    for rank in range(layout.world_size):
        live = [
            LivePiece(key, entries[key], shard.start, shard.stop, flat_view(tensor)[shard.start : shard.stop])
            for shard in layout.owned_by(rank)
            for key, tensor in [(f"p{shard.param}", tensors[shard.param])]
        ]
        path = folder / f"rank-{rank:05d}.safetensors"
        written[path.name], described = write_file(path, live)
        for piece, where in zip(live, described, strict=True):
            pieces[piece.key].append(where)
    full = {
        key: replace(entry, pieces=tuple(sorted(pieces[key], key=lambda piece: piece.start)))
        for key, entry in entries.items()
    }
    return manifest.parse(manifest.dump(manifest_of(full, written, layout.world_size)), "here")


def check_read(folder: Path, found: Manifest, tensors: Sequence[Tensor], likes: Sequence[Tensor], to: Layout) -> None:
    """Every shard of another layout, of parameters that may lie otherwise in memory, is what it was."""
    expected = [flat_view(torch.empty_like(like).copy_(tensor)) for tensor, like in zip(tensors, likes, strict=True)]
    with Reader(folder, found.files) as reader:
        for shard in to.shards:
            key, like = f"p{shard.param}", likes[shard.param]
            whole = shard.numel == like.numel()
            target = torch.empty_like(like) if whole else torch.empty(shard.numel, dtype=like.dtype)
            copy = Copy(key, found.tensors[key], shard.start, shard.stop, target, like)
            copy.check(reader)
            copy.run(reader, found)
            wanted = expected[shard.param][shard.start : shard.stop]
            assert bits(flat_view(target)) == bits(wanted), f"{key}[{shard.start}:{shard.stop}] of {to.world_size}"


# Any layout to any other


@dataclass(frozen=True)
class Case:
    """Shapes, types and memory orders on both sides, ranks and policies on both sides, and the size of a block."""

    params: tuple[tuple[Shape, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]
    ranks: tuple[int, int]
    policies: tuple[str, str]
    block_bytes: int


SIZES = st.sampled_from([0, 1, 2, 3, 7, 16, 33, 64, 130])


@st.composite
def params(draw: st.DrawFn) -> tuple[Shape, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    if prod(shape) > 40_000:
        shape = shape[:2]
    order = tuple(draw(st.permutations(range(len(shape)))))
    other = tuple(draw(st.permutations(range(len(shape))))) if draw(st.booleans()) else order
    return shape, draw(st.sampled_from(DTYPES)), order, other


RANKS = st.integers(1, 8)
CASES = st.builds(
    Case,
    st.lists(params(), min_size=1, max_size=6).map(tuple),
    st.tuples(RANKS, RANKS),
    st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES)),
    st.sampled_from([256, 1024, manifest.BLOCK_BYTES]),
)


def blocks_of(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Checksums for smaller blocks, so that small tensors have several."""
    patch.setattr(files, "BLOCK_BYTES", nbytes)
    patch.setattr(manifest, "BLOCK_BYTES", nbytes)


@settings(max_examples=200)
@given(case=CASES)
def test_any_layout_is_read_in_any_other_bit_by_bit(case: Case) -> None:
    tensors = [random_bits(shape, dtype, order, seed) for seed, (shape, dtype, order, _) in enumerate(case.params)]
    likes = [random_bits(shape, dtype, other, 0) for shape, dtype, _, other in case.params]
    saved = layout_of(tensors, case.ranks[0], case.policies[0])
    loaded = layout_of(likes, case.ranks[1], case.policies[1])
    event(f"cut: {bool(saved.cut_params)} to {bool(loaded.cut_params)}")
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        blocks_of(patch, case.block_bytes)
        found = write(Path(name), tensors, saved)
        check_read(Path(name), found, tensors, likes, loaded)
        with Reader(Path(name), found.files) as reader:
            for index, tensor in enumerate(tensors):
                whole = whole_tensor(reader, found, f"p{index}")
                assert bits(flat_view(whole)) == bits(flat_view(tensor))


# What is replicated is divided evenly


@given(sizes=st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8])), max_size=12), world_size=RANKS)
def test_ranks_write_equal_parts_of_replicated_data(sizes: list[tuple[int, int]], world_size: int) -> None:
    shares = [divide(sizes, rank, world_size) for rank in range(world_size)]
    for number, (count, _) in enumerate(sizes):
        ranges = [share[number] for share in shares]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == count
        assert all(start <= stop for start, stop in ranges)
        assert all(stop % CUT_MULTIPLE == 0 or stop == count for _, stop in ranges)
    total = sum(count * size for count, size in sizes)
    for share in shares:
        mine = sum((stop - start) * size for (start, stop), (_, size) in zip(share, sizes, strict=True))
        assert abs(mine - total / world_size) <= 2 * CUT_MULTIPLE * 8


# Files


def test_the_safetensors_library_reads_every_type(tmp_path: Path) -> None:
    tensors = {str(dtype): random_bits((6, 11), dtype, (0, 1), 5) for dtype in STORABLE}
    live = [LivePiece(key, entry_of(tensor), 0, 66, flat_view(tensor)) for key, tensor in tensors.items()]
    write_file(tmp_path / "one", live)
    with safe_open(tmp_path / "one", framework="pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for key, tensor in tensors.items():
            read = file.get_tensor(key)
            assert (read.dtype, bits(read)) == (tensor.dtype, bits(tensor)), key


# Extra, in one process


def round_trip(root: Path, extra: dict[str, Any]) -> Any:
    return load(save(root, 1, extra=extra)).extra


def test_plain_data_and_tensors_of_every_type_come_back_as_they_were(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "numbers": [0, -1, 2**80, 1.5, -0.0, float("nan"), float("inf"), -float("inf")],
        "none": None,
        "flags": (True, False, (), [], {}, ("nested", [("deep", {"x": (1,)})])),
        "keys": {1: "one", -2: 2.5, (1, "a"): None, False: 0, None: 1, 2.5: 3},
        "counter": Counter({3: 2, 7: 1}),
        "tensors": {str(dtype): torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype) for dtype in STORABLE},
        "strides": [torch.randn(4, 5).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        "odd": [torch.tensor(2.5), torch.empty(0, 3), torch.tensor([float("nan"), float("inf")]).bfloat16()],
    }
    expect_same(round_trip(tmp_path, extra), extra)


class Name(str):
    """A string that is more than a string."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {2: object()}]}, r"extra\['it'\]\['a'\]\[1\]\[2\] is of type builtins.object"),
        (b"bytes", r"extra\['it'\] is of type builtins.bytes"),
        ((1, Name("x")), r"extra\['it'\]\[1\] is of type .*Name"),
        ({1, 2}, r"extra\['it'\] is of type builtins.set"),
        (numpy.datetime64("2026-01-01"), r"extra\['it'\] is of type numpy.datetime64"),
        (torch.ones(2, dtype=torch.complex128), r"extra.*complex128"),
        (torch.eye(2).to_sparse(), r"extra.*sparse"),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_place(value: Any, where: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=where):
        save(tmp_path, 1, extra={"it": value})
    assert latest(tmp_path) is None
