"""``overlap_forward``: parameters arrive behind the next forward, which waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.data_parallel import ROUNDING, Layers, Side, as_if_large, inputs_of, one_step
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


def borrowing_unrun() -> Borrowing:
    return Borrowing(layer_runs=False)


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


class Counted(nn.Module):
    """A parameter of its own beside children, and one submodule that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.layers = Layers()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(self.layers(inputs * self.scale))
        return outputs


def several_steps(side: Side) -> None:
    for step in range(6):
        one_step(side, step)


OVERLAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layers": (Layers, {}),
    "a parameter beside children": (Counted, {}),
    "attention": (Attention, {}),
    "a layer that is read and not run": (borrowing_unrun, {}),
    "uses names a parameter": (Borrowing, {"uses": {"borrower": ["extra.weight"]}}),
    "uses names a submodule": (Borrowing, {"uses": {"borrower": ["extra"], "": ["layers.first.bias"]}}),
}


@pytest.mark.parametrize("case", OVERLAPPED)
@distributed(2, 3)
def test_overlapped_sharing_trains_alike(world_size: int, case: str) -> None:
    make, options = OVERLAPPED[case]
    with as_if_large():
        plain, ours = Side(False, make, torch.optim.SGD), Side(True, make, overlap_forward=True, **options)
        for step in range(12):
            for side in (plain, ours):
                one_step(side, step)
        tolerance = 0.0 if world_size == 2 else ROUNDING
        assert_equal(ours.params, plain.params, case, tolerance)
        assert_replicas_equal(ours.params)


@pytest.mark.parametrize("reader", ["parameters", "state_dict", "module.state_dict", "eval", "train", "wait", "zero"])
@distributed(2, 3)
def test_reading_parameters_waits_for_them(world_size: int, reader: str) -> None:
    read: dict[str, Callable[[Side], object]] = {
        "parameters": lambda side: list(side.model.parameters()),
        "state_dict": lambda side: side.model.state_dict(),
        "module.state_dict": lambda side: side.module.state_dict(),
        "eval": lambda side: side.model.eval(),
        "train": lambda side: side.model.train(),
        "wait": lambda side: side.sharded.wait(),
        "zero": lambda side: side.zero.wait(),
    }
    plain, ours = Side(False, Layers, torch.optim.SGD), Side(True, Layers, overlap_forward=True)
    for step in range(3):
        one_step(plain, step)
        one_step(ours, step)
        pipelines = [each for _, each in ours.sharded._pipelines]
        assert any(each.in_flight for each in pipelines), "nothing was in flight"
        read[reader](ours)
        assert not any(each.in_flight for each in pipelines)
        assert_equal(ours.module.parameters(), plain.params, reader, 0.0 if world_size == 2 else ROUNDING)


@distributed(2, 3)
def test_a_value_read_before_it_arrived_is_noticed(world_size: int) -> None:
    """Nothing says that the borrower reads another's weight: autograd has saved a value that then changed."""
    with as_if_large():
        ours = Side(True, Borrowing, overlap_forward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            several_steps(ours)


@distributed(2)
def test_evaluation_between_overlapped_steps(world_size: int) -> None:
    """A forward pass without gradients also waits, and does not disturb what comes after it."""
    with as_if_large():
        plain, ours = Side(False, Attention), Side(True, Attention, overlap_forward=True)
        for step in range(6):
            for side in (plain, ours):
                one_step(side, step)
            with torch.no_grad():
                mine, theirs = (side.model(inputs_of(0, 99)) for side in (ours, plain))
            assert torch.equal(mine, theirs)
        assert_equal(ours.params, plain.params, "parameters")
