"""A consolidated state dict is the plain optimizer's, in both directions, whatever the number of ranks."""

from __future__ import annotations

import copy
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from harness import distributed
from onecopy import PeerFailedError, ZeroRedundancyOptimizer

Factory = functools.partial[Optimizer]
"""An optimizer class and its options."""

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((60, 40), torch.float32),
    "image": ((16, 8, 3, 3), torch.float32),  # in channels-last
    "wave": ((40, 30), torch.complex64),
    "half": ((50, 30), torch.bfloat16),
    "double": ((1100,), torch.float64),
    "small": ((7,), torch.float32),
    "scalar": ((), torch.float32),
    "nothing": ((0, 3), torch.float32),
}


def make_params(names: Iterable[str] = SHAPES) -> dict[str, nn.Parameter]:
    """Parameters of many kinds; most are large enough to be cut."""
    params = {}
    for name in names:
        shape, dtype = SHAPES[name]
        value = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(name)))
        if name == "image":
            value = value.to(memory_format=torch.channels_last)
        params[name] = nn.Parameter(value)
    return params


class Pair:
    """A plain optimizer and ours over equal parameters with equal gradients."""

    def __init__(
        self,
        factory: Factory | None = None,
        names: Iterable[str] = SHAPES,
        group: dist.ProcessGroup | None = None,
        options: dict[str, Any] | None = None,
        **ours: Any,
    ) -> None:
        self.params = make_params(names)
        self.plain_params = make_params(names)
        factory = factory or part(Adam, lr=0.1)
        optimizer_class: Any = factory.func
        defaults = {**factory.keywords, **(options or {})}
        self.ours = ZeroRedundancyOptimizer(
            self.params.items(),
            optimizer_class,
            process_group=group,
            **defaults,
            **ours,
        )
        self.plain = optimizer_class(self.plain_params.items(), **defaults)
        self.steps = 0

    def train(self, steps: int = 2) -> Pair:
        for _ in range(steps):
            self.steps += 1
            for position, (name, param) in enumerate(self.params.items()):
                generator = torch.Generator().manual_seed(100 * self.steps + position)
                gradient = torch.empty_like(param).detach()
                gradient.copy_(torch.randn(param.shape, dtype=param.dtype, generator=generator))
                param.grad, self.plain_params[name].grad = gradient, gradient.clone()
            self.ours.step()
            self.plain.step()
        for name, param in self.params.items():
            expect_same(param.detach(), self.plain_params[name].detach())
        return self

    def consolidated(self, to: int = 0) -> dict[str, Any]:
        """Our state dict, on the group rank to which it goes; elsewhere an empty dict."""
        self.ours.consolidate_state_dict(to=to)
        return self.ours.state_dict() if self.ours.rank == to else {}

    def restart(self, source: Pair) -> Pair:
        """Take over where ``source`` stands, but for our optimizer's state."""
        with torch.no_grad():
            for name in self.params:
                self.params[name].copy_(source.plain_params[name])
                self.plain_params[name].copy_(source.plain_params[name])
        self.plain.load_state_dict(copy.deepcopy(source.plain.state_dict()))
        self.steps = source.steps
        return self


def expect_same(value: Any, expected: Any) -> None:
    """Equal bit by bit and type by type, through tuples, lists and dicts."""
    assert type(value) is type(expected), (value, expected)
    if isinstance(value, Tensor):
        assert (value.dtype, value.shape, value.device) == (expected.dtype, expected.shape, expected.device)
        if value.numel() > 1:
            assert value.stride() == expected.stride()
        assert torch.equal(bits(value), bits(expected)), (value, expected)
    elif isinstance(value, dict):
        assert value.keys() == expected.keys()
        for key in value:
            expect_same(value[key], expected[key])
    elif isinstance(value, (tuple, list)):
        assert len(value) == len(expected)
        for item, other in zip(value, expected, strict=True):
            expect_same(item, other)
    elif isinstance(value, float) and math.isnan(value):
        assert math.isnan(expected)
    else:
        assert value == expected


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def expect_not_consolidated(optimizer: ZeroRedundancyOptimizer) -> None:
    with pytest.raises(
        RuntimeError, match=rf"rank {optimizer.rank} .*call consolidate_state_dict\(to={optimizer.rank}\) on all ranks"
    ):
        optimizer.state_dict()


