"""Training with ``ShardedDataParallel``, and beside it with DDP: models, sides and the runner of the table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm import limits
from tests.support.models import Everything, values
from tests.support.parity import Case, Run, make_plain, parts_of, train_steps

Model = ShardedDataParallel | DistributedDataParallel
Hook = Callable[[Any, Any], Future[Tensor]]

ROUNDING = 2e-6
"""More than two ranks, or several reductions that DDP adds up in another order."""

SMALL = 4000
"""A size of buckets, in bytes, with which every model here has several."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


# Models


class Layers(nn.Module):
    """A few linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))
        return outputs


class Searched(Layers):
    """Uses all of its parameters; a submodule's name makes ``Side`` let DDP look for unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Identity()


class Batched(nn.Module):
    """Buffers that change in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64, bias=False)  # a bias would have a gradient of nothing but rounding
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


class Branching(nn.Module):
    """A branch that is never used, one that is used at will, and a layer that can be frozen without a loss of path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 160)
        self.middle = nn.Linear(160, 16)
        self.sometimes = nn.Linear(160, 4)
        self.never = nn.Linear(8, 4)
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, take_branch: bool) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        outputs: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return outputs + self.sometimes(hidden) if take_branch else outputs


# Both ways to train a model


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Make a tiny model be treated as a large one.

    Every bucket is updated and sent on its own, so that several are on their way at once; all but the smallest
    gradients are sent from where they are, the longer ones in several messages.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SEGMENT_GROWTH", 0)
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 200)
        patch.setattr(limits, "CHUNK_BYTES", 256)
        patch.setattr(limits, "REDUCE_MESSAGE_BYTES", 256)
        yield


class Side:
    """A model and its optimizers, ours or the reference, made from the same seed."""

    def __init__(
        self,
        ours: bool,
        make: Callable[[], nn.Module],
        optimizer: type[Optimizer] = torch.optim.SGD,
        options: dict[str, Any] | None = None,
        group: Any = None,
        frozen: Sequence[str] = (),
        **wrap: Any,
    ) -> None:
        torch.manual_seed(5)
        self.ours = ours
        self.module = make()
        if ours:
            self.freeze(*frozen)
        self.noted: list[Tensor] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.model: Model
        self.optimizer: Optimizer
        if ours:
            self.optimizer = ZeroRedundancyOptimizer(
                self.module.parameters(), optimizer, process_group=group, **(options or SGD)
            )
            self.model = ShardedDataParallel(self.module, self.optimizer, **{"bucket_bytes": SMALL, **wrap})
        else:
            unused = any("never" in name for name, _ in self.module.named_modules())
            self.model = DistributedDataParallel(self.module, process_group=group, find_unused_parameters=unused)
            self.optimizer = optimizer(self.module.parameters(), **(options or SGD))
            self.freeze(*frozen)  # DDP never reduces what was frozen when it was constructed

    def freeze(self, *names: str, frozen: bool = True) -> None:
        """Freeze or unfreeze parameters, by name."""
        for name in names:
            self.module.get_parameter(name).requires_grad_(not frozen)

    def clip(self, max_norm: float, order: float = 2.0) -> Tensor:
        """Clip the gradients with the model's method, or with torch's function."""
        if self.ours:
            return self.sharded.clip_grad_norm_(max_norm, order)
        return nn.utils.clip_grad_norm_(self.params, max_norm, order)

    @property
    def sharded(self) -> ShardedDataParallel:
        assert isinstance(self.model, ShardedDataParallel)
        return self.model

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)
        return self.optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(side: Side, number: int, branch: bool = False) -> Tensor:
    """One pass on this rank's data."""
    inputs = inputs_of(dist.get_rank(), number)
    outputs = side.model(inputs, branch) if isinstance(side.module, Branching) else side.model(inputs)
    loss: Tensor = outputs.square().mean()
    return loss


def one_step(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.model(inputs_of(dist.get_rank(), step)).square().mean().backward()
    side.optimizer.step()


# The table of optimizers


def zero_all(model: Model, params: Sequence[Tensor], optimizers: Sequence[Optimizer], step: int) -> None:
    """Let go of the gradients, in another way in every step."""
    if step % 4 == 0:
        model.zero_grad()
    elif step % 4 == 1:
        for optimizer in optimizers:
            optimizer.zero_grad()
    elif step % 4 == 2:
        model.module.zero_grad()
    else:
        for param in params:
            param.grad = None


def train(case: Case, steps: int, ours: bool, overlap: bool = False, hook: Hook | None = None) -> Run:
    """Train the model that has everything, from the same weights and on the same data every time."""
    torch.manual_seed(11)
    module = Everything()
    params: list[Tensor] = list(module.parameters())
    model: Model
    optimizers: list[Optimizer] = []
    parts = parts_of(case, params)
    if ours:
        zeros = [
            ZeroRedundancyOptimizer(part, optimizer, elementwise=case.elementwise, **options)
            for part, optimizer, options in parts
        ]
        model = ShardedDataParallel(module, zeros, bucket_bytes=SMALL, overlap_forward=overlap)
        optimizers += zeros
    else:
        model = DistributedDataParallel(module, find_unused_parameters=True)
        if hook is not None:
            # A lambda, because DDP compares annotations, which are strings here.
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        optimizers += [make_plain(*part) for part in parts]
    history = []
    for step in train_steps(case, model, optimizers, steps):
        zero_all(model, params, optimizers, step)
        if not overlap:
            history.append(values(params))
        elif step == steps - 1:
            history.append(values(model.parameters()))
    return Run(history, values(model.parameters()), optimizers)


def in_rank_order(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A hook for DDP that scales gradients first, as DDP does, and adds them up in the order of ranks."""
    mine = bucket.buffer() * (1.0 / dist.get_world_size())
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    for row in rows[1:]:
        rows[0].add_(row)
    done: Future[Tensor] = Future()
    done.set_result(rows[0])
    return done
