"""Bad or different arguments of the constructor are an error on every rank, soon, that names the offender."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

Make = Callable[[], Arguments]


def options(**values: Any) -> Make:
    """Good arguments with some replaced."""
    return lambda: {**good(), **values}


def params(value: Callable[[], Any]) -> Make:
    """Good arguments whose ``params`` are made by ``value``."""
    return lambda: {**good(), "params": value()}


def given(*members: Any) -> Make:
    """Arguments whose ``params`` are named tensors; ``members`` are functions that make them."""
    return params(lambda: named(*(make() for make in members)))


def classes(value: Any) -> Make:
    return options(optimizer_class=value)


def owners(*found: Any) -> Make:
    return options(shard_by=lambda *_: list(found))


def two() -> nn.Parameter:
    return parameter(2)


def three() -> nn.Parameter:
    return parameter(3)


def in_two_groups() -> Any:
    one = three()
    return [{"params": named(two(), one)}, {"params": [("three", one)]}]


def overlapping() -> Any:
    memory = torch.zeros(10)
    return named(nn.Parameter(memory[:6]), nn.Parameter(memory[5:]))


def dtensor() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))


def fsdp1() -> Any:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu, use_orig_params=True)
    return named(*model.parameters())


def fsdp2() -> Any:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return named(*model.parameters())


def broken_generator() -> Any:
    yield two()
    raise LookupError("no more parameters here")


class UnknownToUs(SGD):
    """A subclass: its update might do anything."""


def conjugate() -> Tensor:
    return torch.zeros(2, dtype=torch.complex64).conj()


LAMB = {"params": [{"params": torch.ones(1), "max_grad_norm": 0.0}], "optimizer_class": pytorch_optimizer.Lamb}
NOT_ELEMENTWISE = "not known to work element by element"
CUTTING = {
    "params": named(parameter(128)),
    "optimizer_class": UnknownToUs,
    "shard_by": lambda *_: [[Shard(0, 0, 64, 0), Shard(0, 64, 128, 1)]],
}

WRONG_TYPES: dict[str, tuple[Make, str]] = {
    "a bare tensor": (params(three), r"params must be .* got torch\S+;"),
    "a number": (params(lambda: 3), "params must be .* got int"),
    "a module": (params(lambda: nn.Linear(1, 1)), r"params must be .*Linear.*model\.parameters\(\)"),
    "a set": (params(lambda: {three()}), "params must be ordered, got a set"),
    "a group with a set": (params(lambda: [{"params": {three()}}]), "params of parameter group 0 must be ordered"),
    "a group with a number": (params(lambda: [{"params": 3}]), "parameter group 0 must be tensors.*int"),
    "tensors mixed with dicts": (params(lambda: [{"params": three()}, three()]), "mixes dicts and tensors: entry 1 is"),
    "not a tensor": (given(three, lambda: [1.0]), "'two' is not a tensor but list"),
    "an unnamed number": (params(lambda: [three(), 1.0]), "parameter 1 of group 0 is not a tensor but float"),
    "an instance as class": (classes(SGD([torch.zeros(1)], lr=0.1)), "optimizer_class .* an instance of SGD: pass"),
    "a partial as class": (classes(functools.partial(SGD, lr=0.1)), "optimizer_class .* an instance of partial:"),
    "another class": (classes(nn.Linear), "optimizer_class must be .* got .*Linear"),
    "the base class": (
        classes(torch.optim.Optimizer),
        r"optimizer_class must be .*missing: write ZeroRedundancyOpt.*\(",
    ),
    "our own class": (classes(ZeroRedundancyOptimizer), "optimizer_class must be .*ZeroRedundancy"),
    "an option the class does not know": (options(speed=2), "speed"),
}
WRONG_VALUES: dict[str, tuple[Make, str]] = {
    "a consumed generator": (params(lambda: iter(())), r"params is empty.*call model\.parameters\(\) again"),
    "one in a group": (params(lambda: [{"params": iter(())}]), r"no parameter.*call model\.parameters\(\) again"),
    "only empty groups": (params(lambda: [{"params": []}]), "no parameter"),
    "a group without params": (
        params(lambda: [{"params": three()}, {"lr": 1.0}]),
        r"group 1 has no 'params'.*\['lr'\]",
    ),
    "names for some": (params(lambda: [("one", three()), two()]), "group 0 mixes named and unnamed"),
    "the same object in two groups": (params(in_two_groups), "'three' is in two groups.*'two'"),
    "two over one storage": (params(overlapping), "'one' and 'two' share memory"),
    "an expanded one": (given(three, lambda: nn.Parameter(torch.ones(1).expand(3))), "'two' does not fill.*expanded"),
    "a slice": (given(lambda: nn.Parameter(torch.ones(4, 4)[:, :2])), r"'one' does not fill.*slice; use .clone\(\)"),
    "a sparse one": (given(three, lambda: nn.Parameter(torch.eye(3).to_sparse())), "'two'.*sparse"),
    "one on the meta device": (
        given(three, lambda: nn.Parameter(torch.empty(3, device="meta"))),
        "'two' is on the meta device and has no memory; materialise the model first",
    ),
    "a lazy one": (given(three, nn.UninitializedParameter), "'two'.*not materialised"),
    "a conjugate": (given(conjugate), "'one' is a lazy conjugate"),
    "a negative view": (given(lambda: conjugate().imag), "'one' is a lazy conjugate or negative view"),
    "one that is computed": (given(lambda: three() * 2), "'one' is not a leaf"),
    "a DTensor": (given(three, dtensor), "'two' is a DTensor"),
    "FSDP1": (params(fsdp1), "'one' is managed by FSDP"),
    "FSDP2": (params(fsdp2), "'one' is a DTensor.*FSDP2"),
    "an option the class refuses": (options(lr=-1.0), "-1.0"),
    "differentiable": (options(differentiable=True), r"differentiable=True \(parameter group 0\)"),
    "LBFGS": (classes(torch.optim.LBFGS), "LBFGS cannot be sharded exactly"),
    "Lamb": (lambda: LAMB, "Lamb with max_grad_norm"),
    "cutting for an unknown class": (options(optimizer_class=UnknownToUs, shard_by="element"), NOT_ELEMENTWISE),
    "cutting for a class declared otherwise": (options(shard_by="element", elementwise=False), NOT_ELEMENTWISE),
    "a function that cuts an unknown class": (lambda: CUTTING, "cuts parameter 'one'.*not known"),
    "an unknown policy": (options(shard_by="row"), "shard_by must be .*'row'"),
    "an owner that does not exist": (owners(7, 7), "'one' is given to rank"),
    "a function that leaves a gap": (owners([Shard(0, 0, 6, 0)], 0), "'one' has 12 elements"),
    "an unknown guard": (options(nonfinite="stop"), "nonfinite must be None, .* got .stop."),
    "a guard with an overlap hook": (
        options(nonfinite="skip", overlap_with_ddp=True),
        "nonfinite cannot be .* overlap",
    ),
    "comparisons that never come": (options(check_replicas_every=0), "check_replicas_every must be .* got 0"),
    "an unknown place for state": (options(offload="disk"), "offload must be None or 'cpu', got 'disk'"),
}
BAD: dict[str, tuple[Make, type[Exception], str]] = {
    **{name: (make, TypeError, text) for name, (make, text) in WRONG_TYPES.items()},
    **{name: (make, ValueError, text) for name, (make, text) in WRONG_VALUES.items()},
    "a generator that breaks": (params(broken_generator), LookupError, "no more parameters here"),
}


@distributed(2, 3)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_an_error_on_every_rank(world_size: int, case: str) -> None:
    make, kind, text = BAD[case]
    for culprits in (range(world_size), [0], [world_size - 1]):
        arguments = make()  # on every rank: FSDP and DTensor communicate
        if dist.get_rank() not in culprits:
            arguments = good()
        before = torch.get_rng_state()
        expect_failure_of(culprits, lambda: ZeroRedundancyOptimizer(**arguments), kind, text)  # noqa: B023
        assert torch.equal(torch.get_rng_state(), before)
    check_pool()


@distributed(2, 3)
def test_different_mistakes_are_each_raised_where_they_were_made_and_an_outsider_is_told_so(world_size: int) -> None:
    rank, outsider = dist.get_rank(), world_size - 1
    bad = [BAD["a consumed generator"], BAD["a number"], None][rank]
    error = failure_of(lambda: ZeroRedundancyOptimizer(**(bad[0]() if bad else good())))
    if bad is not None:
        expect(error, *bad[1:])
    else:
        expect(error, PeerFailedError, "failed on ranks 0, 1: ValueError: .*params is empty")
    group = dist.new_group(list(range(outsider)))
    if rank == outsider:
        with pytest.raises(ValueError, match=f"global rank {outsider} is not a member of the process group"):
            ZeroRedundancyOptimizer(**good(), process_group=group)
    else:
        assert ZeroRedundancyOptimizer(**good(), process_group=group).world_size == outsider
    check_pool()


def with_names(*names: str) -> Make:
    return params(lambda: [(name, three()) for name in names])


def with_rates(*rates: float) -> Make:
    return params(lambda: [{"params": three(), "lr": rate} for rate in rates])


ONE, TWO, NAME = r"parameter 0 \('one'\): ", r"parameter 1 \('two'\): ", r"parameter 1 \('"
GROUP_0, GROUP_1 = "parameter group 0: ", "parameter group 1: "

DIFFERENT: dict[str, tuple[Make, Make, str, str, str]] = {
    "guards": (good, options(nonfinite="skip"), "nonfinite: ", "None", "skip"),
    "offload": (good, options(offload="cpu"), "offload: ", "None", "cpu"),
    "master weights": (good, options(master_weights=True), "master_weights: ", "False", "True"),
    "bucket view": (good, options(parameters_as_bucket_view=True), "parameters_as_bucket_view: ", "False", "True"),
    "class": (classes(Adam), classes(AdamW), r"optimizer class: torch\.optim\.", r"adam\.Adam", r"adamw\.AdamW"),
    "count": (good, given(lambda: parameter(4, 3), three, three), "", "", r"parameter 2 \('three'\)"),
    "shape": (good, given(lambda: parameter(4, 3), lambda: parameter(5)), TWO, r"shape \(3,\)", r"shape \(5,\)"),
    "dtype": (
        good,
        given(lambda: parameter(4, 3), lambda: parameter(3, dtype=torch.float64)),
        f"{TWO}.*",
        "float32",
        "float64",
    ),
    "strides": (
        good,
        given(lambda: nn.Parameter(parameter(3, 4).detach().t()), three),
        f"{ONE}.*strides ",
        r"\(3, 1\)",
        r"\(1, 4\)",
    ),
    "order": (with_names("one", "two", "three"), with_names("one", "three", "two"), NAME, "two", "three"),
    "named on one rank only": (good, params(lambda: [parameter(4, 3), three()]), "parameter 0 .'", "one", "group0.0"),
    "a default": (good, options(momentum=0.9), f"{GROUP_0}momentum=", "0", "0.9"),
    "a group's option": (with_rates(0.1, 0.5), with_rates(0.1, 0.25), f"{GROUP_1}lr=", "0.5", "0.25"),
    "a tensor option": (
        options(optimizer_class=Adam, lr=torch.tensor(0.5)),
        options(optimizer_class=Adam, lr=torch.tensor(0.25)),
        rf"{GROUP_0}lr=tensor\(",
        "0.5",
        "0.25",
    ),
    "division into groups": (
        params(lambda: [{"params": named(two(), three())}]),
        params(lambda: [{"params": [("one", two())]}, {"params": [("two", three())]}]),
        f"{TWO}.*",
        "group 0",
        "group 1",
    ),
    "policy": (good, options(shard_by=lambda *_: [1, 1]), "(shard_by|.*'one')", "", ""),
    "owners from a function": (owners(0, 0), owners(0, 1), ".*'two'.*", "rank 0", "rank 1"),
}
"""Arguments of most ranks and of one, and of the error what it says of both, of most, and of one."""


@distributed(2, 3)
@pytest.mark.parametrize("case", DIFFERENT)
def test_arguments_that_differ_are_an_error_that_names_the_first_difference(world_size: int, case: str) -> None:
    make, make_odd, of_both, of_most, of_one = DIFFERENT[case]
    odd = world_size - 1
    arguments = make_odd() if dist.get_rank() == odd else make()
    expect_disagreement(odd, lambda: ZeroRedundancyOptimizer(**arguments), of_both + of_most, of_both + of_one)
    check_pool()