def part(optimizer_class: type[Optimizer], **options: Any) -> Factory:
    return functools.partial(optimizer_class, **options)


OPTIMIZERS: dict[str, Factory] = {
    "SGD": part(SGD, lr=0.1),
    "SGD with momentum": part(SGD, lr=0.1, momentum=0.9),
    "Adam with amsgrad": part(Adam, lr=0.1, amsgrad=True),
    "AdamW, foreach": part(AdamW, lr=0.1, foreach=True),
    "RMSprop, centred": part(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": part(Adagrad, lr=0.1),
    "NAdam": part(NAdam, lr=0.1),
    "RAdam": part(RAdam, lr=0.1),
    "Adadelta": part(Adadelta, lr=0.1),
    "Rprop": part(Rprop, lr=0.1),
}


@distributed(2, 3)
@pytest.mark.parametrize("shard_by", ["parameter", "element"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_consolidated_dict_is_the_plain_optimizers(world_size: int, case: str, shard_by: str) -> None:
    pair = Pair(OPTIMIZERS[case], shard_by=shard_by).train()
    assert len(pair.ours.layout.cut_params) >= (5 if shard_by == "element" else 0)
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        expect_same(state_dict, pair.plain.state_dict())


@distributed(2)
@pytest.mark.parametrize("optimizer_class", [Adamax, ASGD])
def test_real_valued_classes_consolidate_too(world_size: int, optimizer_class: type[Optimizer]) -> None:
    pair = Pair(part(optimizer_class, lr=0.1), names=["matrix", "image", "small"], shard_by="element").train()
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        expect_same(state_dict, pair.plain.state_dict())


@distributed(2, 3)
def test_the_state_goes_to_the_rank_that_asks_for_it_and_to_no_other(world_size: int) -> None:
    pair = Pair(shard_by="element").train()
    for to in range(world_size):
        pair.ours.consolidate_state_dict(to)
        if pair.ours.rank == to:
            expect_same(pair.ours.state_dict(), pair.plain.state_dict())
        else:
            expect_not_consolidated(pair.ours)


@distributed(2, 3)
@pytest.mark.parametrize("to", [-1, 17, "0", 1.0, None])
def test_a_rank_that_does_not_exist_is_refused(world_size: int, to: Any) -> None:
    pair = Pair(names=["small"]).train()
    with pytest.raises(ValueError, match=rf"group rank from 0 to {world_size - 1}, got {to!r}"):
        pair.ours.consolidate_state_dict(to=to)
    pair.train()


@distributed(2, 3)
@pytest.mark.parametrize("optimizer_class", [SGD, Adam])
def test_without_state_there_is_nothing_to_consolidate(world_size: int, optimizer_class: type[Optimizer]) -> None:
    pair = Pair(part(optimizer_class, lr=0.1))
    expect_same(pair.ours.state_dict(), pair.plain.state_dict())
    for to in range(world_size):
        pair.consolidated(to)
    expect_same(pair.ours.state_dict(), pair.plain.state_dict())


@distributed(2, 3)
@pytest.mark.parametrize("names", [["small"], ["matrix", "small", "scalar"]])
def test_a_class_whose_constructor_makes_state_must_be_consolidated_at_once(world_size: int, names: list[str]) -> None:
    pair = Pair(part(Adagrad, lr=0.1), names=names)
    expect_not_consolidated(pair.ours)
    for to in range(world_size):
        pair.consolidated(to)
        if pair.ours.rank == to:
            expect_same(pair.ours.state_dict(), pair.plain.state_dict())


def step(pair: Pair) -> None:
    pair.train(1)


def load(pair: Pair) -> None:
    pair.ours.load_state_dict(pair.plain.state_dict())


def add_group(pair: Pair) -> None:
    pair.ours.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))]})


@distributed(2, 3)
@pytest.mark.parametrize("change", [step, load, add_group])
def test_a_consolidation_is_stale_after_a_change(world_size: int, change: Callable[[Pair], None]) -> None:
    pair = Pair(names=["matrix", "small"]).train()
    for to in range(world_size):
        pair.consolidated(to)
    change(pair)
    expect_not_consolidated(pair.ours)
    pair.ours.consolidate_state_dict(to=1)
    if pair.ours.rank == 1:
        assert sorted(pair.ours.state_dict()["state"]) == [0, 1]
    else:
        expect_not_consolidated(pair.ours)


