"""Training on every level whose gradients are exact, so that the state is the plain optimizer's bit by bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import onecopy
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.state_dicts import expect_same

KINDS = (
    "parameter",
    "element",
    "bucket views",
    "reduce-scatter",
    "overlap",
    "sharded data parallel",
    "overlap forward",
    "master weights",
)

OPTIONS: dict[str, dict[str, Any]] = {
    "element": {"shard_by": "element"},
    "bucket views": {"parameters_as_bucket_view": True},
    "overlap": {"overlap_with_ddp": True},
    "master weights": {"master_weights": True, "shard_by": "element"},
}

LR = 0.01


class Weighted(nn.Module):
    """A module whose gradients are the inputs times small integers, so that every order of summation is exact."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values = torch.Generator().manual_seed(1)
        shapes = [(30, 70), (1000,), (5,), (40, 33)]
        self.weights = nn.ParameterList([torch.randn(shape, generator=values).to(dtype) for shape in shapes])

    def forward(self, scale: Tensor) -> Tensor:
        parts = [((position + 1) * scale * weight).sum() for position, weight in enumerate(self.weights)]
        return torch.stack(parts).sum()


class ExactTraining:
    """A model on one level beside a plain optimizer that knows the mean gradients."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        dtype = torch.bfloat16 if kind == "master weights" else torch.float32
        module, self.plain_module = Weighted(dtype), Weighted(dtype).float()
        self.plain = AdamW(self.plain_module.parameters(), lr=LR)
        sharded = kind in ("sharded data parallel", "overlap forward")
        options = {**OPTIONS.get(kind, {}), **options}
        if not sharded:
            self.model: Any = DistributedDataParallel(module)
        self.zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=LR, **options)
        if sharded:
            self.model = ShardedDataParallel(module, self.zero, overlap_forward=kind == "overlap forward")
        elif kind == "reduce-scatter":
            self.model.register_comm_hook(self.zero, onecopy.reduce_scatter_hook)
        elif kind == "overlap":
            self.model.register_comm_hook(None, onecopy.hook_with_zero_step(allreduce_hook, self.model, self.zero))
        self.passes = 0

    def accumulate(self) -> None:
        """Run a pass whose gradients stay on this rank."""
        with self.model.no_sync():
            self._pass()

    def step(self) -> None:
        """Run a pass and a step."""
        self._pass()
        self.zero.step()
        self.zero.zero_grad()
        self.plain.step()
        self.plain.zero_grad()

    def _pass(self) -> None:
        self.passes += 1
        world_size, rank = dist.get_world_size(), dist.get_rank()
        scales = [float(12 * (other + self.passes % 3)) for other in range(world_size)]
        dtype = next(self.model.parameters()).dtype
        self.model(torch.tensor(scales[rank], dtype=dtype)).backward()
        mean = sum(scales) / world_size
        for position, param in enumerate(self.plain_module.parameters()):
            gradient = torch.full_like(param, mean * (position + 1))
            param.grad = gradient if param.grad is None else param.grad + gradient

    def expect_plain(self, state_dict: dict[str, Any]) -> None:
        """Compare a state dict of ours with the plain optimizer's."""
        expected = self.plain.state_dict()
        expect_same(dict(state_dict["state"]), expected["state"])
        expect_same(state_dict["param_groups"], expected["param_groups"])
        if self.kind == "master weights":
            masters = dict(enumerate(param.detach() for param in self.plain_module.parameters()))
            expect_same(dict(state_dict["master_weights"]), masters)
        else:
            assert "master_weights" not in state_dict
