"""The pool of buffers gives out the same memory again."""

from __future__ import annotations

import torch

from onecopy.comm.buffer_pool import BufferPool

CPU = torch.device("cpu")


def lend(pool: BufferPool, *sizes: int) -> list[torch.Tensor]:
    return [pool.take(size, torch.float32, CPU) for size in sizes]


def addresses(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def test_the_same_memory_is_given_out_again_in_any_order() -> None:
    pool = BufferPool()
    sizes = (1000, 10, 400_000, 30, 1000)
    first = lend(pool, *sizes)
    assert len(addresses(first)) == len(sizes)
    pool.give_back(*first)
    second = lend(pool, *reversed(sizes))
    assert addresses(second) == addresses(first), "small ones do not take what large ones need"
    assert [tensor.numel() for tensor in second] == list(reversed(sizes))


def test_the_pool_keeps_little_more_memory_than_was_in_use_at_a_time() -> None:
    pool = BufferPool()
    for size in (100_000, 10_000, 40_000, 300):
        pool.give_back(*lend(pool, size))
    assert sum(each.nbytes for each in pool._free) <= 4 * 100_000 * 9 // 8
    half, rest = lend(pool, 50_000, 50_000)
    pool.give_back(half, rest)
    assert sum(each.nbytes for each in pool._free) <= 4 * 100_000 * 9 // 8


def test_a_few_bytes_more_do_not_cost_the_largest() -> None:
    pool = BufferPool()
    first = lend(pool, 100_000, 10, 20_000)
    pool.give_back(*first)
    again = lend(pool, 40, 100_000)
    assert again[1].data_ptr() == first[0].data_ptr()


def test_other_types_fit_and_foreign_tensors_are_ignored() -> None:
    pool = BufferPool()
    (floats,) = lend(pool, 100)
    pool.give_back(floats, torch.zeros(100))
    halves = pool.take(200, torch.bfloat16, CPU)
    assert halves.data_ptr() == floats.data_ptr()
    assert halves.numel() == 200
    assert pool.take(0, torch.float32, CPU).numel() == 0
