"""Digests of tensors: equal for equal values in any memory, different after any change."""

from __future__ import annotations

import pytest
import torch

from onecopy.common import digests
from onecopy.common.digests import tensor_checksums, tensor_digest


def test_strides_and_sizes_of_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 4, 5, 6)
    expected = tensor_digest(tensor)
    assert tensor_digest(tensor.to(memory_format=torch.channels_last)) == expected
    assert tensor_digest(tensor.transpose(0, 3).contiguous().transpose(0, 3)) == expected
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 7)
    assert tensor_digest(tensor.clone()) == expected


def flipped(tensor: torch.Tensor, position: int, bit: int) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[position] ^= 1 << bit
    return changed


def test_dtype_shape_order_and_every_bit_matter() -> None:
    tensor = torch.arange(6, dtype=torch.int16)
    variants = [tensor, tensor.int(), tensor.view(torch.bfloat16), tensor.reshape(2, 3), tensor.reshape(3, 2)]
    variants += [tensor.flip(0), tensor[:0], tensor[0]]
    variants += [flipped(tensor, position, bit) for position in range(12) for bit in range(8)]
    assert len({tensor_digest(each) for each in variants}) == len(variants)
    assert tensor_digest(torch.tensor(-0.0)) != tensor_digest(torch.tensor(0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_a_checksum_depends_on_every_bit_and_on_the_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_BLOCK_ELEMENTS", 4)  # several blocks
    tensor = torch.randn(11, dtype=dtype, generator=torch.Generator().manual_seed(1))
    nbytes = tensor.numel() * tensor.element_size()
    variants = [flipped(tensor, position, bit) for position in range(nbytes) for bit in range(8)]
    variants += [tensor, tensor.flip(0), tensor[:0], torch.cat([tensor[1:2], tensor[:1], tensor[2:]])]
    opposite = tensor.clone()  # differences in opposite directions do not cancel out
    memory = opposite.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    memory[2] += 1
    memory[9] -= 1
    variants.append(opposite)
    assert len(set(tensor_checksums(variants))) == len(variants)
    assert tensor_checksums([tensor.clone(), tensor]) == tensor_checksums([tensor]) * 2
