"""Digests of tensors: equal for equal values in any memory, different after any change."""

from __future__ import annotations

import pytest
import torch

from onecopy.common import digests
from onecopy.common.digests import tensor_digest


def test_strides_and_sizes_of_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 4, 5, 6)
    expected = tensor_digest(tensor)
    assert tensor_digest(tensor.to(memory_format=torch.channels_last)) == expected
    assert tensor_digest(tensor.transpose(0, 3).contiguous().transpose(0, 3)) == expected
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 7)
    assert tensor_digest(tensor.clone()) == expected


def test_dtype_shape_order_and_every_bit_matter() -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    variants = [
        tensor,
        tensor.int(),
        tensor.view(torch.bfloat16),
        tensor.reshape(2, 3),
        tensor.reshape(3, 2),
        tensor.flip(0),
        tensor[:0],
        tensor[0],
    ]
    for position in range(6):
        for bit in range(15):
            variants.append(tensor.clone())
            variants[-1][position] ^= 1 << bit
    assert len({tensor_digest(each) for each in variants}) == len(variants)
    assert tensor_digest(torch.tensor(-0.0)) != tensor_digest(torch.tensor(0.0))
