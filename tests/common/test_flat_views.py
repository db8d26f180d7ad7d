"""Flat views of tensors: which memory is dense, and in which order it is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecopy.common.flat_views import as_bytes, dense_copy, flat_like, flat_view, is_dense, to_bytes


def addresses(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Where each element lies, in index order, by going through all of them."""
    return [
        sum(place * step for place, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


def permuted(shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """A dense tensor of this shape whose axes lie in memory in this order."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return torch.arange(math.prod(shape)).reshape([shape[axis] for axis in order]).permute(inverse)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Permuted, sliced, strided and expanded tensors whose values say where in memory they lie."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for change in draw(st.lists(st.sampled_from(["permute", "slice", "expand", "offset"]), max_size=3)):
        if change == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif change == "slice" and tensor.dim():
            axis = draw(st.integers(0, tensor.dim() - 1))
            begin, step = draw(st.integers(0, 2)), draw(st.integers(1, 2))
            tensor = tensor[(slice(None),) * axis + (slice(begin, None, step),)]
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        elif change == "offset":
            tensor = torch.arange(tensor.numel() + 3)[3:].reshape(tensor.shape)
    return tensor


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
@example([(0, 12), (3, 2)])
def test_a_tensor_is_dense_exactly_if_its_addresses_are_a_run_without_repeats(axes: list[tuple[int, int]]) -> None:
    shape, stride = tuple(size for size, _ in axes), tuple(step for _, step in axes)
    assert is_dense(shape, stride) == (sorted(addresses(shape, stride)) == list(range(math.prod(shape))))


@settings(max_examples=300)
@given(tensors())
@example(torch.zeros(4, 6)[:0, ::2])
def test_a_flat_view_shows_dense_memory_in_its_own_order(tensor: Tensor) -> None:
    dense = dense_copy(tensor)
    assert dense.equal(tensor)
    is_a_run = sorted(addresses(tensor.shape, tensor.stride())) == list(range(tensor.numel()))
    assert is_dense(tuple(tensor.shape), tensor.stride()) == is_a_run == (dense is tensor)
    by_address = dict(zip(addresses(dense.shape, dense.stride()), dense.flatten().tolist(), strict=True))
    flat = flat_view(dense)
    assert flat.tolist() == [by_address[place] for place in range(dense.numel())]
    if dense.numel():
        assert flat.data_ptr() == dense.data_ptr()
        flat[0] = -1
        assert (dense == -1).sum() == 1


@settings(max_examples=200)
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_flat_like_gives_one_tensors_elements_in_the_memory_order_of_another(
    shape: list[int], data: st.DataObject
) -> None:
    like, tensor = (permuted(shape, data.draw(st.permutations(range(len(shape))))) for _ in range(2))
    expected = [0] * like.numel()
    for place, value in zip(addresses(like.shape, like.stride()), tensor.flatten().tolist(), strict=True):
        expected[place] = value
    flat = flat_like(tensor, like)
    assert flat.tolist() == expected
    if tensor.numel() and tensor.stride() == like.stride():
        assert flat.data_ptr() == tensor.data_ptr(), "no copy where none is needed"
    assert flat_like(torch.tensor(2.0).expand(shape), like).tolist() == [2.0] * like.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_bytes_are_the_memory_itself(dtype: torch.dtype) -> None:
    flat = torch.tensor([0, 1, 1], dtype=dtype)
    view = as_bytes(flat)
    assert view.numel() == 3 * dtype.itemsize
    assert to_bytes(view) == bytes(view.tolist())
    view.zero_()
    assert not flat.any()
    assert to_bytes(as_bytes(flat[:0])) == b""
