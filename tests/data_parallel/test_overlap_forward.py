"""``overlap_forward``: parameters arrive behind the next forward, which waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.data_parallel import ROUNDING, Layers, Run, as_if_large, inputs_of, side_of
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal


class Borrower(nn.Module):
    """Runs its own layer, and reads the weight of another one that has not run yet."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self._other = [other]

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(self.own(inputs), self._other[0].weight[:8, :8])


class Borrowing(nn.Module):
    """The first module to run reads the weight of the last one."""

    def __init__(self, layer_runs: bool = True) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 64, bias=False)  # first, and so in the last bucket
        self.layers = Layers()
        self.borrower = Borrower(self.extra)
        self.layer_runs = layer_runs

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(self.borrower(inputs))
        outputs: Tensor = self.extra(hidden) if self.layer_runs else hidden
        return outputs


class Attention(nn.Module):
    """Modules of torch that read their children's parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs).unsqueeze(0)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        outputs: Tensor = self.out(self.encoder(hidden))
        return outputs


OVERLAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layers": (Layers, {}),
    "attention": (Attention, {}),
    "a layer that is read and not run": (lambda: Borrowing(layer_runs=False), {}),
    "uses names a parameter": (Borrowing, {"uses": {"borrower": ["extra.weight"]}}),
    "uses names a submodule": (Borrowing, {"uses": {"borrower": ["extra"], "": ["layers.first.bias"]}}),
}


@pytest.mark.parametrize("case", OVERLAPPED)
@distributed(2, 3)
def test_overlapped_sharing_trains_alike(world_size: int, case: str) -> None:
    """A forward pass without gradients also waits, and does not disturb the next one."""
    make, options = OVERLAPPED[case]
    tolerance = 0.0 if world_size == 2 else 2 * ROUNDING
    with as_if_large():
        plain, ours = side_of(False, make), side_of(True, make, overlap_forward=True, **options)
        for step in range(12):
            for side in (plain, ours):
                side.iterate(step)
            if step % 2:
                with torch.no_grad():
                    mine, theirs = (side.model(inputs_of(0, 99)) for side in (ours, plain))
                assert_equal([mine], [theirs], f"{case}, outputs", tolerance)
        assert_equal(ours.params, plain.params, case, tolerance)
        assert_replicas_equal(ours.params)


READ: dict[str, Callable[[Run], object]] = {
    "parameters": lambda side: list(side.model.parameters()),
    "state_dict": lambda side: side.model.state_dict(),
    "module.state_dict": lambda side: side.module.state_dict(),
    "eval": lambda side: side.model.eval(),
    "train": lambda side: side.model.train(),
    "wait": lambda side: side.sharded.wait(),
    "zero": lambda side: side.zero.wait(),
}


@distributed(2, 3)
def test_reading_parameters_waits_for_them(world_size: int) -> None:
    plain, ours = side_of(False, Layers), side_of(True, Layers, overlap_forward=True)
    for step, (reader, read) in enumerate([*READ.items(), *READ.items()]):
        plain.iterate(step)
        ours.iterate(step)
        pipelines = [each for _, each in ours.sharded._pipelines]
        assert any(each.in_flight for each in pipelines), "nothing was in flight"
        read(ours)
        assert not any(each.in_flight for each in pipelines)
        assert_equal(ours.module.parameters(), plain.params, reader, 0.0 if world_size == 2 else 2 * ROUNDING)


@distributed(2, 3)
def test_a_value_read_before_it_arrived_is_noticed(world_size: int) -> None:
    """Nothing says that the borrower reads another's weight: autograd has saved a value that then changed."""

    def train(run: Run) -> None:
        for step in range(6):
            run.iterate(step)

    with as_if_large(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(side_of(True, Borrowing, overlap_forward=True))
