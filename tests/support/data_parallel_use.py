"""Models and losses of training loops with ``ShardedDataParallel``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.data_parallel import Layers, Side, inputs_of
from tests.support.ddp_training import Branching


class Batched(nn.Module):
    """Buffers that change in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.norm(self.first(inputs))))
        return outputs


class Checkpointed(Layers):
    """The middle is computed again in the backward pass."""

    reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        outputs: Tensor = self.last(torch.tanh(hidden))
        return outputs


def loss_of(side: Side, number: int, branch: bool = False) -> Tensor:
    """One pass on this rank's data."""
    inputs = inputs_of(dist.get_rank(), number)
    outputs = side.model(inputs, branch) if isinstance(side.module, Branching) else side.model(inputs)
    loss: Tensor = outputs.square().mean()
    return loss


def closure(side: Side, step: int) -> None:
    def evaluate() -> float:
        side.optimizer.zero_grad()
        loss = loss_of(side, step)
        loss.backward()
        return loss.item()

    side.noted.append(torch.tensor(side.optimizer.step(evaluate)))


class Meeting(torch.autograd.Function):
    """Its backward waits for all ranks."""

    @staticmethod
    def forward(_context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Any:
        dist.barrier()
        return gradient
