"""What goes wrong is an error on every rank, soon, that names the offender; and afterwards all is as it was."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from harness import distributed
from onecopy import PeerFailedError, RanksDisagreeError, Shard, ZeroRedundancyOptimizer

Arguments = dict[str, Any]

SECONDS = 5.0
"""No error may take longer."""


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter whose values are all different."""
    numel = int(torch.tensor(shape).prod())
    return nn.Parameter(torch.linspace(-1, 1, numel).reshape(shape).to(dtype))


def named(*members: Any) -> list[tuple[str, Any]]:
    """Name members ``one``, ``two`` ..."""
    return list(zip(("one", "two", "three"), members, strict=False))


def good() -> Arguments:
    """Arguments with which construction works."""
    return {"params": named(parameter(4, 3), parameter(3)), "optimizer_class": SGD, "lr": 0.1}


def given(*members: Any) -> Callable[[], Arguments]:
    """Arguments whose ``params`` are named tensors; ``members`` are functions that make them."""
    return lambda: {**good(), "params": named(*(make() for make in members))}


def params(value: Callable[[], Any]) -> Callable[[], Arguments]:
    """Arguments whose ``params`` are what ``value`` makes."""
    return lambda: {**good(), "params": value()}


def options(**values: Any) -> Callable[[], Arguments]:
    """Good arguments with some replaced."""
    return lambda: {**good(), **values}


def twice() -> Arguments:
    one = parameter(3)
    groups = [{"params": named(parameter(2), one)}, {"params": [("three", one)]}]
    return {**good(), "params": groups}


def overlapping() -> Arguments:
    memory = torch.zeros(10)
    return {**good(), "params": named(nn.Parameter(memory[:6]), nn.Parameter(memory[5:]))}


def dtensor() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))


def fsdp1(use_orig_params: bool) -> Callable[[], Arguments]:
    def make() -> Arguments:
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        return {**good(), "params": named(*model.parameters())}

    return make


def fsdp2() -> Arguments:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {**good(), "params": named(*model.parameters())}


def broken_generator() -> Any:
    yield parameter(2)
    raise LookupError("no more parameters here")


class UnknownToUs(SGD):
    """A subclass: its update might do anything."""


@dataclass(frozen=True)
class Bad:
    """Arguments that one rank or all give, and the error that they must raise."""

    make: Callable[[], Arguments]
    error: type[Exception]
    text: str


