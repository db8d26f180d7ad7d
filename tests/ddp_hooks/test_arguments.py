"""Hooks that are made wrongly, on one rank or on all: an error on all ranks, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.data_parallel import OVERLAPS, MakeHook
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
        self.rank_alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def optimizer(self, module: nn.Module, overlaps: bool | None = None, **options: Any) -> ZeroRedundancyOptimizer:
        overlaps = self.overlaps if overlaps is None else overlaps
        named = ((f"layer.{name}", param) for name, param in module.named_parameters())
        return ZeroRedundancyOptimizer(named, SGD, lr=0.1, overlap_with_ddp=overlaps, **options)

    def register(self, state: Any) -> None:
        """Register the reduce-scatter hook and run a backward pass, which makes the state if there is none yet."""
        self.ddp.register_comm_hook(state, reduce_scatter_hook)
        self.ddp(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()


def torch_zero(twins: Twins) -> object:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero  # warns when it is imported first

    return TorchZero(twins.ddp.parameters(), SGD, lr=0.1)


Make = Callable[[Twins], Any]

OURS = r"takes a onecopy\.ZeroRedundancyOptimizer, got "
GROUPS = r"the optimizer is on ranks \[.*\], but DDP is on ranks"


def two_groups(twins: Twins) -> object:
    return [twins.zeros[0], twins.optimizer(twins.module[1], process_group=dist.new_group())]


def overlapping(twins: Twins) -> object:
    return twins.optimizer(twins.module, overlaps=True)


def complex_optimizer(twins: Twins) -> object:
    return twins.optimizer(nn.Linear(4, 4, dtype=torch.complex64))


def on_rank_alone(twins: Twins) -> dict[str, Any]:
    return {"ddp": DistributedDataParallel(twins.module, process_group=twins.rank_alone)}


STATES: dict[str, tuple[Make, type[Exception], str]] = {
    "a plain optimizer": (lambda twins: twins.plain, TypeError, OURS + "torch.optim.sgd.SGD"),
    "torch's class": (torch_zero, TypeError, OURS + "torch.distributed.optim"),
    "a number": (lambda _: 3, TypeError, OURS),
    "nothing": (lambda _: [None], TypeError, OURS),
    "no optimizer": (lambda _: [], ValueError, "at least one optimizer"),
    "one twice": (lambda twins: [twins.zeros[0]] * 2, ValueError, "'layer.weight' belongs to more than one of the"),
    "one that updates in backward": (overlapping, ValueError, "overlap_with_ddp=True"),
    "two process groups": (two_groups, ValueError, "same process group"),
    "complex parameters": (complex_optimizer, ValueError, "'layer.weight' is complex"),
    "integers": (lambda _: {"reduce_dtype": torch.int32}, ValueError, "floating-point type, got torch.int32"),
    "a name of a type": (lambda _: {"reduce_dtype": "bf16"}, ValueError, "floating-point type, got bf16"),
    "another model's ranks": (on_rank_alone, ValueError, GROUPS),
}
"""All ranks make the states, or the options, and one rank, or all, use them; the error and what it says."""


@pytest.mark.parametrize("eagerly", [True, False], ids=["ReduceScatter", "optimizers"])
@pytest.mark.parametrize("culprit", ["first", "last", "all"])
@pytest.mark.parametrize("state", STATES)
@distributed(2, 3)
def test_states_of_the_reduce_scatter_hook_that_are_refused(
    world_size: int, state: str, culprit: str, eagerly: bool
) -> None:
    twins, (make, kind, text) = Twins(), STATES[state]
    culprits = {"first": [0], "last": [world_size - 1], "all": list(range(world_size))}[culprit]
    wrong = make(twins)
    given, options = (twins.zeros, wrong) if isinstance(wrong, dict) else (wrong, {})
    if dist.get_rank() not in culprits:
        given, options = twins.zeros, {}
    eagerly = eagerly or isinstance(wrong, dict)
    expect_failure_of(
        culprits, lambda: twins.register(ReduceScatter(given, **options) if eagerly else given), kind, text
    )
    check_pool()


def without_overlap(twins: Twins) -> object:
    return twins.ddp, twins.optimizer(twins.module, overlaps=False)


def of_complex(_: Twins) -> object:
    twins = Twins(overlaps=True, dtype=torch.complex64)
    return twins.ddp, twins.zeros[0]


def on_other_ranks(twins: Twins) -> object:
    return twins.ddp, twins.optimizer(twins.module, process_group=twins.rank_alone)


NOT_OF_MODEL = "'layer.weight'.*not a parameter of the"

OVERLAPPING: dict[str, tuple[Make, type[Exception], str]] = {
    "a plain optimizer": (lambda twins: (twins.ddp, twins.plain), TypeError, OURS + "torch.optim.sgd.SGD"),
    "torch's class": (lambda twins: (twins.ddp, torch_zero(twins)), TypeError, OURS),
    "an optimizer without overlap": (without_overlap, ValueError, "overlap_with_ddp=True"),
    "another model": (lambda twins: (twins.ddp, twins.optimizer(nn.Linear(2, 2))), ValueError, NOT_OF_MODEL),
    "no DDP": (lambda twins: (twins.module, twins.zeros[0]), TypeError, "DistributedDataParallel, got Sequential"),
    "complex parameters": (of_complex, ValueError, r"'layer\.weight' is complex"),
    "other ranks": (on_other_ranks, ValueError, GROUPS),
}


@OVERLAPS
@pytest.mark.parametrize("arguments", OVERLAPPING)
@distributed(2)
def test_arguments_of_an_overlap_hook_that_are_refused(world_size: int, arguments: str, hook: MakeHook) -> None:
    twins, (make, kind, text) = Twins(overlaps=True), OVERLAPPING[arguments]
    wrong = make(twins)
    expect_failure_of([0, 1], lambda: hook(allreduce_hook, *wrong), kind, text)
    if arguments != "other ranks":  # then the ranks are in different groups
        mine = wrong if dist.get_rank() == 1 else (twins.ddp, twins.zeros[0])
        expect_failure_of([1], lambda: hook(allreduce_hook, *mine), kind, text)
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


def scatter(dtype: torch.dtype | None = None, last: int | None = None, step: int = 1) -> Make:
    return lambda twins: twins.register(ReduceScatter(twins.zeros[:last:step], dtype))


def overlap(hook: MakeHook = hook_with_zero_step, comm_hook: Any = allreduce_hook, number: int = 0) -> Make:
    return lambda twins: hook(comm_hook, twins.ddp, twins.zeros[number])


TYPE = "reduce_dtype: torch.bfloat16"

DIFFERENT: dict[str, tuple[Make, Make, str, str]] = {
    "a type": (scatter(), scatter(torch.bfloat16), "reduce_dtype: None", TYPE),
    "no type": (scatter(torch.bfloat16), lambda twins: twins.register(twins.zeros), TYPE, "reduce_dtype: None"),
    "another number": (scatter(), scatter(last=1), "number of optimizers: 2", "number of optimizers: 1"),
    "another order": (scatter(), scatter(step=-1), "optimizer 0: SGD of 2 param", "optimizer 0: SGD of 2 param"),
    "another hook": (overlap(), overlap(comm_hook=fp16_compress_hook), "hook: .*allreduce", "hook: .*fp16_compress"),
    "another optimizer": (overlap(), overlap(number=1), "optimizer 0: SGD", "optimizer 0: SGD"),
    "interleaved": (overlap(), overlap(hook_with_zero_step_interleaved), "interleaved: False", "interleaved: True"),
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
    twins = Twins(overlaps=True, **{option: dist.get_rank() == 1})  # type: ignore[arg-type]
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


@distributed(3)
def test_a_hook_that_cannot_see_which_ranks_ddp_is_on_is_refused(world_size: int) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    zero = ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), SGD, process_group=group, lr=0.1)
    with pytest.raises(ValueError, match=r"register ReduceScatter\(optimizer, ddp=ddp\)"):
        ReduceScatter(zero)