@distributed(2)
def test_loading_a_dict_without_state_needs_no_consolidation(world_size: int) -> None:
    pair = Pair(names=["matrix", "small"])
    empty = copy.deepcopy(pair.plain.state_dict())
    pair.train()
    pair.ours.load_state_dict(empty)
    expect_same(pair.ours.state_dict(), empty)
    assert not pair.ours.optim.state


@distributed(2)
def test_every_dict_is_a_fresh_one_that_shares_no_memory_with_live_state(world_size: int) -> None:
    pair = Pair(shard_by="element").train()
    pair.ours.consolidate_state_dict()
    if pair.ours.rank == 0:
        first, second = pair.ours.state_dict(), pair.ours.state_dict()
        expect_same(first, second)
        kept = copy.deepcopy(second)
        first["state"][0].clear()
        del first["state"][1]
        first["param_groups"][0]["lr"] = 17
        first["param_groups"][0]["params"].clear()
        expect_same(second, kept)
        expect_same(pair.ours.state_dict(), kept)
    pair.train(1)
    if pair.ours.rank == 0:
        expect_same(second, kept)


@distributed(2, 3)
@pytest.mark.parametrize("shard_by", ["parameter", "element"])
def test_a_plain_dict_loads_and_the_callers_copy_stays_its_own(world_size: int, shard_by: str) -> None:
    source = Pair().train()
    pair = Pair(options={"lr": 0.7}, shard_by=shard_by).restart(source)
    state_dict = source.plain.state_dict()
    kept = copy.deepcopy(state_dict)
    pair.ours.load_state_dict(state_dict)
    expect_same(state_dict, kept)
    assert pair.ours.param_groups[0]["lr"] == 0.1
    pair.train()
    expect_same(state_dict, kept)
    pair.ours.param_groups[0]["lr"] = 99
    expect_same(state_dict, kept)


@distributed(2, 3)
def test_a_rank_keeps_only_what_it_owns_of_a_loaded_dict(world_size: int) -> None:
    source = Pair().train()
    pair = Pair(shard_by="element")
    pair.ours.load_state_dict(source.plain.state_dict())
    held = sum(
        value.numel() for state in pair.ours.optim.state.values() for key, value in state.items() if key == "exp_avg"
    )
    assert held == pair.ours.layout.elements_per_rank[pair.ours.rank]
    for state in pair.ours.optim.state.values():
        for value in state.values():
            assert value.untyped_storage().nbytes() <= max(1, value.numel()) * value.element_size()


@distributed(2)
def test_our_dict_loads_into_the_plain_optimizer(world_size: int) -> None:
    source = Pair(shard_by="element").train()
    pair = Pair().restart(source)
    for to in range(world_size):
        source.consolidated(to)
        if source.ours.rank == to:
            pair.plain.load_state_dict(source.ours.state_dict())
        pair.ours.load_state_dict(source.plain.state_dict())
    pair.train()