BAD = {
    "a bare tensor": Bad(params(lambda: parameter(3)), TypeError, r"params must be .* got torch\S+;"),
    "a number": Bad(params(lambda: 3), TypeError, "params must be .* got int"),
    "None": Bad(params(lambda: None), TypeError, "params must be .* got NoneType"),
    "a string": Bad(params(lambda: "abc"), TypeError, "params must be .* got str"),
    "a single dict": Bad(params(lambda: {"params": parameter(3)}), TypeError, "params must be .* got dict"),
    "a set": Bad(params(lambda: {parameter(3)}), TypeError, "params must be ordered, got a set"),
    "tensors mixed with dicts": Bad(
        params(lambda: [{"params": parameter(3)}, parameter(2)]), TypeError, "mixes dicts and tensors: entry 1 is"
    ),
    "not a tensor": Bad(given(lambda: parameter(3), lambda: [1.0]), TypeError, "'two' is not a tensor but list"),
    "an unnamed number": Bad(
        params(lambda: [parameter(3), 1.0]), TypeError, "parameter 1 of group 0 is not a tensor but float"
    ),
    "an instance as class": Bad(
        options(optimizer_class=SGD([torch.zeros(1)], lr=0.1)), TypeError, "optimizer_class must be .* got SGD"
    ),
    "another class": Bad(options(optimizer_class=nn.Linear), TypeError, "optimizer_class must be .* got .*Linear"),
    "a function as class": Bad(options(optimizer_class=copy.copy), TypeError, "optimizer_class must be .*copy"),
    "the base class": Bad(options(optimizer_class=Optimizer), TypeError, "optimizer_class must be .*Optimizer"),
    "our own class": Bad(
        options(optimizer_class=ZeroRedundancyOptimizer), TypeError, "optimizer_class must be .*ZeroRedundancy"
    ),
    "nothing": Bad(params(list), ValueError, "params is empty"),
    "only empty groups": Bad(params(lambda: [{"params": []}]), ValueError, "no parameter"),
    "a group without params": Bad(
        params(lambda: [{"params": parameter(3)}, {"lr": 1.0}]), ValueError, r"group 1 has no 'params'.*\['lr'\]"
    ),
    "the same object in two groups": Bad(twice, ValueError, "'three' is in two groups.*'two'"),
    "two over one storage": Bad(overlapping, ValueError, "'one' and 'two' share memory"),
    "an expanded one": Bad(
        given(lambda: parameter(3), lambda: nn.Parameter(torch.ones(1).expand(3))),
        ValueError,
        "'two' does not fill.*expanded",
    ),
    "a slice": Bad(
        given(lambda: nn.Parameter(torch.ones(4, 4)[:, :2])),
        ValueError,
        r"'one' does not fill its memory .*slice; use .clone\(\)",
    ),
    "a sparse one": Bad(
        given(lambda: parameter(3), lambda: nn.Parameter(torch.eye(3).to_sparse())), ValueError, "'two'.*sparse"
    ),
    "one on the meta device": Bad(
        given(lambda: parameter(3), lambda: nn.Parameter(torch.empty(3, device="meta"))),
        ValueError,
        "'two' is on the meta device and has no memory; materialise the model first",
    ),
    "a lazy one": Bad(given(lambda: parameter(3), nn.UninitializedParameter), ValueError, "'two'.*not materialised"),
    "one that is computed": Bad(given(lambda: parameter(3) * 2), ValueError, "'one' is not a leaf"),
    "a DTensor": Bad(given(lambda: parameter(3), dtensor), ValueError, "'two' is a DTensor"),
    "FSDP1, flat": Bad(fsdp1(use_orig_params=False), ValueError, "'one' is managed by FSDP"),
    "FSDP1, original": Bad(fsdp1(use_orig_params=True), ValueError, "'one' is managed by FSDP"),
    "FSDP2": Bad(fsdp2, ValueError, "'one' is a DTensor.*FSDP2"),
    "names for some": Bad(
        params(lambda: [("one", parameter(3)), parameter(2)]), ValueError, "group 0 mixes named and unnamed"
    ),
    "a generator that breaks": Bad(params(broken_generator), LookupError, "no more parameters here"),
    "an option the class refuses": Bad(options(lr=-1.0), ValueError, "-1.0"),
    "an option the class does not know": Bad(options(speed=2), TypeError, "speed"),
    "differentiable": Bad(options(differentiable=True), ValueError, "differentiable=True"),
    "differentiable in one group": Bad(
        params(lambda: [{"params": parameter(2)}, {"params": parameter(3), "differentiable": True}]),
        ValueError,
        r"differentiable=True \(parameter group 1\)",
    ),
    "LBFGS": Bad(options(optimizer_class=torch.optim.LBFGS), ValueError, "LBFGS cannot be sharded exactly"),
    "Prodigy": Bad(options(optimizer_class=pytorch_optimizer.Prodigy), ValueError, "Prodigy cannot be sharded exactly"),
    "Lamb with global clipping": Bad(
        options(optimizer_class=pytorch_optimizer.Lamb, max_grad_norm=1.0), ValueError, "Lamb with max_grad_norm"
    ),
    "Lamb, whose default clips": Bad(
        options(optimizer_class=pytorch_optimizer.Lamb), ValueError, "Lamb with max_grad_norm"
    ),
    # It reads the default, whatever its groups say.
    "Lamb, switched off in a group only": Bad(
        lambda: {
            "params": [{"params": parameter(3), "max_grad_norm": 0.0}],
            "optimizer_class": pytorch_optimizer.Lamb,
            "lr": 0.1,
        },
        ValueError,
        "Lamb with max_grad_norm",
    ),
    "cutting for an unknown class": Bad(
        options(optimizer_class=UnknownToUs, shard_by="element"), ValueError, "not known to work element by element"
    ),
    "cutting for a class declared otherwise": Bad(
        options(shard_by="element", elementwise=False), ValueError, "not known to work element by element"
    ),
    "an unknown policy": Bad(options(shard_by="row"), ValueError, "shard_by must be .*'row'"),
    "an owner that does not exist": Bad(
        options(shard_by=lambda specs, world_size: [world_size] * len(specs)), ValueError, "'one' is given to rank"
    ),
    "too few owners": Bad(options(shard_by=lambda *_: [0]), ValueError, "1 owners for 2 parameters"),
    "an owner that is no rank": Bad(options(shard_by=lambda *_: ["a", "b"]), ValueError, "'one'.*got 'a'"),
    "a function that cuts an unknown class": Bad(
        lambda: {
            "params": named(parameter(128)),
            "optimizer_class": UnknownToUs,
            "shard_by": lambda *_: [[Shard(0, 0, 64, 0), Shard(0, 64, 128, 1)]],
        },
        ValueError,
        "cuts parameter 'one'.*not known",
    ),
    "a function that leaves a gap": Bad(
        options(shard_by=lambda *_: [[Shard(0, 0, 6, 0)], 0]), ValueError, "'one' has 12 elements"
    ),
}


