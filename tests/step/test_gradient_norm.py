"""Norms and clipping with unusual arguments and gradients: torch's results, and the same error on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import PeerFailedError, ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.data_parallel import Layers, inputs_of
from tests.support.failures import check_pool, expect, expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed
from tests.support.models import assert_equal


class WithEmpty(Layers):
    """A parameter without elements takes part, and so gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.nothing.sum()


class Clipped:
    """A model after one backward pass, and the ways to clip its gradients."""

    def __init__(self, kind: str, make: Callable[[], nn.Module] = Layers) -> None:
        torch.manual_seed(5)
        self.module = make()
        self.params = list(self.module.parameters())
        options: dict[str, Any] = {"shard_by": "parameter"} if kind == "whole" else {}
        self.zeros = [
            ZeroRedundancyOptimizer(part, torch.optim.SGD, lr=0.1, **options)
            for part in ([self.params[::2], self.params[1::2]] if kind == "several" else [self.params])
        ]
        self.clip: Callable[..., Tensor] = self.zeros[0].clip_grad_norm_
        self.norm: Callable[..., Tensor] = self.zeros[0].grad_norm
        if "sharded" in kind:
            sharded = ShardedDataParallel(self.module, self.zeros, bucket_bytes=4096)
            self.model: nn.Module = sharded
            self.clip, self.norm = sharded.clip_grad_norm_, sharded.grad_norm
        else:
            ddp = DistributedDataParallel(self.module)
            self.model = ddp
            if kind == "reduced":
                ddp.register_comm_hook(self.zeros[0], onecopy.reduce_scatter_hook)
        if kind == "several":
            self.clip = lambda *args, **kwargs: onecopy.clip_grad_norm_(self.zeros, *args, **kwargs)
            self.norm = lambda *args: onecopy.grad_norm(self.zeros, *args)
        if kind in ("plain", "torch on sharded"):
            self.clip = lambda *args, **kwargs: nn.utils.clip_grad_norm_(self.params, *args, **kwargs)
            self.norm = lambda *args: nn.utils.get_total_norm(
                [each.grad for each in self.params if each.grad is not None], *args
            )
        self.model(inputs_of(dist.get_rank(), 0)).square().mean().backward()

    def step(self) -> None:
        for zero in self.zeros:
            zero.step()


KINDS = ["whole", "cut", "reduced", "several", "sharded", "torch on sharded"]


@distributed(2, 3)
@pytest.mark.parametrize("order", [math.inf, -math.inf, 0.0, -1.0, 0.5, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_every_order_are_torchs(world_size: int, kind: str, order: float) -> None:
    plain, ours = Clipped("plain"), Clipped(kind)
    expected = plain.clip(0.01, order)
    # With three ranks gradients are added up in another order, which the smallest one shows most.
    tolerance = 1e-3 if order < 0 else 1e-5
    for found in (ours.norm(order), ours.clip(0.01, order)):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0, equal_nan=True)
    if not math.isnan(order):
        plain.step()
        ours.step()
        assert_equal(ours.params, plain.params, "after clipping", 1e-5)


@distributed(2, 3)
@pytest.mark.parametrize("order", [math.inf, -math.inf, -1.0, "inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_torch_does_not_define_is_the_same_error_on_all_ranks(
    world_size: int, kind: str, order: Any
) -> None:
    plain, ours = Clipped("plain", WithEmpty), Clipped(kind, WithEmpty)
    expect(failure_of(lambda: plain.clip(1.0, order)), RuntimeError, "on an empty tensor")
    for call in (lambda: ours.norm(order), lambda: ours.clip(1.0, order)):
        expect(failure_of(call), RuntimeError, "is not defined, because it has no elements")
    torch.testing.assert_close(ours.clip(0.01), plain.clip(0.01), rtol=1e-5, atol=0)


@distributed(2, 3)
@pytest.mark.parametrize("order", [math.inf, -math.inf, -1.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_a_number_is_seen_by_all_ranks_and_the_norm_of_none_is_zero(
    world_size: int, kind: str, order: float
) -> None:
    ours = Clipped(kind)
    assert ours.params[0].grad is not None
    ours.params[0].grad.mul_(math.nan)
    assert math.isnan(ours.norm(order))
    if kind != "torch on sharded":
        expect(failure_of(lambda: ours.clip(1.0, order, True)), RuntimeError, "is nan, not finite")
        for zero in ours.zeros:
            zero.zero_grad()
        assert float(ours.clip(1.0, order)) == 0.0


BAD: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "no number as norm_type": ((1.0, "large"), ValueError, "large"),
    "no norm_type": ((1.0, None), TypeError, "NoneType"),
    "no number as max_norm": (("large",), ValueError, "large"),
    "no max_norm": ((None,), TypeError, "NoneType"),
}
DIFFERENT: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "norm_type": ((1.0, math.inf), r"norm_type: 2\.0", "norm_type: inf"),
    "max_norm": ((3.0,), r"max_norm: 1\.0", r"max_norm: 3\.0"),
    "error_if_nonfinite": ((1.0, 2.0, True), "error_if_nonfinite: False", "error_if_nonfinite: True"),
}


@distributed(2, 3)
@pytest.mark.parametrize("kind", ["cut", "several", "sharded"])
def test_bad_or_different_arguments_on_one_rank_are_an_error_on_all(world_size: int, kind: str) -> None:
    ours, odd = Clipped(kind), world_size - 1
    for arguments, error, text in BAD.values():
        mine = arguments if dist.get_rank() == odd else (1.0,)
        expect_failure_of([odd], lambda: ours.clip(*mine), error, text)  # noqa: B023
    for arguments, text, odd_text in DIFFERENT.values():
        mine = arguments if dist.get_rank() == odd else (1.0,)
        expect_disagreement(odd, lambda: ours.clip(*mine), text, odd_text)  # noqa: B023
    ours.clip(1.0)
    ours.step()
    check_pool()


@distributed(2, 3)
def test_ranks_that_give_different_optimizers_are_told_so(world_size: int) -> None:
    ours = Clipped("several")
    zeros = ours.zeros[:1] if dist.get_rank() == 0 else ours.zeros
    error = failure_of(lambda: onecopy.clip_grad_norm_(zeros, 1.0))
    expect(error, onecopy.RanksDisagreeError, "parameters of the optimizers")
    wrongs: list[Any] = [None, []]
    for wrong in wrongs:
        with pytest.raises((TypeError, ValueError, PeerFailedError), match=r"ZeroRedundancyOptimizer|at least one"):
            onecopy.clip_grad_norm_(wrong if dist.get_rank() == 0 else ours.zeros, 1.0)
    check_pool()


@distributed(2)
def test_a_sparse_gradient_is_an_error_on_all_ranks(world_size: int) -> None:
    embedding = nn.Embedding(64, 32, sparse=True)
    zero = ZeroRedundancyOptimizer(embedding.named_parameters(), torch.optim.SGD, lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    error = failure_of(lambda: zero.clip_grad_norm_(1.0))
    expect(error, ValueError, "the gradient of parameter .weight. is sparse")
    check_pool()
