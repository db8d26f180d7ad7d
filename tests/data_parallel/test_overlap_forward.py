"""``overlap_forward``: parameters arrive behind the next forward, which waits for them. And how they are sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onecopy.comm.collectives import Collectives
from onecopy.data_parallel.step import divide_into_segments
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


OVERLAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layers": (Layers, {}),
    "a parameter beside children": (Counted, {}),
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
    tolerance = 0.0 if world_size == 2 else ROUNDING
    with as_if_large():
        plain, ours = Side(False, make), Side(True, make, overlap_forward=True, **options)
        for step in range(12):
            for side in (plain, ours):
                one_step(side, step)
            if step % 2:
                with torch.no_grad():
                    mine, theirs = (side.model(inputs_of(0, 99)) for side in (ours, plain))
                assert_equal([mine], [theirs], f"{case}, outputs", tolerance)
        assert_equal(ours.params, plain.params, case, tolerance)
        assert_replicas_equal(ours.params)


READ: dict[str, Callable[[Side], object]] = {
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
    plain, ours = Side(False, Layers), Side(True, Layers, overlap_forward=True)
    for step, (reader, read) in enumerate([*READ.items(), *READ.items()]):
        one_step(plain, step)
        one_step(ours, step)
        pipelines = [each for _, each in ours.sharded._pipelines]
        assert any(each.in_flight for each in pipelines), "nothing was in flight"
        read(ours)
        assert not any(each.in_flight for each in pipelines)
        assert_equal(ours.module.parameters(), plain.params, reader, 0.0 if world_size == 2 else ROUNDING)


def train(side: Side, steps: int) -> None:
    for step in range(steps):
        one_step(side, step)


@distributed(2, 3)
def test_a_value_read_before_it_arrived_is_noticed(world_size: int) -> None:
    """Nothing says that the borrower reads another's weight: autograd has saved a value that then changed."""
    with as_if_large():
        ours = Side(True, Borrowing, overlap_forward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(ours, 6)


MB = 1 << 20


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranks", [2, 512])
@pytest.mark.parametrize("total", [20 * MB, 2600 * MB, 140_000 * MB])
def test_segments_grow_and_the_first_is_small(total: int, ranks: int, in_place: bool) -> None:
    """Buckets are updated and sent together in segments."""
    collectives = Collectives.__new__(Collectives)  # the ranks as far as sizes depend on them
    collectives.world_size, collectives._backends = ranks, {"cpu": "gloo" if in_place else "nccl"}
    device = torch.device("cpu")
    bucket_bytes = collectives.bucket_bytes(device)
    sizes: list[int] = []  # as plans have them: full buckets, and at the end ever smaller ones
    while (left := total - sum(sizes)) > 0:
        sizes.append(max(MB, min(bucket_bytes, left // 2)))
    segments = divide_into_segments(sizes, functools.partial(collectives.segment_bytes, device))
    assert [number for segment in segments for number in segment] == list(reversed(range(len(sizes))))
    assert [sizes[number] for number in segments[0]] == [MB], "the next forward pass reads it first"
    largest = max(sum(sizes[number] for number in segment) for segment in segments)
    if in_place:
        assert largest <= 2 * bucket_bytes
    else:
        assert len(segments) <= 10
        assert largest <= max(bucket_bytes, total // 3) + bucket_bytes