def failure_of(call: Callable[[], object]) -> Exception:
    """What a call raises on this rank, and not late; the ranks meet once more before anything is judged."""
    dist.barrier()  # so that nobody waits for a rank that is still importing
    start, caught = time.monotonic(), None
    try:
        call()
    except Exception as error:
        caught = error
    seconds = time.monotonic() - start
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    assert int(total) == sum(range(dist.get_world_size()))
    assert caught is not None, "nothing was raised"
    assert seconds < SECONDS
    return caught


def expect(error: Exception, kind: type[Exception], text: str) -> None:
    """Exactly this class, with this in its message."""
    assert type(error) is kind, repr(error)
    assert re.search(text, str(error), re.DOTALL), str(error)


def expect_failure_of(culprits: Sequence[int], call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """The culprits raise their own error; all others say that the first of them failed, and how."""
    error = failure_of(call)
    if dist.get_rank() in culprits:
        expect(error, kind, text)
    else:
        which = ("rank " if len(culprits) == 1 else "ranks ") + ", ".join(map(str, culprits))
        expect(error, PeerFailedError, rf"rank {dist.get_rank()}: .*failed on {which}: {kind.__name__}: .*{text}")


def expect_disagreement(odd: int, call: Callable[[], object], text: str, odd_text: str) -> None:
    """All ranks raise the same, which names the ranks and what each side has."""
    error = failure_of(call)
    others = [rank for rank in range(dist.get_world_size()) if rank != odd]
    which = ("rank " if len(others) == 1 else "ranks ") + ", ".join(map(str, others))
    expect(error, RanksDisagreeError, rf"First difference: .*\b{which}: {text}")
    expect(error, RanksDisagreeError, rf"First difference: .*\brank {odd}: {odd_text}")


def check_pool() -> None:
    """The ranks still work together: a good optimizer and a step."""
    arguments = good()
    optimizer = ZeroRedundancyOptimizer(**arguments)
    one = arguments["params"][0][1]
    expected = one.detach() - 0.1 * torch.ones(4, 3)
    one.grad = torch.ones(4, 3)
    optimizer.step()
    assert torch.equal(one, expected)


@distributed(2, 3)
@pytest.mark.parametrize("who", ["all", "first", "last"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_an_error_on_every_rank(world_size: int, case: str, who: str) -> None:
    bad = BAD[case]
    culprits = {"all": range(world_size), "first": [0], "last": [world_size - 1]}[who]
    arguments = bad.make()  # on every rank: FSDP and DTensor communicate
    if dist.get_rank() not in culprits:
        arguments = good()
    before = torch.get_rng_state()
    expect_failure_of(culprits, lambda: ZeroRedundancyOptimizer(**arguments), bad.error, bad.text)
    assert torch.equal(torch.get_rng_state(), before)
    check_pool()


@distributed(2, 3)
def test_different_mistakes_are_each_raised_where_they_were_made(world_size: int) -> None:
    rank = dist.get_rank()
    bad = [BAD["nothing"], BAD["a number"], None][rank]
    error = failure_of(lambda: ZeroRedundancyOptimizer(**(bad.make() if bad else good())))
    if bad is not None:
        expect(error, bad.error, bad.text)
    else:
        expect(error, PeerFailedError, "failed on ranks 0, 1: ValueError: .*params is empty")
    check_pool()


@distributed(2, 3)
def test_a_rank_outside_the_group_is_told_so_and_the_members_go_on(world_size: int) -> None:
    outsider = world_size - 1
    group = dist.new_group(list(range(outsider)))
    if dist.get_rank() == outsider:
        with pytest.raises(ValueError, match=f"global rank {outsider} is not a member of the process group"):
            ZeroRedundancyOptimizer(**good(), process_group=group)
    else:
        assert ZeroRedundancyOptimizer(**good(), process_group=group).world_size == outsider
    check_pool()


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"no process group is initialised.*init_process_group\(\)"):
        ZeroRedundancyOptimizer(**good())


@distributed(2)
def test_lamb_without_global_clipping_is_allowed(world_size: int) -> None:
    arguments = {**good(), "optimizer_class": pytorch_optimizer.Lamb, "max_grad_norm": 0.0}
    optimizer = ZeroRedundancyOptimizer(**arguments)
    assert type(optimizer.optim) is pytorch_optimizer.Lamb


@dataclass(frozen=True)
class Mismatch:
    """Two sets of arguments, of which one rank gives the second, and what the error says of each."""

    make: Callable[[], Arguments]
    make_odd: Callable[[], Arguments]
    text: str
    odd_text: str


def transposed(*shape: int) -> nn.Parameter:
    return nn.Parameter(parameter(*reversed(shape)).detach().t())


def owner(group_rank: int) -> Callable[[Any, int], list[int]]:
    return lambda *_: [0, group_rank]


MISMATCHES = {
    "count": Mismatch(
        good, given(lambda: parameter(4, 3), lambda: parameter(3), lambda: parameter(2)), "", r"parameter 2 \('three'\)"
    ),
    "shape": Mismatch(
        good,
        given(lambda: parameter(4, 3), lambda: parameter(5)),
        r"parameter 1 \('two'\): shape \(3,\)",
        r"parameter 1 \('two'\): shape \(5,\)",
    ),
    "shape of equal size": Mismatch(
        good,
        given(lambda: parameter(3, 4), lambda: parameter(3)),
        r"parameter 0 \('one'\): shape \(4, 3\)",
        r"parameter 0 \('one'\): shape \(3, 4\)",
    ),
    "dtype": Mismatch(
        good,
        given(lambda: parameter(4, 3), lambda: parameter(3, dtype=torch.float64)),
        r"parameter 1 \('two'\): .*float32",
        r"parameter 1 \('two'\): .*float64",
    ),
    "order": Mismatch(
        lambda: {**good(), "params": [("one", parameter(3)), ("two", parameter(3)), ("three", parameter(3))]},
        lambda: {**good(), "params": [("one", parameter(3)), ("three", parameter(3)), ("two", parameter(3))]},
        r"parameter 1 \('two'\)",
        r"parameter 1 \('three'\)",
    ),
    "strides": Mismatch(
        good,
        given(lambda: transposed(4, 3), lambda: parameter(3)),
        r"parameter 0 \('one'\): .*strides \(3, 1\)",
        r"parameter 0 \('one'\): .*strides \(1, 4\)",
    ),
    "names": Mismatch(
        good,
        lambda: {**good(), "params": [("one", parameter(4, 3)), ("zwei", parameter(3))]},
        r"parameter 1 \('two'\)",
        r"parameter 1 \('zwei'\)",
    ),
    "named on one rank only": Mismatch(
        good,
        params(lambda: [parameter(4, 3), parameter(3)]),
        r"parameter 0 \('one'\)",
        r"parameter 0 \('group0\[0\]'\)",
    ),
    "a group's option": Mismatch(
        params(lambda: [{"params": parameter(2)}, {"params": parameter(3), "lr": 0.5}]),
        params(lambda: [{"params": parameter(2)}, {"params": parameter(3), "lr": 0.25}]),
        "parameter group 1: lr=0.5",
        "parameter group 1: lr=0.25",
    ),
    "a default": Mismatch(
        good, options(momentum=0.9), "parameter group 0: momentum=0", "parameter group 0: momentum=0.9"
    ),
    "a tensor option": Mismatch(
        lambda: {**good(), "optimizer_class": Adam, "lr": torch.tensor(0.5)},
        lambda: {**good(), "optimizer_class": Adam, "lr": torch.tensor(0.25)},
        r"parameter group 0: lr=tensor\(0.5",
        r"parameter group 0: lr=tensor\(0.25",
    ),
    "division into groups": Mismatch(
        params(lambda: [{"params": named(parameter(2), parameter(3))}]),
        params(lambda: [{"params": [("one", parameter(2))]}, {"params": [("two", parameter(3))]}]),
        r"parameter 1 \('two'\): .*group 0",
        r"parameter 1 \('two'\): .*group 1",
    ),
    "number of groups": Mismatch(
        params(lambda: [{"params": parameter(2)}]),
        params(lambda: [{"params": parameter(2)}, {"params": []}]),
        "",
        "parameter group 1",
    ),
    "class": Mismatch(
        options(optimizer_class=Adam),
        options(optimizer_class=AdamW),
        r"optimizer class: torch\.optim\.adam\.Adam",
        r"optimizer class: torch\.optim\.adamw\.AdamW",
    ),
    "bucket view": Mismatch(
        good,
        options(parameters_as_bucket_view=True),
        "parameters_as_bucket_view: False",
        "parameters_as_bucket_view: True",
    ),
    "policy": Mismatch(
        lambda: {**good(), "params": named(parameter(64, 32), parameter(64, 32), parameter(64, 32))},
        lambda: {
            **good(),
            "params": named(parameter(64, 32), parameter(64, 32), parameter(64, 32)),
            "shard_by": "element",
        },
        "(shard_by|.*'one')",
        "(shard_by|.*'one')",
    ),
    "owners from a function": Mismatch(
        options(shard_by=owner(0)), options(shard_by=owner(1)), ".*'two'.*rank 0", ".*'two'.*rank 1"
    ),
}


@distributed(2, 3)
@pytest.mark.parametrize("case", MISMATCHES)
def test_arguments_that_differ_are_an_error_that_names_the_first_difference(world_size: int, case: str) -> None:
    mismatch = MISMATCHES[case]
    odd = world_size - 1
    arguments = mismatch.make_odd() if dist.get_rank() == odd else mismatch.make()
    expect_disagreement(odd, lambda: ZeroRedundancyOptimizer(**arguments), mismatch.text, mismatch.odd_text)
    check_pool()


class Training:
    """A plain optimizer and ours over equal parameters, with equal gradients."""

    def __init__(self, bucket_view: bool = False, optimizer_class: type[Optimizer] = Adam) -> None:
        self.params = [parameter(64, 40), parameter(7), parameter(3, 5)]
        self.plain_params = [nn.Parameter(param.detach().clone()) for param in self.params]
        self.ours = ZeroRedundancyOptimizer(
            named(*self.params), optimizer_class, parameters_as_bucket_view=bucket_view, lr=0.1
        )
        self.plain = optimizer_class(named(*self.plain_params), lr=0.1)  # type: ignore[call-arg]
        self.steps = 0
        self.train()

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.steps += 1
            generator = torch.Generator().manual_seed(self.steps)
            for param, plain in zip(self.params, self.plain_params, strict=True):
                param.grad = torch.randn(param.shape, generator=generator)
                plain.grad = param.grad.clone()
            self.ours.step()
            self.plain.step()
        self.check()

    def check(self) -> None:
        for param, plain in zip(self.params, self.plain_params, strict=True):
            assert torch.equal(param, plain)

    def snapshot(self) -> list[Any]:
        """Everything of this rank that a refused call must leave alone, with where the memory is."""
        state = [
            (name, value.clone() if isinstance(value, Tensor) else value)
            for param in self.params
            for name, value in self.ours.state[param].items()
        ]
        places = [param.data_ptr() for param in self.params]
        groups = [
            [copy.deepcopy({key: value for key, value in group.items() if key != "params"}), len(group["params"])]
            for group in (*self.ours.param_groups, *self.ours.optim.param_groups)
        ]
        values = [param.detach().clone() for param in self.params]
        return [state, places, groups, values, self.ours.layout, len(self.ours.optim.state)]


def expect_same(value: Any, expected: Any) -> None:
    """Bitwise the same, through lists, tuples and dicts."""
    assert type(value) is type(expected)
    if isinstance(value, Tensor):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
    elif isinstance(value, dict):
        assert value.keys() == expected.keys()
        for key in value:
            expect_same(value[key], expected[key])
    elif isinstance(value, (list, tuple)):
        assert len(value) == len(expected)
        for item, expected_item in zip(value, expected, strict=True):
            expect_same(item, expected_item)
    else:
        assert value == expected


BAD_GROUPS: dict[str, tuple[Callable[[Training], Any], type[Exception], str]] = {
    "not a dict": (lambda _: [parameter(2)], TypeError, "parameter group 1 must be a dict, got list"),
    "no params": (lambda _: {"lr": 1.0}, ValueError, "parameter group 1 has no 'params'"),
    "not a tensor": (
        lambda _: {"params": [("four", 3)]},
        TypeError,
        "'four' is not a tensor but int",
    ),
    "known already": (
        lambda training: {"params": [("four", training.params[1])]},
        ValueError,
        "'four' is in two groups.*'two'",
    ),
    "shares memory": (
        lambda training: {"params": [("four", nn.Parameter(training.params[1].detach()[:3]))]},
        ValueError,
        "'(two|four)' and '(two|four)' share memory",
    ),
    "expanded": (
        lambda _: {"params": [("four", nn.Parameter(torch.ones(1).expand(3)))]},
        ValueError,
        "'four'.*expanded",
    ),
    "differentiable": (
        lambda _: {"params": [("four", parameter(2))], "differentiable": True},
        ValueError,
        r"differentiable=True \(parameter group 1\)",
    ),
    "without a name": (lambda _: {"params": [parameter(2)]}, ValueError, "name"),
}


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("who", ["all", "last"])
@pytest.mark.parametrize("case", BAD_GROUPS)
def test_a_refused_group_changes_nothing(world_size: int, case: str, who: str, bucket_view: bool) -> None:
    make, kind, text = BAD_GROUPS[case]
    training = Training(bucket_view)
    before = training.snapshot()
    culprits = range(world_size) if who == "all" else [world_size - 1]
    group = make(training) if dist.get_rank() in culprits else {"params": [("four", parameter(2))]}
    expect_failure_of(culprits, lambda: training.ours.add_param_group(group), kind, text)
    expect_same(training.snapshot(), before)
    training.train()


GROUP_MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "count": ({"count": 1}, {"count": 2}, "", r"parameter 4 \('five'\)"),
    "shape": ({"shape": (2,)}, {"shape": (3,)}, r"parameter 3 \('four'\): shape \(2,\)", r"parameter 3 .*shape \(3,\)"),
    "dtype": (
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        r"parameter 3 \('four'\): .*float32",
        r"parameter 3 \('four'\): .*bfloat16",
    ),
    "name": ({"name": "four"}, {"name": "vier"}, r"parameter 3 \('four'\)", r"parameter 3 \('vier'\)"),
    "option": ({"lr": 0.5}, {"lr": 0.25}, "parameter group 1: lr=0.5", "parameter group 1: lr=0.25"),
}


def new_group(
    count: int = 1,
    shape: tuple[int, ...] = (2,),
    dtype: torch.dtype = torch.float32,
    name: str = "four",
    **values: Any,
) -> dict[str, Any]:
    members = [(label, parameter(*shape, dtype=dtype)) for label in (name, "five")[:count]]
    return {"params": members, **values}


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("case", GROUP_MISMATCHES)
def test_groups_that_differ_are_refused_and_change_nothing(world_size: int, case: str, bucket_view: bool) -> None:
    values, odd_values, text, odd_text = GROUP_MISMATCHES[case]
    training = Training(bucket_view)
    before = training.snapshot()
    odd = world_size - 1
    group = new_group(**(odd_values if dist.get_rank() == odd else values))
    expect_disagreement(odd, lambda: training.ours.add_param_group(group), text, odd_text)
    expect_same(training.snapshot(), before)
    training.train()
    assert all(isinstance(member, tuple) for member in group["params"])  # the caller's dict is as it was


@distributed(2)
def test_a_refused_group_leaves_a_consolidation_valid(world_size: int) -> None:
    training = Training()
    training.ours.consolidate_state_dict(to=0)
    with pytest.raises(TypeError):
        training.ours.add_param_group(3)  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        expect_same(training.ours.state_dict(), training.plain.state_dict())


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_a_group_is_accepted_after_a_refused_one(world_size: int, bucket_view: bool) -> None:
    training = Training(bucket_view)
    with pytest.raises(RanksDisagreeError):
        training.ours.add_param_group(new_group(lr=0.1 * dist.get_rank()))
    added, plain_added = parameter(80, 20), parameter(80, 20)
    training.ours.add_param_group({"params": [("four", added)], "lr": 0.3})
    training.plain.add_param_group({"params": [("four", plain_added)], "lr": 0.3})
    training.params.append(added)
    training.plain_params.append(plain_added)
    training.train()


def spoil(training: Training, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The plain optimizer's state dict after a change to it."""
    state_dict = copy.deepcopy(training.plain.state_dict())
    changed = change(state_dict)
    return state_dict if changed is None else changed


def without_a_group(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"].pop()


def without_a_parameter(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


def with_state_of_nobody(state_dict: dict[str, Any]) -> None:
    state_dict["state"][17] = {"step": torch.tensor(1.0)}


def with_a_wrong_shape(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["exp_avg"] = torch.zeros(9)


BAD_LOADS: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "not a dict": (lambda _: [1], TypeError, "takes an optimizer's state dict"),
    "no groups": (lambda _: {"state": {}}, TypeError, "takes an optimizer's state dict.*'param_groups'"),
    "a group less": (without_a_group, ValueError, "0 parameter groups, the optimizer has 1"),
    "a parameter less": (without_a_parameter, ValueError, "group 0 has 2 parameters in the state dict and 3"),
    "state of nobody": (with_state_of_nobody, ValueError, r"state for \[17\]"),
    "a wrong shape": (with_a_wrong_shape, ValueError, r"'exp_avg' of parameter 'two' has shape \(9,\).*\(7,\)"),
}


@distributed(2, 3)
@pytest.mark.parametrize("who", ["all", "last"])
@pytest.mark.parametrize("case", BAD_LOADS)
def test_a_refused_load_changes_nothing(world_size: int, case: str, who: str) -> None:
    change, kind, text = BAD_LOADS[case]
    training = Training()
    before = training.snapshot()
    culprits = range(world_size) if who == "all" else [world_size - 1]
    good_dict = copy.deepcopy(training.plain.state_dict())
    good_dict["param_groups"][0]["lr"] = 7.0
    state_dict = spoil(training, change) if dist.get_rank() in culprits else good_dict
    expect_failure_of(culprits, lambda: training.ours.load_state_dict(state_dict), kind, text)
    expect_same(training.snapshot(), before)
    training.train()


def with_another_rate(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.25


def with_another_count(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["step"] += 40


def without_a_state(state_dict: dict[str, Any]) -> None:
    del state_dict["state"][1]


def with_another_dtype(state_dict: dict[str, Any]) -> None:
    state_dict["state"][1]["exp_avg"] = state_dict["state"][1]["exp_avg"].double()


LOAD_MISMATCHES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "an option": (with_another_rate, "parameter group 0: lr=0.1", "parameter group 0: lr=0.25"),
    "a counter": (
        with_another_count,
        "state of parameter 'two': step=.* 2.0",
        "state of parameter 'two': step=.* 42.0",
    ),
    "a parameter's state": (without_a_state, "state of parameter 'two'", "state of parameter 'three'"),
    "a dtype": (
        with_another_dtype,
        "state of parameter 'two': exp_avg=.*float32",
        "state of parameter 'two': .*float64",
    ),
}


@distributed(2, 3)
@pytest.mark.parametrize("case", LOAD_MISMATCHES)
def test_state_dicts_that_differ_are_refused_and_change_nothing(world_size: int, case: str) -> None:
    change, text, odd_text = LOAD_MISMATCHES[case]
    training = Training()
    before = training.snapshot()
    odd = world_size - 1
    state_dict = spoil(training, change if dist.get_rank() == odd else lambda _: None)
    expect_disagreement(odd, lambda: training.ours.load_state_dict(state_dict), text, odd_text)
    expect_same(training.snapshot(), before)
    training.train()


class Picky(SGD):
    """Refuses a learning rate of 13 when it is loaded, on the last rank only, after torch has taken it over."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if any(group["lr"] == 13 for group in self.param_groups) and dist.get_rank() == dist.get_world_size() - 1:
            raise OverflowError("lr 13 is bad luck")


@distributed(2, 3)
def test_a_class_that_refuses_a_load_on_one_rank_leaves_all_ranks_as_they_were(world_size: int) -> None:
    training = Training(optimizer_class=Picky)
    before = training.snapshot()
    state_dict = copy.deepcopy(training.plain.state_dict())
    state_dict["param_groups"][0]["lr"] = 13
    expect_failure_of(
        [world_size - 1], lambda: training.ours.load_state_dict(state_dict), OverflowError, "lr 13 is bad luck"
    )
    expect_same(training.snapshot(), before)
    training.train()


@distributed(2, 3)
def test_a_load_hook_that_fails_on_one_rank_stops_all(world_size: int) -> None:
    training = Training()

    def hook(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            raise LookupError("no such run")

    training.ours.register_load_state_dict_pre_hook(hook)
    before = training.snapshot()
    state_dict = training.plain.state_dict()
    expect_failure_of([0], lambda: training.ours.load_state_dict(state_dict), LookupError, "no such run")
    expect_same(training.snapshot(), before)
    training.train()


@distributed(2, 3)
def test_a_target_rank_that_only_one_rank_gets_wrong_stops_all(world_size: int) -> None:
    training = Training()
    to = world_size if dist.get_rank() == 0 else 0
    expect_failure_of([0], lambda: training.ours.consolidate_state_dict(to=to), ValueError, "to must be a group rank")
    training.train()


@distributed(2, 3)
def test_different_target_ranks_are_an_error(world_size: int) -> None:
    training = Training()
    to = 1 if dist.get_rank() == world_size - 1 else 0
    expect_disagreement(
        world_size - 1,
        lambda: training.ours.consolidate_state_dict(to=to),
        "target rank: 0",
        "target rank: 1",
    )
    training.train()


class Fragile(SGD):
    """Its step fails where it is told to."""

    broken: Exception | None = None

    def step(self, closure: Any = None) -> Any:
        if self.broken is not None:
            raise self.broken
        return super().step(closure)


FAILURES = {
    "an ordinary error": ArithmeticError("the tank is empty"),
    "an error with text that is no Unicode": OSError("the tank is empty: /data/\udcff"),
    "an error without text": ArithmeticError(),
}


@distributed(2, 3)
@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_inner_step_is_raised_there_and_reported_elsewhere(world_size: int, case: str, culprit: str) -> None:
    training = Training(optimizer_class=Fragile)
    failing = 0 if culprit == "first" else world_size - 1
    error = FAILURES[case]
    assert isinstance(training.ours.optim, Fragile)
    if dist.get_rank() == failing:
        training.ours.optim.broken = error
    caught = failure_of(training.ours.step)
    if dist.get_rank() == failing:
        assert caught is error
    else:
        text = "the tank is empty" if error.args else ""
        kind = type(error).__name__
        expect(caught, PeerFailedError, rf"step\(\) failed on rank {failing}: {kind}: {text}")
    check_pool()


@distributed(2, 3)
def test_after_a_failed_step_a_load_makes_all_ranks_whole_again(world_size: int) -> None:
    training = Training(optimizer_class=Fragile)
    assert isinstance(training.ours.optim, Fragile)
    values = [param.detach().clone() for param in training.params]
    training.ours.optim.broken = ArithmeticError("once") if dist.get_rank() == 1 else None
    failure_of(training.ours.step)
    training.ours.optim.broken = None
    with torch.no_grad():
        for param, value in zip(training.params, values, strict=True):
            param.copy_(value)
    training.ours.load_state_dict(training.plain.state_dict())
    training.train()


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_gradients_for_different_parameters_are_an_error_that_names_the_first(
    world_size: int, bucket_view: bool
) -> None:
    training = Training(bucket_view)
    odd = world_size - 1
    training.ours.zero_grad()
    training.params[0].grad = torch.zeros(64, 40)
    if dist.get_rank() == odd:
        training.params[2].grad = torch.zeros(3, 5)
    expect_disagreement(
        odd, training.ours.step, "parameter 'three': no gradient, shape", "parameter 'three': a gradient, shape"
    )
    check_pool()


CALLS: dict[str, Callable[[Any], object]] = {
    "step()": lambda training: training.ours.step(),
    "consolidate_state_dict()": lambda training: training.ours.consolidate_state_dict(),
    "load_state_dict()": lambda training: training.ours.load_state_dict(training.plain.state_dict()),
    "add_param_group()": lambda training: training.ours.add_param_group({"params": [parameter(3)]}),
    "the norm of the gradients": lambda training: training.ours.clip_grad_norm_(1.0),
}


@distributed(2, 3)
@pytest.mark.parametrize(("one", "other"), list(combinations(CALLS, 2)))
def test_ranks_at_different_calls_are_all_told_where_each_of_them_is(world_size: int, one: str, other: str) -> None:
    training = Training()
    training.train()
    here = one if dist.get_rank() == 0 else other
    error = failure_of(lambda: CALLS[here](training))
    pattern = rf"different calls\. rank 0: {re.escape(one)}; rank 1: {re.escape(other)}[;.]"
    expect(error, RanksDisagreeError, pattern)
    with torch.no_grad():  # a rank that was at step() has stepped what it owns
        for param, plain in zip(training.params, training.plain_params, strict=True):
            param.copy_(plain)
    training.ours.load_state_dict(training.plain.state_dict())
    training.train()


MOURNERS = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from onecopy import PeerFailedError, ZeroRedundancyOptimizer
rank = int(sys.argv[1])
dist.init_process_group("gloo", f"file://{sys.argv[2]}", timedelta(seconds=60), rank=rank, world_size=3)
optimizer = ZeroRedundancyOptimizer([torch.zeros(3, requires_grad=True)], torch.optim.SGD, lr=0.1)
if rank == 2:
    os._exit(0)
if rank == 0:
    time.sleep(1)  # rank 1 waits in its call already, for this rank first
start = time.monotonic()
try:
    optimizer.consolidate_state_dict()
except PeerFailedError as error:
    print(time.monotonic() - start, error, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_rank_that_is_gone_is_noticed_by_all_others_when_the_last_of_them_comes(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MOURNERS, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks[:2]:
            assert rank.stdout is not None
            seconds, message = rank.stdout.readline().split(maxsplit=1)
            assert float(seconds) < 2 * SECONDS
            assert "consolidate_state_dict() has waited for the other ranks in vain" in message
    finally:
        for rank in ranks:
            rank.communicate("")
    assert [rank.returncode for rank in ranks] == [0, 0, 0]


@distributed(2, 3)
def test_a_step_that_only_one_rank_gives_an_unknown_argument_is_an_error_on_all(world_size: int) -> None:
    training = Training()
    kwargs: dict[str, Any] = {"speed": 3} if dist.get_rank() == 0 else {}
    expect_failure_of([0], lambda: training.ours.step(**kwargs), TypeError, "speed")
    check_pool()


@distributed(2, 3)
def test_a_sparse_gradient_of_a_cut_parameter_is_refused_by_name(world_size: int) -> None:
    embedding = nn.Embedding(64, 32, sparse=True)
    optimizer = ZeroRedundancyOptimizer(embedding.named_parameters(), SGD, lr=0.1, shard_by="element")
    assert optimizer.layout.cut_params == (0,)
    embedding(torch.tensor([1, 2])).sum().backward()
    error = failure_of(optimizer.step)
    expect(error, ValueError, f"rank {dist.get_rank()}: parameter 'weight' has a sparse gradient.*elementwise=False")
    check_pool()


@distributed(2, 3)
def test_an_exception_of_the_closure_comes_through_unchanged(world_size: int) -> None:
    training = Training()
    error = LookupError("no more data")

    def closure() -> float:
        raise error

    before = training.snapshot()
    assert failure_of(lambda: training.ours.step(closure)) is error
    expect_same(training.snapshot(), before)
    training.train()
