"""Bad or different arguments of the constructor are an error on every rank, soon, that names the offender."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import SGD, Adam, AdamW

from onecopy import PeerFailedError, Shard, ZeroRedundancyOptimizer
from tests.support.failures import (
    Arguments,
    check_pool,
    expect,
    expect_disagreement,
    expect_failure_of,
    failure_of,
    good,
    named,
    parameter,
)
from tests.support.harness import distributed


def given(*members: Any) -> Callable[[], Arguments]:
    """Arguments whose ``params`` are named tensors; ``members`` are functions that make them."""
    return lambda: {**good(), "params": named(*(make() for make in members))}


def params(value: Callable[[], Any]) -> Callable[[], Arguments]:
    """Return arguments whose ``params`` are made by ``value``."""
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
        options(optimizer_class=SGD([torch.zeros(1)], lr=0.1)),
        TypeError,
        "optimizer_class must be .* got an instance of SGD:",
    ),
    "another class": Bad(options(optimizer_class=nn.Linear), TypeError, "optimizer_class must be .* got .*Linear"),
    "a function as class": Bad(options(optimizer_class=copy.copy), TypeError, "optimizer_class must be .*copy"),
    "no class": Bad(
        lambda: {key: value for key, value in good().items() if key != "optimizer_class"},
        TypeError,
        r"optimizer_class must be the class to shard, and it is missing: write ZeroRedundancyOptimizer\(",
    ),
    "a consumed generator": Bad(
        params(lambda: iter(())), ValueError, r"params is empty.*call model\.parameters\(\) again"
    ),
    "a consumed generator in a group": Bad(
        params(lambda: [{"params": iter(())}]), ValueError, r"no parameter.*call model\.parameters\(\) again"
    ),
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
    "an unknown guard": Bad(options(nonfinite="stop"), ValueError, "nonfinite must be None, .* got .stop."),
    "a guard with an overlap hook": Bad(
        options(nonfinite="skip", overlap_with_ddp=True), ValueError, "nonfinite cannot be combined with overlap"
    ),
    "comparisons that never come": Bad(
        options(check_replicas_every=0), ValueError, "check_replicas_every must be None or a number .* got 0"
    ),
    "a function that leaves a gap": Bad(
        options(shard_by=lambda *_: [[Shard(0, 0, 6, 0)], 0]), ValueError, "'one' has 12 elements"
    ),
}


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
    "guards": Mismatch(good, options(nonfinite="skip"), "nonfinite: None", "nonfinite: skip"),
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
            "shard_by": "parameter",
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