@distributed(4)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 4), (4, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("policies", [("parameter", "element"), ("element", "parameter")])
def test_a_file_moves_between_world_sizes_and_policies(
    world_size: int, saved_by: int, loaded_by: int, policies: tuple[str, str], tmp_path: Path
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (saved_by, loaded_by)}
    rank, path = dist.get_rank(), tmp_path / "optimizer.pt"
    if rank < saved_by:
        source = Pair(group=groups[saved_by], shard_by=policies[0]).train()
        state_dict = source.consolidated()
        if rank == 0:
            torch.save([state_dict, dict(source.params)], path)
    dist.barrier()
    if rank < loaded_by:
        state_dict, params = torch.load(path, weights_only=True)
        pair = Pair(group=groups[loaded_by], shard_by=policies[1])
        with torch.no_grad():
            for name, value in params.items():
                pair.params[name].copy_(value)
                pair.plain_params[name].copy_(value)
        pair.ours.load_state_dict(state_dict)
        pair.plain.load_state_dict(state_dict)
        pair.train()
        state_dict = pair.consolidated()
        if rank == 0:
            expect_same(state_dict, pair.plain.state_dict())
    dist.barrier()


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
    "an object": (Anything(), r"test_state_dict\.Anything"),
    "bytes": (b"abc", r"builtins\.bytes"),
    "a complex number": (1j, r"builtins\.complex"),
    "a function": (copy.copy, r"function"),
    "a torch dtype": (torch.float32, r"torch\.dtype"),
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


class NotesItsRankInATensor(Noter):
    note = staticmethod(lambda _: torch.tensor(float(dist.get_rank())))


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
@pytest.mark.parametrize("optimizer_class", [NotesItsRank, NotesItsRankInATensor, NotesItsKind, NotesATable])
def test_owners_of_a_cut_parameter_must_agree_on_what_is_not_per_element(
    world_size: int, optimizer_class: type[Noter]
) -> None:
    pair = Pair(part(optimizer_class, lr=0.1), names=["small", "matrix"], shard_by="element", elementwise=True).train(1)
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
def test_what_owners_agree_on_is_kept_once_even_if_it_is_not_a_number(world_size: int) -> None:
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


@distributed(2)
@pytest.mark.parametrize("shard_by", ["parameter", "element"])
def test_state_of_another_shape_is_refused_by_name_and_nothing_changes(world_size: int, shard_by: str) -> None:
    pair = Pair(names=["matrix", "small"], shard_by=shard_by).train()
    state_dict = copy.deepcopy(pair.plain.state_dict())
    state_dict["param_groups"][0]["lr"] = 55.0
    state_dict["state"][0]["exp_avg_sq"] = torch.zeros(40, 60)
    with pytest.raises(ValueError, match=r"'exp_avg_sq' of parameter 'matrix' has shape \(40, 60\).*\(60, 40\)"):
        pair.ours.load_state_dict(state_dict)
    assert pair.ours.param_groups[0]["lr"] == 0.1
    pair.train()
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        expect_same(state_dict, pair.plain.state_dict())


def drop_group(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"].clear()


def add_parameter(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].append(9)


@distributed(2)
@pytest.mark.parametrize("change", [drop_group, add_parameter])
def test_another_number_of_groups_or_parameters_is_refused(
    world_size: int, change: Callable[[dict[str, Any]], None]
) -> None:
    pair = Pair(names=["matrix", "small"]).train()
    state_dict = copy.deepcopy(pair.plain.state_dict())
    change(state_dict)
    with pytest.raises(ValueError, match="parameter group"):
        pair.ours.load_state_dict(state_dict)
    with pytest.raises(ValueError, match="parameter group"):
        pair.plain.load_state_dict(state_dict)
    pair.train()


@distributed(2)
@pytest.mark.parametrize("option", ["fused", "capturable"])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.int64, float])
def test_step_counters_land_where_fused_and_capturable_want_them(world_size: int, option: str, kind: Any) -> None:
    source = Pair(part(AdamW, lr=0.1), names=["matrix", "small"]).train()
    pair = Pair(part(AdamW, lr=0.1), names=["matrix", "small"], options={option: True}, shard_by="element")
    state_dict = copy.deepcopy(source.plain.state_dict())
    for state in state_dict["state"].values():
        state["step"] = kind(2) if kind is float else state["step"].to(kind)
    state_dict["param_groups"][0][option] = True
    pair.restart(source)
    pair.plain.load_state_dict(copy.deepcopy(state_dict))
    pair.ours.load_state_dict(state_dict)
    for state in pair.ours.optim.state.values():
        expect_same(state["step"], torch.tensor(2.0))
    if option == "fused":
        pair.train()


