"""Hooks that are made wrongly, on one rank or on all: an error on all ranks, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from onecopy import (
    RanksDisagreeError,
    ReduceScatter,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.failures import check_pool, expect, expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed


class Twins:
    """Two layers alike, each with an optimizer of its own, in DDP. Every rank makes all of it, in the same order."""

    def __init__(self, overlaps: bool = False, dtype: torch.dtype = torch.float32, **ddp_options: Any) -> None:
        torch.manual_seed(3)
        self.overlaps = overlaps
        self.module = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype))
        self.ddp = DistributedDataParallel(self.module, **ddp_options)
        self.zeros = [self.optimizer(part) for part in self.module]
        self.plain = SGD(self.module.parameters(), lr=0.1)
        self.ranks_alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def optimizer(self, module: nn.Module, overlaps: bool | None = None, **options: Any) -> ZeroRedundancyOptimizer:
        overlaps = self.overlaps if overlaps is None else overlaps
        named = ((f"layer.{name}", param) for name, param in module.named_parameters())
        return ZeroRedundancyOptimizer(named, SGD, lr=0.1, overlap_with_ddp=overlaps, **options)

    def backward(self) -> None:
        self.ddp(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()

    def register(self, state: Any) -> None:
        """Register the reduce-scatter hook and run a backward pass, which makes the state if there is none yet."""
        self.ddp.register_comm_hook(state, reduce_scatter_hook)
        self.backward()

    def alone(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.module, process_group=self.ranks_alone[dist.get_rank()])


def torch_zero(twins: Twins) -> object:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero  # warns when it is imported first

    return TorchZero(twins.ddp.parameters(), SGD, lr=0.1)


Make = Callable[[Twins], object]


@dataclass(frozen=True)
class Refused:
    """Arguments of one hook that are refused.

    Attributes:
        arguments: makes them; all ranks make what they need, and one rank, or all, use them.
        kind: the error.
        text: what it says.
    """

    arguments: Make
    kind: type[Exception]
    text: str


OURS = r"takes a onecopy\.ZeroRedundancyOptimizer, got "
GROUPS = r"the optimizer is on ranks \[.*\], but DDP is on ranks"

STATES = {
    "a plain optimizer": Refused(lambda twins: twins.plain, TypeError, OURS + "torch.optim.sgd.SGD"),
    "torch's class": Refused(torch_zero, TypeError, OURS + "torch.distributed.optim"),
    "a number": Refused(lambda _: 3, TypeError, OURS),
    "nothing": Refused(lambda _: [None], TypeError, OURS),
    "no optimizer": Refused(lambda _: [], ValueError, "at least one optimizer"),
    "one twice": Refused(
        lambda twins: [twins.zeros[0]] * 2, ValueError, "'layer.weight' belongs to more than one of the hook's"
    ),
    "one that updates in backward": Refused(
        lambda twins: twins.optimizer(twins.module, overlaps=True), ValueError, "overlap_with_ddp=True"
    ),
    "two process groups": Refused(
        lambda twins: [twins.zeros[0], twins.optimizer(twins.module[1], process_group=dist.new_group())],
        ValueError,
        "same process group",
    ),
    "complex parameters": Refused(
        lambda twins: twins.optimizer(nn.Linear(4, 4, dtype=torch.complex64)), ValueError, "'layer.weight' is complex"
    ),
}


@pytest.mark.parametrize("eagerly", [True, False], ids=["ReduceScatter", "optimizers"])
@pytest.mark.parametrize("culprit", ["first", "last", "all"])
@pytest.mark.parametrize("state", STATES)
@distributed(2, 3)
def test_states_of_the_reduce_scatter_hook_that_are_refused(
    world_size: int, state: str, culprit: str, eagerly: bool
) -> None:
    twins, case = Twins(), STATES[state]
    culprits = {"first": [0], "last": [world_size - 1], "all": list(range(world_size))}[culprit]
    wrong = case.arguments(twins)
    given: Any = wrong if dist.get_rank() in culprits else twins.zeros
    expect_failure_of(
        culprits, lambda: twins.register(ReduceScatter(given) if eagerly else given), case.kind, case.text
    )
    check_pool()


OPTIONS = {
    "integers": Refused(lambda _: {"reduce_dtype": torch.int32}, ValueError, "floating-point type, got torch.int32"),
    "a name of a type": Refused(lambda _: {"reduce_dtype": "bf16"}, ValueError, "floating-point type, got bf16"),
    "another model's ranks": Refused(lambda twins: {"ddp": twins.alone()}, ValueError, GROUPS),
}


@pytest.mark.parametrize("option", OPTIONS)
@distributed(2, 3)
def test_options_of_the_reduce_scatter_hook_that_one_rank_is_refused(world_size: int, option: str) -> None:
    odd, twins, case = world_size - 1, Twins(), OPTIONS[option]
    wrong: Any = case.arguments(twins)
    mine = wrong if dist.get_rank() == odd else {}
    expect_failure_of([odd], lambda: ReduceScatter(twins.zeros, **mine), case.kind, case.text)
    check_pool()


OVERLAPS = {
    "a plain optimizer": Refused(lambda twins: (twins.ddp, twins.plain), TypeError, OURS + "torch.optim.sgd.SGD"),
    "torch's class": Refused(lambda twins: (twins.ddp, torch_zero(twins)), TypeError, OURS),
    "an optimizer without overlap": Refused(
        lambda twins: (twins.ddp, twins.optimizer(twins.module, overlaps=False)), ValueError, "overlap_with_ddp=True"
    ),
    "another model": Refused(
        lambda twins: (twins.ddp, twins.optimizer(nn.Linear(2, 2))),
        ValueError,
        "'layer.weight'.*not a parameter of the",
    ),
    "no DDP": Refused(
        lambda twins: (twins.module, twins.zeros[0]), TypeError, "DistributedDataParallel, got Sequential"
    ),
    "other ranks": Refused(
        lambda twins: (twins.ddp, twins.optimizer(twins.module, process_group=twins.ranks_alone[dist.get_rank()])),
        ValueError,
        GROUPS,
    ),
}


@pytest.mark.parametrize("make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
@pytest.mark.parametrize("arguments", OVERLAPS)
@distributed(2)
def test_arguments_of_an_overlap_hook_that_are_refused(
    world_size: int, arguments: str, make_hook: Callable[..., Any]
) -> None:
    twins, case = Twins(overlaps=True), OVERLAPS[arguments]
    wrong: Any = case.arguments(twins)
    expect_failure_of([0, 1], lambda: make_hook(allreduce_hook, *wrong), case.kind, case.text)
    if arguments != "other ranks":  # then the ranks are in different groups
        mine = wrong if dist.get_rank() == 1 else (twins.ddp, twins.zeros[0])
        expect_failure_of([1], lambda: make_hook(allreduce_hook, *mine), case.kind, case.text)
    check_pool()


@distributed(2)
def test_a_second_overlap_hook_and_torchs_hooks_are_refused(world_size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook  # imports torch's class

    twins = Twins(overlaps=True)
    hook_with_zero_step(allreduce_hook, twins.ddp, twins.zeros[0])
    with pytest.raises(ValueError, match="a hook has already been made for this optimizer"):
        hook_with_zero_step_interleaved(allreduce_hook, twins.ddp, twins.zeros[0])
    for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        with pytest.raises(ValueError, match=r"onecopy\.hook_with_zero_step"):
            getattr(ddp_zero_hook, name)(allreduce_hook, twins.ddp, twins.zeros[1])


@distributed(2)
def test_complex_parameters_are_refused_by_an_overlap_hook(world_size: int) -> None:
    twins = Twins(overlaps=True, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'layer\.weight' is complex"):
        hook_with_zero_step(allreduce_hook, twins.ddp, twins.zeros[0])


def scatter(dtype: torch.dtype | None = None, last: int | None = None, step: int = 1) -> Make:
    return lambda twins: twins.register(ReduceScatter(twins.zeros[:last:step], dtype))


def overlap(make_hook: Callable[..., Any] = hook_with_zero_step, hook: Any = allreduce_hook, number: int = 0) -> Make:
    return lambda twins: make_hook(hook, twins.ddp, twins.zeros[number])


DIFFERENT: dict[str, tuple[Make, Make, str, str]] = {
    "a type": (scatter(), scatter(torch.bfloat16), "reduce_dtype: None", "reduce_dtype: torch.bfloat16"),
    "no type": (scatter(torch.float64), scatter(), "reduce_dtype: torch.float64", "reduce_dtype: None"),
    "another number": (scatter(), scatter(last=1), "number of optimizers: 2", "number of optimizers: 1"),
    "another order": (scatter(), scatter(step=-1), "optimizer 0: SGD of 2 param", "optimizer 0: SGD of 2 param"),
    "optimizers alone": (
        scatter(torch.bfloat16),
        lambda twins: twins.register(twins.zeros),
        "reduce_dtype: torch.bfloat16",
        "reduce_dtype: None",
    ),
    "another hook": (overlap(), overlap(hook=fp16_compress_hook), "hook: .*allreduce", "hook: .*fp16_compress"),
    "another optimizer": (overlap(), overlap(number=1), "optimizer 0: SGD", "optimizer 0: SGD"),
    "interleaved": (
        overlap(),
        overlap(hook_with_zero_step_interleaved),
        "interleaved: False",
        "interleaved: True",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@distributed(2, 3)
def test_arguments_that_differ_are_an_error_that_names_the_first_difference(world_size: int, case: str) -> None:
    usual, other, text, odd_text = DIFFERENT[case]
    odd, twins = world_size - 1, Twins(overlaps="overlap" in usual.__qualname__)
    expect_disagreement(odd, lambda: (other if dist.get_rank() == odd else usual)(twins), text, odd_text)
    check_pool()


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
@distributed(2)
def test_options_of_ddp_that_differ_are_an_error(world_size: int, option: str) -> None:
    ddp_options: Any = {option: dist.get_rank() == 1}
    twins = Twins(overlaps=True, **ddp_options)
    expect_disagreement(1, lambda: overlap()(twins), f"{option} of DDP: False", f"{option} of DDP: True")
    check_pool()


@distributed(2, 3)
def test_different_hooks_are_an_error_and_optimizers_alone_are_the_same_as_a_state(world_size: int) -> None:
    twins = Twins(overlaps=True)
    here = overlap() if dist.get_rank() == 0 else scatter()
    text = "rank 0: making an overlap hook; rank 1: constructing ReduceScatter|different calls|other calls"
    expect(failure_of(lambda: here(twins)), RanksDisagreeError, text)
    twins = Twins()
    twins.register(twins.zeros if dist.get_rank() == 0 else ReduceScatter(twins.zeros, ddp=twins.ddp))
    check_pool()


@distributed(4)
def test_a_hook_that_cannot_see_which_ranks_ddp_is_on_is_refused(world_size: int) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    zero = ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), SGD, process_group=group, lr=0.1)
    with pytest.raises(ValueError, match=r"register ReduceScatter\(optimizer, ddp=ddp\)"):
        ReduceScatter(zero)
