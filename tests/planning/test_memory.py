"""The planned bytes of one rank by kind, by hand and beside those of tensors in real processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.common.nested_tensors import tensors_in
from onecopy.planning.collectives import Way, ddp_buckets
from onecopy.planning.comparison import DDP, LEVEL_1, LEVEL_3, compare
from onecopy.planning.memory import OPTIMIZERS, buffer_bytes, memory_bytes
from onecopy.planning.models import Model, Source, specs_of
from tests.planning.table import gpt_xl
from tests.support.harness import distributed

MIB = 1 << 20


@pytest.mark.parametrize(
    ("way", "splittable", "gradients", "state"),
    [
        (Way.DDP, True, 4e6, 8e6),
        (Way.LEVEL_1, True, 4e6, 2e6),
        (Way.LEVEL_2, True, 4e6, 2e6),
        (Way.LEVEL_3, True, 1e6, 2e6),
        (Way.LEVEL_1, False, 4e6, 0.6 * 8e6),
        (Way.LEVEL_3, False, 0.6 * 4e6, 0.6 * 8e6),
    ],
)
def test_memory_by_kind(way: Way, splittable: bool, gradients: float, state: float) -> None:
    """A model of 4 MB, of which one parameter is 60%, on 4 ranks."""
    model = Model(specs_of({"large": (600_000,), "small": (400_000,)}), splittable)
    found = memory_bytes(way, model, 4, 8, 4)
    assert (found["parameters"], found["gradients"]) == pytest.approx((4e6, gradients))
    assert (found["state"], found["master weights"]) == pytest.approx((state, state / 2))


def test_buffers_are_bounded() -> None:
    model, embedding = gpt_xl(), 50257 * 2048 * 2
    sizes = [sum(model.specs[index].nbytes for index in bucket) for bucket in ddp_buckets(model.specs, model.order)]
    two_buckets = max(one + other for one, other in pairwise(sizes))
    for way, ranks, expected in (
        (Way.DDP, 8, 0),
        (Way.LEVEL_1, 8, 2 * 64 * MIB),
        (Way.LEVEL_2, 8, 2 * 64 * MIB + two_buckets * (1 + 1 / 8)),  # a copy of two of DDP's buckets, and a part
        (Way.LEVEL_3, 8, embedding),
        (Way.LEVEL_3, 512, 2 * 512 * MIB),
    ):
        assert buffer_bytes(way, model, ranks) == pytest.approx(expected), way


def nbytes(tensors: list[Tensor]) -> int:
    """The bytes of distinct storages; scalars such as step counters are not counted."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.numel() > 1}
    return sum(found.values())


@pytest.mark.parametrize("name", ["embedding", "transformer"])
@pytest.mark.parametrize("way", [DDP, LEVEL_1, LEVEL_3])
@distributed(2, 3)
def test_real_parameters_gradients_and_state_are_within_two_percent(world_size: int, name: str, way: str) -> None:
    torch.manual_seed(0)
    module: nn.Module = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    if name == "embedding":
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3000))
    shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if way != DDP:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    model: nn.Module = (
        ShardedDataParallel(module, optimizer)
        if way == LEVEL_3
        else DistributedDataParallel(module, gradient_as_bucket_view=True)
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 5, 64)).sum().backward()
        optimizer.step()
    gradients = [param.grad for param in module.parameters() if param.grad is not None]
    inner = optimizer if way == DDP else optimizer.optim
    mine = [nbytes(list(module.parameters())), nbytes([getattr(grad, "local", grad) for grad in gradients])]
    mine.append(nbytes(list(tensors_in(list(inner.state.values())))))
    measured = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    rows = compare(Source(name, shapes), OPTIMIZERS["adamw"], "fp32", world_size)
    row = next(row for row in rows if row.name == way)
    expected = [row.memory[kind] for kind in ("parameters", "gradients", "state")]
    assert measured.tolist() == pytest.approx(expected, rel=0.02)
