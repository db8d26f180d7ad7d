"""Values that optimizers keep in their state: allowed types survive exactly, any other is refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from onecopy import PeerFailedError, ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.state_dicts import Pair, expect_not_consolidated, expect_same, part


class Hoarder(Optimizer):
    """Keeps everything that is allowed in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])
                    self.state[param] = treasures()


def treasures() -> dict[Any, Any]:
    return {
        "none": None,
        "yes": True,
        "no": False,
        "count": 3,
        "huge": 2**80,
        "float": 0.1,
        "infinite": math.inf,
        "minus infinite": -math.inf,
        "not a number": math.nan,
        "minus zero": -0.0,
        "text": "grün \udcff \x00",
        "empty text": "",
        "tuple": (1, (2.0, [3, None]), ()),
        "list": [[], [True, "a"], {"b": (torch.arange(3),)}],
        "dict": {"deep": {"deeper": torch.tensor([1.5, math.nan])}, 7: {}, None: "x", True: 1.0, 2.5: 3},
        5: "integer key",
        "bool tensor": torch.tensor([True, False]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
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
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
    }


@distributed(2, 3)
def test_everything_that_is_allowed_in_state_survives_exactly(world_size: int) -> None:
    # Complex parameters, because torch's optimizers convert loaded state to a real parameter's own data type.
    params = [nn.Parameter(torch.ones(4, dtype=torch.complex64)) for _ in range(3)]
    optimizer = ZeroRedundancyOptimizer(params, Hoarder)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for to in range(world_size):
        optimizer.consolidate_state_dict(to)
        if optimizer.rank == to:
            state_dict = optimizer.state_dict()
    expected = {index: treasures() for index in range(3)}
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
def test_state_answers_like_the_plain_optimizers_mapping(world_size: int) -> None:
    pair = Pair(names=["matrix", "small"])
    for param in pair.params.values():
        assert pair.ours.state.get(param) is None
        assert pair.ours.state.pop(param, "none") == "none"
    pair.train()
    owned = {shard.param for shard in pair.ours.layout.owned_by(pair.ours.rank)}
    for index, param in enumerate(pair.params.values()):
        state = pair.ours.state.pop(param, None)
        assert (state is not None) == (index in owned)
        assert param not in pair.ours.state
    assert len(pair.ours.state) == 0
    assert not pair.ours.optim.state


@distributed(2)
def test_a_slice_kept_as_state_comes_back_with_its_values(world_size: int) -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = ZeroRedundancyOptimizer([param], SGD, lr=0.1, momentum=0.9)
    param.grad = torch.ones(4)
    optimizer.step()
    if param in optimizer.state:
        optimizer.state[param]["slice"] = torch.arange(12).reshape(3, 4)[:, ::2]
        optimizer.state[param]["expanded"] = torch.tensor([2.5]).expand(3)
    optimizer.consolidate_state_dict()
    if optimizer.rank == 0:
        state = optimizer.state_dict()["state"][0]
        assert state["slice"].tolist() == [[0, 2], [4, 6], [8, 10]]
        assert state["expanded"].tolist() == [2.5, 2.5, 2.5]


class Anything:
    """No plain data."""


FORBIDDEN: dict[str, tuple[Any, str]] = {
    "a set": ({1, 2}, r"builtins\.set"),
    "an object": (Anything(), r"test_state_values\.Anything"),
    "bytes": (b"abc", r"builtins\.bytes"),
    "a complex number": (1j, r"builtins\.complex"),
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
    with pytest.raises((TypeError, PeerFailedError)) as caught:
        pair.ours.consolidate_state_dict()
    dist.barrier()
    text = "'small'" if case == "a sparse tensor" else r"'small'.*'odd one'"
    if pair.ours.rank == owner:
        assert caught.type is TypeError
    else:
        assert caught.type is PeerFailedError
        text = rf"failed on rank {owner}: TypeError: .*{text}"
    assert re.search(rf"{text}.*{kind}", str(caught.value)), str(caught.value)
    if pair.ours.rank == owner:
        del pair.ours.state[pair.params["small"]]["odd one"]
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        expect_same(state_dict, pair.plain.state_dict())


class Noter(SGD):
    """An element-wise class that notes something more for every tensor it steps."""

    note: Callable[[Tensor], Any] = staticmethod(lambda _: None)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["note"] = type(self).note(param)
        return super().step(closure)


class NotesItsRank(Noter):
    note = staticmethod(lambda _: dist.get_rank())


class NotesItsKind(Noter):
    note = staticmethod(lambda _: None if dist.get_rank() else torch.ones(3))


class NotesATable(Noter):
    """Of the size of the first rank's range, but not one value per element."""

    note = staticmethod(lambda _: torch.arange(1216.0))


class NotesOneNaN(Noter):
    note = staticmethod(lambda _: torch.tensor(math.nan))


class NotesPerElement(Noter):
    note = staticmethod(lambda param: {"both": (torch.full_like(param, 2.5), torch.arange(3))})


@distributed(2)
@pytest.mark.parametrize("optimizer_class", [NotesItsRank, NotesItsKind, NotesATable])
def test_owners_of_a_cut_parameter_must_agree_on_values_that_are_not_per_element(
    world_size: int, optimizer_class: type[Noter]
) -> None:
    options: dict[str, Any] = {"shard_by": "element", "elementwise": True}
    pair = Pair(part(optimizer_class, lr=0.1), names=["small", "matrix"], **options).train(1)
    assert [shard.numel for shard in pair.ours.layout.shards_of(1)] == [1216, 1184]
    for to in range(world_size):
        with pytest.raises((ValueError, PeerFailedError)) as caught:
            pair.ours.consolidate_state_dict(to)
        dist.barrier()
        assert caught.type is (ValueError if pair.ours.rank == to else PeerFailedError)
        assert re.search("'matrix' is cut .*ranks 0 and 1 differ", str(caught.value)), str(caught.value)
        expect_not_consolidated(pair.ours)
    pair.train()


@distributed(2)
def test_a_value_that_owners_agree_on_is_kept_once_even_if_it_is_not_a_number(world_size: int) -> None:
    pair = Pair(part(NotesOneNaN, lr=0.1), names=["matrix"], shard_by="element", elementwise=True).train(1)
    pair.ours.consolidate_state_dict()
    if pair.ours.rank == 0:
        expect_same(pair.ours.state_dict(), pair.plain.state_dict())


@distributed(2)
def test_values_per_element_are_put_together_inside_containers_too(world_size: int) -> None:
    pair = Pair(part(NotesPerElement, lr=0.1), names=["matrix"], shard_by="element", elementwise=True).train(1)
    pair.ours.consolidate_state_dict()
    if pair.ours.rank == 0:
        note = pair.ours.state_dict()["state"][0]["note"]
        expect_same(note, {"both": (torch.full((60, 40), 2.5), torch.arange(3))})
