"""ZeRO-1 in 100 lines of plain torch.distributed, to read before the library: each rank has 1/N of the optimizer state.

It works for optimizers that update each element by itself (SGD, Adam, AdamW). ``onecopy.ZeroRedundancyOptimizer`` gives
the same numbers. What it adds: other optimizers, several types and devices, checkpoints, levels 2 and 3, and errors
instead of hangs. Start it like this::

    torchrun --standalone --nproc-per-node 2 examples/zero_in_100_lines.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shared_parts import loss_of, make_model, run
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

UNIT = 64
"""Parameters begin, and shards are cut, at multiples of 64 elements. Elsewhere vectorised kernels round differently."""


def padded(numel: int, multiple: int) -> int:
    """Return the next multiple that is not smaller."""
    return -(-numel // multiple) * multiple


class SimpleZeRO(Optimizer):
    """Wraps an element-wise optimizer class. All ranks construct it with the same parameters, and step together."""

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **defaults: Any) -> None:
        super().__init__(params, defaults)
        every = [param for group in self.param_groups for param in group["params"]]

        # Layout: all parameters lie in one flat buffer, and rank r owns the r-th of N equal ranges of it.
        starts = [0]
        for param in every:
            starts.append(starts[-1] + padded(param.numel(), UNIT))
        length = padded(starts[-1], UNIT * dist.get_world_size()) // dist.get_world_size()
        first = dist.get_rank() * length
        self.flat = torch.zeros(length * dist.get_world_size(), dtype=every[0].dtype, device=every[0].device)
        self.own = self.flat[first : first + length]

        # Shards: what the range of this rank has of each parameter. The inner optimizer has state for them only.
        self.shards: list[tuple[Tensor, slice, Tensor]] = []  # parameter, its owned elements, a view of these in flat
        begin_of = dict(zip(every, starts, strict=False))
        groups = []
        for group in self.param_groups:
            found = []
            for param in group["params"]:
                start, values = begin_of[param], param.detach().clone()
                param.data = self.flat[start : start + param.numel()].view_as(param)
                param.data.copy_(values)
                begin, end = max(start, first), min(start + param.numel(), first + length)
                if begin < end:
                    found.append(self.flat[begin:end])
                    self.shards.append((param, slice(begin - start, end - start), found[-1]))
            groups.append({**group, "params": found})
        self.inner = optimizer_class(groups, **defaults)
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({name: option for name, option in inner_group.items() if name != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step, after a backward pass under DDP."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        # Reduce gradients: DDP has averaged them in the backward pass.
        # Copy hyperparameters: the groups that the user and schedulers see are the truth.
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({name: option for name, option in group.items() if name != "params"})
        # Update own shards.
        for param, owned, shard in self.shards:
            shard.grad = None if param.grad is None else param.grad.reshape(-1)[owned]
        self.inner.step()
        # All-gather of parameters.
        dist.all_gather(list(self.flat.chunk(dist.get_world_size())), self.own)
        return loss


def train(device: torch.device, steps: int = 30) -> list[float]:
    """Train the model of the examples, and return the losses of this rank."""
    model = DistributedDataParallel(make_model(device))
    optimizer = SimpleZeRO(model.parameters(), AdamW, lr=1e-3)
    scheduler, losses = StepLR(optimizer, 10, 0.5), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train)
