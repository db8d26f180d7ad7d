"""Values that optimizers keep in their state: allowed types survive exactly, any other is refused."""

from __future__ import annotations

import collections
import copy
import enum
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from onecopy import PeerFailedError, ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.state_dicts import Pair, expect_same, part


class Noter(SGD):
    """An element-wise class that notes something more for every tensor it steps."""

    note: Callable[[Tensor], Any] = staticmethod(lambda _: None)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["note"] = type(self).note(param)
        return super().step(closure)


def noting(note: Callable[[Tensor], Any]) -> type[Noter]:
    return type("Noting", (Noter,), {"note": staticmethod(note)})


def treasures(_: Any = None) -> dict[Any, Any]:
    """Everything that is allowed."""
    return {
        "plain": [None, True, False, 3, 2**80, 0.1, math.inf, -math.inf, math.nan, -0.0],
        "text": ["grün \udcff \x00", ""],
        "tuple": (1, (2.0, [3, None]), ()),
        "list": [[], [True, "a"], {"b": (torch.arange(3),)}],
        "dict": {"deep": {"deeper": torch.tensor([1.5, math.nan])}, 7: {}, None: "x", True: 1.0, 2.5: 3},
        5: "integer key",
        "5": "text key",
        (1, "a"): "tuple key",
        "like our tags": [["tensor", 0], ["float", "nan"], ("tuple", [])],
        "bool tensor": torch.tensor([True, False]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "int16": torch.tensor([[-3]], dtype=torch.int16),
        "uint16": torch.tensor([65535], dtype=torch.uint16),
        "int64": torch.tensor([2**62, -(2**62)]),
        "float16": torch.tensor([0.1, math.inf], dtype=torch.float16),
        "bfloat16": torch.tensor([[0.1], [3e38]], dtype=torch.bfloat16),
        "float8": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
        "float64": torch.tensor([1 / 3, math.nan, -0.0], dtype=torch.float64),
        "complex128": torch.tensor([1 + 2j, complex(math.nan, math.inf)], dtype=torch.complex128),
        "scalar": torch.tensor(7, dtype=torch.int32),
        "empty tensor": torch.empty(0, 3, dtype=torch.int64),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "a tensor twice": [torch.zeros(2)] * 2,
        "dtype and size": [torch.bfloat16, torch.Size([2, 3])],
    }


@distributed(2, 3)
def test_everything_that_is_allowed_in_state_survives_exactly(world_size: int) -> None:
    # Complex parameters, because torch's optimizers convert loaded state to a real parameter's own data type.
    params = [nn.Parameter(torch.ones(4, dtype=torch.complex64)) for _ in range(3)]
    optimizer = ZeroRedundancyOptimizer(params, noting(treasures), lr=0.1)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for to in range(world_size):
        optimizer.consolidate_state_dict(to)
        if optimizer.rank == to:
            state_dict = optimizer.state_dict()
    expected = {index: {"note": treasures()} for index in range(3)}
    expect_same(state_dict["state"], expected)
    optimizer.state.clear()
    optimizer.load_state_dict(state_dict)
    mine = [index for index, param in enumerate(params) if param in optimizer.state]
    assert mine == [shard.param for shard in optimizer.layout.owned_by(optimizer.rank)]
    for index in mine:
        expect_same(dict(optimizer.state[params[index]]), expected[index])
    optimizer.consolidate_state_dict()
    if optimizer.rank == 0:
        expect_same(optimizer.state_dict()["state"], expected)


@distributed(2)
def test_a_slice_kept_as_state_comes_back_with_its_values(world_size: int) -> None:
    pair = Pair(names=["small"]).train()
    for state in pair.ours.optim.state.values():
        state["slice"] = torch.arange(12).reshape(3, 4)[:, ::2]
        state["expanded"] = torch.tensor([2.5]).expand(3)
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        assert state_dict["state"][0]["slice"].tolist() == [[0, 2], [4, 6], [8, 10]]
        assert state_dict["state"][0]["expanded"].tolist() == [2.5, 2.5, 2.5]


class Colour(enum.IntEnum):
    RED = 1


class Named(NamedTuple):
    left: int


FORBIDDEN: dict[str, tuple[Any, str]] = {
    "a set": ({1, 2}, r"builtins\.set"),
    "an object": (object(), r"builtins\.object"),
    "an enum": (Colour.RED, r"test_state_values\.Colour"),
    "a named tuple": (Named(1), r"test_state_values\.Named"),
    "a default dict": (collections.defaultdict(int), r"collections\.defaultdict"),
    "a key": ({frozenset(): 1}, r"builtins\.frozenset"),
    "bytes": (b"abc", r"builtins\.bytes"),
    "a function": (copy.copy, r"function"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "sparse"),
}


@distributed(2, 3)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", FORBIDDEN)
def test_anything_else_in_state_is_an_error_with_its_place(world_size: int, case: str, nested: bool) -> None:
    value, kind = FORBIDDEN[case]
    pair = Pair(names=["small", "scalar"]).train()
    owner = pair.ours.layout.shards_of(0)[0].owner
    if pair.ours.rank == owner:
        pair.ours.state[pair.params["small"]]["odd one"] = {"inside": [value]} if nested else value
    text = "'small'" if case == "a sparse tensor" else r"'small'.*'odd one'"
    error: type[Exception] = TypeError
    if pair.ours.rank != owner:
        error, text = PeerFailedError, rf"failed on rank {owner}: TypeError: .*{text}"
    with pytest.raises(error, match=re.compile(f"{text}.*{kind}", re.DOTALL)):
        pair.ours.consolidate_state_dict()
    dist.barrier()
    if pair.ours.rank == owner:
        del pair.ours.state[pair.params["small"]]["odd one"]
    pair.expect_plain()


CUT: dict[str, Any] = {"shard_by": "element", "elementwise": True}
DISAGREEING: dict[str, Callable[[Tensor], Any]] = {
    "its rank": lambda _: dist.get_rank(),
    "its kind": lambda _: None if dist.get_rank() else torch.ones(3),
    "its type": lambda param: torch.ones_like(param, dtype=torch.float64 if dist.get_rank() else torch.float32),
    # Of the size of the first rank's range, but not one value per element.
    "a table": lambda _: torch.arange(1216.0),
}


@distributed(2)
@pytest.mark.parametrize("case", DISAGREEING)
def test_owners_of_a_cut_parameter_must_agree_on_values_that_are_not_per_element(world_size: int, case: str) -> None:
    pair = Pair(part(noting(DISAGREEING[case]), lr=0.1), names=["small", "matrix"], **CUT).train(1)
    assert [shard.numel for shard in pair.ours.layout.shards_of(1)] == [1216, 1184]
    for to in range(world_size):
        error = ValueError if pair.ours.rank == to else PeerFailedError
        with pytest.raises(error, match=re.compile("'matrix' is cut .*ranks 0 and 1 differ", re.DOTALL)):
            pair.ours.consolidate_state_dict(to)
        dist.barrier()
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            pair.ours.state_dict()
    pair.train()


@distributed(2)
def test_values_per_element_are_put_together_and_others_are_kept_once(world_size: int) -> None:
    pair = Pair(part(noting(lambda _: torch.tensor(math.nan)), lr=0.1), names=["matrix"], **CUT)
    pair.train(1).expect_plain()
    inside = noting(lambda param: {"both": (torch.full_like(param, 2.5), torch.arange(3))})
    pair = Pair(part(inside, lr=0.1), names=["matrix"], **CUT).train(1)
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        note = state_dict["state"][0]["note"]
        expect_same(note, {"both": (torch.full((60, 40), 2.5), torch.arange(3))})
