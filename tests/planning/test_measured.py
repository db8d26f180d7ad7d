"""The planner's bytes beside those of tensors in real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.common.nested_tensors import tensors_in
from onecopy.planning.comparison import DDP, LEVEL_1, LEVEL_3, compare
from onecopy.planning.memory import OPTIMIZERS
from onecopy.planning.models import Source
from tests.support.harness import distributed

WIDTH = 64
MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))),
    "embedding": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3000)),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True),
}


def nbytes(tensors: list[Tensor]) -> int:
    """The bytes of distinct storages; scalars such as step counters are not counted."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.numel() > 1}
    return sum(found.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", [DDP, LEVEL_1, LEVEL_3])
@distributed(1, 2, 3, 4)
def test_parameters_gradients_and_state_within_two_percent(world_size: int, name: str, way: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
    model: Any
    optimizer: Any
    if way == LEVEL_3:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
        model = ShardedDataParallel(module, optimizer)
    else:
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if way == DDP:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 5, WIDTH)).sum().backward()
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
