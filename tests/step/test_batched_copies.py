"""Copies of many tensors at once: equal values, the requested form, and batches of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from onecopy.common.flat_views import flat_view
from onecopy.step import batched_copies
from onecopy.step.batched_copies import CopiesToDevice, batches, converted_together, start_copies_to_host
from tests.support.models import assert_equal

CPU = torch.device("cpu")
SIZES = [(), (30,), (0, 3), (2, 3, 4, 5), (16,), (7, 9)]


@pytest.fixture(autouse=True)
def small_batches() -> Iterator[None]:
    """Batches of 16 elements, so that tensors of a few elements need several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_copies, "BATCH", 16)
        yield


def tensors_of(dtype: torch.dtype, channels_last: bool) -> list[Tensor]:
    found = [torch.randn(size).to(dtype) for size in SIZES]
    return (
        [tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor for tensor in found]
        if (channels_last)
        else found
    )


def test_batches_have_all_elements_in_order_and_are_full() -> None:
    flats = list(torch.arange(100).split([3, 0, 40, 16, 41]))
    found = batches(flats)
    assert [sum(piece.numel() for piece in pieces) for pieces in found] == [16] * 6 + [4]
    assert_equal([torch.cat([piece for pieces in found for piece in pieces])], [torch.arange(100)], "elements")
    assert [len(pieces) for pieces in batches(list(torch.zeros(16).split(4)))] == [4]


@pytest.mark.parametrize("make", [converted_together, start_copies_to_host])
@pytest.mark.parametrize("channels_last", [False, True])
def test_copies_have_the_values_of_one_and_the_form_of_the_other(make: object, channels_last: bool) -> None:
    assert callable(make)
    gradients, like = tensors_of(torch.bfloat16, False), tensors_of(torch.float32, channels_last)
    copies = make(gradients, like)
    assert_equal(copies, [gradient.float() for gradient in gradients], "values")
    assert [copy.stride() for copy in copies] == [each.stride() for each in like]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    for copy in copies:
        flat_view(copy).zero_()  # no copy shares an element with another
    assert sum(float(copy.abs().sum()) for copy in copies) == 0.0


def test_converted_tensors_begin_where_vectorised_kernels_want_them() -> None:
    copies = converted_together(tensors_of(torch.bfloat16, False), tensors_of(torch.float32, False))
    assert all(copy.storage_offset() * copy.element_size() % 64 == 0 for copy in copies)


@pytest.mark.parametrize("channels_last", [False, True])
def test_sources_may_be_changed_when_the_copies_to_a_device_have_started(channels_last: bool) -> None:
    sources, targets = tensors_of(torch.float32, channels_last), tensors_of(torch.bfloat16, channels_last)
    expected = [source.to(torch.bfloat16) for source in sources]
    copies = CopiesToDevice()
    for _ in range(2):
        copies.start(targets, sources)
        for source in sources:
            source.zero_()
        assert_equal(targets, expected, "values")
        expected = [torch.zeros_like(target) for target in targets]
