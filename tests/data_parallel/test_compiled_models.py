"""Models compiled with the backend inductor, on every level of sharding, beside DDP with the same setting."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import (
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.harness import EVERYTHING, distributed
from tests.support.models import assert_equal, values

COMPILER = os.environ.get("CXX", "g++")
pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER) is None, reason=f"inductor needs a C++ compiler, and there is no {COMPILER} here"
    ),
    pytest.mark.timeout(600),  # a compilation takes seconds
]

LIMIT = 300.0
STEPS = 4
BUCKET_MB = 1
"""The smallest limit for DDP's buckets that the compiler takes. It breaks the graph at the bounds of buckets."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}

Made = tuple[nn.Module, Optimizer]
Compile = Callable[[Any], Any]


class Net(nn.Module):
    """Two layers of 1 MB each. A class of its own, because the compiler skips the forward of nn.Sequential in DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 512)
        self.middle = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.norm = nn.LayerNorm(512)
        self.last = nn.Linear(512, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(inputs))
        for layer in self.middle:
            hidden = torch.tanh(self.norm(layer(hidden)))
        outputs: Tensor = self.last(hidden)
        return outputs


def in_ddp(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB)


def sharded(module: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(module.parameters(), AdamW, **ADAMW, **options)


def plain(module: nn.Module) -> Made:
    ddp = in_ddp(module)
    return ddp, AdamW(ddp.parameters(), **ADAMW)


def level_1(module: nn.Module) -> Made:
    ddp = in_ddp(module)
    return ddp, sharded(ddp)


def level_2(module: nn.Module) -> Made:
    ddp = in_ddp(module)
    zero = sharded(ddp, shard_by="element")
    ddp.register_comm_hook(zero, reduce_scatter_hook)
    return ddp, zero


def overlapped(module: nn.Module, make_hook: Any = hook_with_zero_step) -> Made:
    ddp = in_ddp(module)
    zero = sharded(ddp, overlap_with_ddp=True)
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
    return ddp, zero


def interleaved(module: nn.Module) -> Made:
    return overlapped(module, hook_with_zero_step_interleaved)


def level_3(module: nn.Module, **options: Any) -> Made:
    zero = sharded(module)
    return ShardedDataParallel(module, zero, bucket_bytes=1 << 18, **options), zero


def overlapping_forward(module: nn.Module) -> Made:
    return level_3(module, overlap_forward=True)


LEVELS: dict[str, Callable[[nn.Module], Made]] = {
    "level 1": level_1,
    "reduce_scatter_hook": level_2,
    "hook_with_zero_step": overlapped,
    "hook_with_zero_step_interleaved": interleaved,
    "ShardedDataParallel": level_3,
    "ShardedDataParallel, overlap_forward": overlapping_forward,
}
CASES = [(level, order) for level in LEVELS for order in ("before", "after")]
FEW = [("reduce_scatter_hook", "after")]


def trained(make: Callable[[nn.Module], Made], order: str) -> tuple[list[Tensor], int]:
    """Train with the module compiled before or after it is wrapped, and with a compiled step if it is onecopy's.

    Returns the losses and, after each step, the parameters; and the number of graphs that were compiled.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled: Compile = lambda function: torch.compile(function, backend=counter)  # noqa: E731
    module = Net()
    model, optimizer = make(compiled(module) if order == "before" else module)
    call = compiled(model) if order == "after" else model
    step = compiled(optimizer.step) if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.step
    found = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        optimizer.zero_grad()
        loss = call(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        step()
        if isinstance(model, ShardedDataParallel):
            model.wait()
        found += [loss.detach(), *values(module.parameters())]
    return found, counter.frame_count


@pytest.mark.parametrize(("level", "order"), CASES if EVERYTHING else FEW)
@distributed(2, limit=LIMIT)
def test_a_compiled_model_trains_as_under_ddp(world_size: int, level: str, order: str) -> None:
    of_level_3 = level.startswith("ShardedDataParallel")
    with warnings.catch_warnings(), torch._dynamo.config.patch(optimize_ddp=not of_level_3):
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
        warnings.filterwarnings("ignore", message=".torch.jit.* is deprecated")  # inductor imports TorchScript
        expected, graphs = trained(plain, order)
        found, ours = trained(LEVELS[level], order)
    assert (graphs == 1) == of_level_3, "DDP breaks the graph at the bounds of its buckets"
    assert ours >= graphs, "with overlap_forward, hooks break the graph of a wrapper that is compiled"
    assert_equal(found, expected, "losses and parameters")
