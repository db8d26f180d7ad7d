"""``ShardedDataParallel`` in mixed precision equals master weights kept by hand, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecopy import MixedPrecision, ShardedDataParallel
from tests.support.data_parallel import Batched
from tests.support.harness import distributed
from tests.support.master_weights import (
    ADAMW,
    BF16,
    HALF,
    RECIPES,
    Part,
    adamw_for,
    compare_with_masters_by_hand,
    loss_of,
    made_copies,
    optimizers_of,
    reduced,
    wrap,
)
from tests.support.models import assert_equal, small_inputs, small_model


@pytest.mark.parametrize("reduce_dtype", [None, HALF, torch.float32])
@RECIPES
@distributed(2, 3)
def test_sharded_training_equals_masters_of_the_values_before_conversion(
    world_size: int, parts: tuple[Part, ...], reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecision(param_dtype=HALF, reduce_dtype=reduce_dtype)
    model, _ = compare_with_masters_by_hand(small_model, parts, policy, bucket_bytes=2000)
    assert {param.dtype for param in model.parameters()} == {HALF}
    kept = {param.grad.local.dtype for param in model.parameters()}  # type: ignore[union-attr]
    assert kept == {reduce_dtype or HALF}


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}], ids=["", "overlapping the forward"])
@distributed(2, 3)
def test_running_averages_keep_their_type(world_size: int, options: dict[str, Any]) -> None:
    model, _ = compare_with_masters_by_hand(Batched, [ADAMW], BF16, **options)
    assert model.module.get_parameter("first.weight").dtype == HALF
    mean = model.module.get_buffer("norm.running_mean")
    assert mean.dtype == torch.float32
    assert mean.any()


@distributed(2, 3)
def test_without_masters_bf16_itself_is_stepped(world_size: int) -> None:
    model = wrap(small_model(), [ADAMW], MixedPrecision(param_dtype=HALF, master_weights=False))
    plain = small_model().to(HALF)
    optimizer, (zero,) = torch.optim.AdamW(plain.parameters(), **ADAMW.options), optimizers_of(model)
    for step in range(4):
        zero.zero_grad()
        loss_of(model, step).backward()
        zero.step()
        plain.zero_grad()
        plain(small_inputs(dist.get_rank(), step).to(HALF)).float().square().mean().backward()
        for param, gradient in zip(plain.parameters(), reduced(plain.parameters()), strict=True):
            param.grad = gradient
        optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    assert not made_copies(zero, model.parameters())


class Inputs(nn.Module):
    """Remembers the types it was called with; has a frozen parameter, which no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(8, 2), nn.Linear(2, 2).requires_grad_(False)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor, more: dict[str, list[Tensor]], scale: Tensor) -> Tensor:
        self.seen = [inputs.dtype, *(tensor.dtype for tensor in more["list"]), scale.dtype]
        outputs: Tensor = self.frozen(self.layer(inputs.to(HALF)))
        return outputs


@pytest.mark.parametrize("cast", [True, False])
@distributed(2)
def test_inputs_are_converted_on_request_and_frozen_parameters_are_too(world_size: int, cast: bool) -> None:
    inner = Inputs()
    policy = MixedPrecision(param_dtype=HALF, cast_inputs=cast)
    model = ShardedDataParallel(inner, adamw_for(inner.layer), mixed_precision=policy)
    assert {param.dtype for param in model.parameters()} == {HALF}
    model(torch.randn(3, 8), {"list": [torch.ones(2), torch.arange(2)]}, scale=torch.ones((), dtype=torch.double))
    expected = [HALF, HALF, torch.int64, HALF] if cast else [torch.float32, torch.float32, torch.int64, torch.double]
    assert inner.seen == expected
