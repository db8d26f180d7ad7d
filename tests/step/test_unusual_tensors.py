"""Unusual memory formats, data types and sparse gradients train as with the plain optimizer, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from tests.support.both import BUCKET_VIEWS, POLICIES, Both, Tensors, as_it_is, tensors_of
from tests.support.harness import distributed
from tests.support.models import assert_same_tree

ODD: dict[str, Callable[[], list[Tensor]]] = {
    "channels-last": lambda: [torch.randn(20, 8, 3, 3).to(memory_format=torch.channels_last), torch.randn(5)],
    "transposed": lambda: [torch.randn(60, 40).t(), torch.randn(3, 7).t()],
    "permuted": lambda: [torch.randn(5, 4, 3, 6, 7).permute(3, 0, 4, 2, 1), torch.randn(2, 3, 4).permute(2, 0, 1)],
    "complex": lambda: [torch.randn(40, 50, dtype=torch.complex128).t(), torch.randn(3, dtype=torch.complex64)],
    "several data types": lambda: [
        torch.randn(40, 50, dtype=torch.bfloat16),
        torch.randn(1500),
        torch.randn(41, 31, dtype=torch.float64),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(1, 1, dtype=torch.float64),
        torch.randn(7, dtype=torch.float16),
    ],
    "nothing and scalars": lambda: [torch.zeros(0), torch.randn(()), torch.zeros(3, 0, 2), torch.randn(()).double()],
    "one scalar": lambda: [torch.randn(())],
}


def other_strides(gradient: Tensor, _: Tensor) -> Tensor:
    """The same values, in memory the other way round."""
    backwards = list(reversed(range(gradient.dim())))
    return gradient.permute(backwards).contiguous().permute(backwards)


@distributed(2, 3)
@BUCKET_VIEWS
@POLICIES
@pytest.mark.parametrize("case", ODD)
def test_odd_parameters_train_as_with_the_plain_optimizer(
    world_size: int, case: str, shard_by: str, bucket_view: bool
) -> None:
    torch.manual_seed(3)
    values = ODD[case]()
    for grad_like in (as_it_is, other_strides):
        tensors = Tensors(values, grad_like=grad_like, shard_by=shard_by, parameters_as_bucket_view=bucket_view)
        large = [index for index, value in enumerate(values) if value.numel() > 1000]
        assert shard_by == "parameter" or list(tensors.ours.layout.cut_params) == large
        tensors.train()
        gradients, plain = ([each.grad for each in params] for params in (tensors.params, tensors.plain_params))
        assert_same_tree(gradients, plain, "gradients keep their strides and values")


def some_rows(gradient: Tensor, _: Tensor) -> Tensor:
    """A sparse gradient, in which a row occurs twice."""
    rows = torch.tensor([0, 5, 5])
    return torch.sparse_coo_tensor(rows[None], gradient[rows], gradient.shape)


@distributed(2, 3)
@BUCKET_VIEWS
@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize(("optimizer_class", "options"), [(SGD, {}), (SGD, {"momentum": 0.9}), (Adagrad, {})])
def test_sparse_gradients_are_stepped(
    world_size: int, bucket_view: bool, optimizer_class: type[Optimizer], options: dict[str, Any], whole: bool
) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns once in a process where this is not said
    ours: dict[str, Any] = {"elementwise": False if whole else None, "parameters_as_bucket_view": bucket_view}
    values = [torch.ones(64, 40), torch.ones(9, 4)]
    both = Both(
        lambda: [nn.Parameter(each.clone()) for each in values], optimizer_class, {"lr": 0.1, **options}, **ours
    )
    both.grad_like = some_rows
    assert both.ours.layout.cut_params == (() if whole else (0,))
    for _ in range(3):
        both.step()
    for param, expected in zip(*map(tensors_of, both.optimizers), strict=True):
        assert param.grad is not None
        assert param.grad.is_sparse
        torch.testing.assert_close(param, expected)  # rows that occur twice are added in another order


@distributed(2)
@BUCKET_VIEWS
def test_sparse_gradients_of_single_elements_are_exact_or_refused(world_size: int, bucket_view: bool) -> None:
    values = [torch.ones(6) for _ in range(8)]
    options: dict[str, Any] = {"parameters_as_bucket_view": bucket_view}
    tensors = Tensors(values, SGD, grad_like=lambda gradient, _: gradient.relu().to_sparse(), **options)
    if not bucket_view:
        tensors.train()
        return
    with pytest.raises(ValueError, match=r"parameter 'group0\[\d\]' has a sparse gradient of single elements"):
        tensors.step()
    assert all(torch.equal(param, torch.ones(6)) for param in tensors.params)


def peak_growth(action: Callable[[], object]) -> int:
    """By how many bytes the process grows while something runs."""

    def read(field: str) -> int:
        match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match
        return int(match[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


@distributed(2)
@BUCKET_VIEWS
def test_many_small_parameters_travel_in_bounded_memory(world_size: int, bucket_view: bool) -> None:
    values = [torch.full((256, 240), float(index)) for index in range(220)]
    assert sum(value.numel() * 4 for value in values) > 50 << 20
    tensors = Tensors(values, SGD, parameters_as_bucket_view=bucket_view)
    for param, plain in zip(tensors.params, tensors.plain_params, strict=True):
        param.grad = torch.full_like(param, 0.5)
        plain.grad = param.grad
    growth = peak_growth(tensors.ours.step)
    tensors.plain.step()
    tensors.check()
    assert bucket_view or tensors.ours.engine.sharing.messages > 5, "several packed rounds"
    assert growth < 48 << 20
