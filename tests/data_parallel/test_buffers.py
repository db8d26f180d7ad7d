"""Buffers of a module in ``ShardedDataParallel``: they are sent where DDP sends them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.data_parallel import Batched, Layers, Run, side_of
from tests.support.harness import distributed
from tests.support.models import assert_equal


def accumulate(side: Run, number: int) -> None:
    with side.model.no_sync():
        side.loss(number).backward()


def train_in_evaluation_mode(side: Run, number: int) -> None:
    """With the averages of earlier batches, so that gradients depend on buffers."""
    side.model.eval()
    side.iterate(number)
    side.model.train()


@torch.no_grad()
def evaluate(side: Run, number: int) -> None:
    side.model.eval()
    side.noted.append(side.loss(number))
    side.model.train()


@torch.no_grad()
def forward_without_gradients(side: Run, number: int) -> None:
    """In training mode, so that buffers change."""
    side.noted.append(side.loss(number))


def wrong_inputs(side: Run, number: int) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        side.model(torch.ones(2, 3))


PASSES = (Run.iterate, accumulate, train_in_evaluation_mode, evaluate, forward_without_gradients, wrong_inputs)


@pytest.mark.parametrize("second", PASSES, ids=lambda kind: kind.__name__)
@distributed(2)
def test_buffers_are_those_of_ddp_after_every_pass(world_size: int, second: Callable[[Run, int], None]) -> None:
    """DDP sends them before a pass if the pass before it had gradients that are reduced."""
    plain, ours = side_of(False, Batched), side_of(True, Batched)
    number = 0
    for first in PASSES:
        for kind in (Run.iterate, first, second, Run.iterate):
            number += 1
            for side in (plain, ours):
                kind(side, number)
            text = f"{first.__name__}, {second.__name__}: after {kind.__name__}"
            assert_equal(ours.module.buffers(), plain.module.buffers(), text)
        assert_equal(ours.params, plain.params, f"{first.__name__}, {second.__name__}")
    assert_equal(ours.noted, plain.noted, "outputs")


class Counting(Layers):
    """Puts a new tensor in the place of its buffer in every forward pass."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + 1 + dist.get_rank()
        return super().forward(inputs)


@pytest.mark.parametrize("broadcast", [True, False])
@distributed(2, 3)
def test_a_buffer_that_the_module_replaces_follows_if_wished(world_size: int, broadcast: bool) -> None:
    side = side_of(True, Counting, broadcast_buffers=broadcast)
    for step in range(3):
        side.iterate(step)
        expected = step + 1 + dist.get_rank() if broadcast else (step + 1) * (1 + dist.get_rank())
        assert side.module.get_buffer("seen").item() == expected, "rank 0 adds one each time"


@distributed(2, 3)
def test_buffers_of_every_kind_begin_as_those_of_the_first_rank(world_size: int) -> None:
    def make(first: bool) -> Layers:
        module = Layers()
        scale = 1.0 if first else 7.0
        module.register_buffer("rows", torch.arange(12.0).view(3, 4).t() * scale)
        module.register_buffer("some", torch.arange(12.0).view(3, 4)[:, ::2] * scale)
        module.register_buffer("part", (torch.arange(24.0) * scale).view(3, 8)[:, ::2])
        module.register_buffer("flags", torch.tensor([first, True]))
        module.register_buffer("count", torch.tensor(3 if first else 4))
        module.register_buffer("nothing", torch.zeros(0))
        return module

    module, expected = side_of(True, lambda: make(dist.get_rank() == 0)).module, make(True)
    for found, wanted in zip(module.buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