@distributed(2)
def test_hooks_of_both_methods_see_and_may_replace_the_whole_dict(world_size: int) -> None:
    pair = Pair(names=["matrix", "small"]).train()
    seen: list[str] = []

    def before_save(optimizer: Optimizer) -> None:
        assert optimizer is pair.ours
        seen.append("before save")

    def after_save(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert optimizer is pair.ours
        seen.append(f"after save, {len(state_dict['state'])} parameters")
        return {**state_dict, "epoch": 3}

    def before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert optimizer is pair.ours
        seen.append(f"before load, {len(state_dict['state'])} parameters")
        groups = [{**group, "lr": 0.2} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def after_load(optimizer: Optimizer) -> None:
        assert optimizer is pair.ours
        seen.append(f"after load, lr {optimizer.param_groups[0]['lr']}")

    pair.ours.register_state_dict_pre_hook(before_save)
    pair.ours.register_state_dict_post_hook(after_save)
    pair.ours.register_load_state_dict_pre_hook(before_load)
    pair.ours.register_load_state_dict_post_hook(after_load)
    expected = {**pair.plain.state_dict(), "epoch": 3}
    for to in range(world_size):
        state_dict = pair.consolidated(to) or expected
    expect_same(state_dict, expected)
    pair.ours.load_state_dict(state_dict)
    assert seen == [
        "before save",
        "after save, 2 parameters",
        "before load, 2 parameters",
        "after load, lr 0.2",
    ]
    pair.plain.param_groups[0]["lr"] = 0.2
    pair.train()


@distributed(2)
@pytest.mark.parametrize("names", ["kept", "absent", "other"])
def test_names_are_kept_and_loaded_as_the_plain_optimizer_does(world_size: int, names: str) -> None:
    pair = Pair(names=["matrix", "small"]).train()
    state_dict = copy.deepcopy(pair.plain.state_dict())
    assert state_dict["param_groups"][0]["param_names"] == ["matrix", "small"]
    if names == "absent":
        del state_dict["param_groups"][0]["param_names"]
    elif names == "other":
        state_dict["param_groups"][0]["param_names"] = ["left", "right"]
    pair.ours.load_state_dict(state_dict)
    pair.plain.load_state_dict(state_dict)
    pair.train()
    loaded = pair.consolidated()
    if pair.ours.rank == 0:
        assert loaded["param_groups"] == pair.plain.state_dict()["param_groups"]


@distributed(2)
def test_options_that_a_scheduler_added_travel_with_the_dict(world_size: int) -> None:
    pair = Pair(names=["matrix", "small"])
    for optimizer in (pair.ours, pair.plain):
        torch.optim.lr_scheduler.LinearLR(optimizer)
    pair.train()
    state_dict = pair.consolidated()
    if pair.ours.rank == 0:
        expect_same(state_dict, pair.plain.state_dict())
        assert "initial_lr" in state_dict["param_groups"][0]


@distributed(2)
def test_several_groups_keep_their_numbering_where_some_parameters_have_no_state(world_size: int) -> None:
    ours_params, plain_params = make_params(), make_params()
    order = [["small", "wave"], [], ["matrix", "nothing"], ["double"]]
    ours = ZeroRedundancyOptimizer(
        [{"params": [ours_params[name] for name in names], "lr": 0.1 + k} for k, names in enumerate(order)], Adam
    )
    plain = Adam([{"params": [plain_params[name] for name in names], "lr": 0.1 + k} for k, names in enumerate(order)])
    for name in ("wave", "matrix"):
        ours_params[name].grad = torch.ones_like(ours_params[name])
        plain_params[name].grad = torch.ones_like(plain_params[name])
    ours.step()
    plain.step()
    ours.consolidate_state_dict(to=1)
    if ours.rank == 1:
        expect_same(ours.state_dict(), plain.state_dict())
        assert list(ours.state_dict()["state"]) == [1, 2]


def torch_zero() -> type[Any]:
    """torch's own class, whose module warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero


@distributed(2, 3)
def test_dicts_go_to_torchs_own_class_and_come_from_it(world_size: int) -> None:
    names = ["matrix", "image", "small", "scalar"]
    source = Pair(names=names, shard_by="element").train()
    theirs_params = make_params(names)
    with torch.no_grad():
        for name, param in theirs_params.items():
            param.copy_(source.params[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch_zero()(list(theirs_params.values()), Adam, lr=0.1)
        for to in range(world_size):
            source.consolidated(to)
            if source.ours.rank == to:
                ours_dict = source.ours.state_dict()
        theirs.load_state_dict(ours_dict)
        source.train()
        for k in (3, 4):  # the steps that the pair has just made
            for position, param in enumerate(theirs_params.values()):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * k + position))
            theirs.step()
        for name, param in theirs_params.items():
            expect_same(param.detach(), source.params[name].detach())
        for to in range(world_size):
            theirs.consolidate_state_dict(to=to)
            if source.ours.rank == to:
                theirs_dict = theirs.state_dict()
    pair = Pair(names=names).restart(source)
    pair.ours.load_state_dict(theirs_dict)
    pair.train()
