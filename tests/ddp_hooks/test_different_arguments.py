"""Hooks that ranks make with different arguments: an error on all ranks, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class Twins:
    """Two layers alike, each with an optimizer of its own, in DDP. Every rank makes all of it, in the same order."""

    options: dict[str, Any] = field(default_factory=dict)
    ddp_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.ddp = DistributedDataParallel(self.module, **self.ddp_options)
        self.zeros = [ZeroRedundancyOptimizer(part.parameters(), SGD, lr=0.1, **self.options) for part in self.module]
        self.plain = SGD(self.module.parameters(), lr=0.1)

    def backward(self) -> None:
        self.ddp(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()

    def register(self, state: Any) -> None:
        """Register the reduce-scatter hook and run a backward pass, which makes the state if there is none yet."""
        self.ddp.register_comm_hook(state, reduce_scatter_hook)
        self.backward()


# The reduce-scatter hook


@pytest.mark.parametrize(
    ("dtype", "odd_dtype"), [(None, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, None)]
)
@distributed(2, 3)
def test_gradients_in_different_types_are_an_error(
    world_size: int, dtype: torch.dtype | None, odd_dtype: torch.dtype | None
) -> None:
    odd, twins = world_size - 1, Twins()
    mine = odd_dtype if dist.get_rank() == odd else dtype
    expect_disagreement(
        odd,
        lambda: twins.register(ReduceScatter(twins.zeros, mine)),
        f"reduce_dtype: {dtype}",
        f"reduce_dtype: {odd_dtype}",
    )
    check_pool()


@distributed(2, 3)
def test_an_optimizer_on_one_rank_and_a_state_with_another_type_elsewhere_are_an_error(world_size: int) -> None:
    odd, twins = world_size - 1, Twins()

    def register() -> None:
        other = dist.get_rank() == odd
        twins.register(twins.zeros if other else ReduceScatter(twins.zeros, torch.bfloat16))

    expect_disagreement(odd, register, "reduce_dtype: torch.bfloat16", "reduce_dtype: None")
    check_pool()


@distributed(2, 3)
def test_an_optimizer_on_one_rank_and_the_same_state_elsewhere_are_no_error(world_size: int) -> None:
    twins, reference = Twins(), Twins()
    reference.backward()
    twins.register(twins.zeros if dist.get_rank() == 0 else ReduceScatter(twins.zeros, ddp=twins.ddp))
    for zero in twins.zeros:
        zero.step()
    for zero in reference.zeros:
        zero.step()
    for ours, other in zip(twins.module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("eagerly", [True, False], ids=["ReduceScatter", "optimizers"])
@distributed(2, 3)
def test_other_optimizers_or_another_order_are_an_error(world_size: int, eagerly: bool) -> None:
    odd = world_size - 1
    for states, text, odd_text in (
        (lambda zeros: zeros[:1], "number of optimizers: 2", "number of optimizers: 1"),
        (lambda zeros: zeros[::-1], "optimizer 0: SGD of 2 param", "optimizer 0: SGD of 2 param"),
    ):
        twins = Twins()
        state = states(twins.zeros) if dist.get_rank() == odd else twins.zeros
        expect_disagreement(
            odd,
            lambda state=state, twins=twins: twins.register(ReduceScatter(state) if eagerly else state),  # type: ignore[misc]
            text,
            odd_text,
        )
    check_pool()


@pytest.mark.parametrize("eagerly", [True, False], ids=["ReduceScatter", "optimizers"])
@pytest.mark.parametrize("culprit", ["first", "last"])
@distributed(2, 3)
def test_optimizers_that_one_rank_is_refused_are_an_error_on_all(world_size: int, eagerly: bool, culprit: str) -> None:
    odd = 0 if culprit == "first" else world_size - 1
    for wrong, kind, text in (
        (lambda twins: twins.plain, TypeError, r"takes a onecopy\.ZeroRedundancyOptimizer"),
        (lambda _: 3, TypeError, r"takes a onecopy\.ZeroRedundancyOptimizer"),
        (lambda _: [], ValueError, "at least one optimizer"),
        (lambda twins: [twins.zeros[0], twins.zeros[0]], ValueError, "more than one of the hook's optimizers"),
    ):
        twins = Twins()
        state = wrong(twins) if dist.get_rank() == odd else twins.zeros
        expect_failure_of(
            [odd],
            lambda state=state, twins=twins: twins.register(ReduceScatter(state) if eagerly else state),  # type: ignore[misc]
            kind,
            text,
        )
    check_pool()


@distributed(2, 3)
def test_other_arguments_that_one_rank_is_refused_are_an_error_on_all(world_size: int) -> None:
    odd, twins = world_size - 1, Twins()
    groups = [dist.new_group([rank]) for rank in range(world_size)]
    alone = DistributedDataParallel(twins.module, process_group=groups[dist.get_rank()])
    for arguments, text in (
        ({"reduce_dtype": torch.int32}, "reduce_dtype must be a floating-point type, got torch.int32"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype must be a floating-point type, got bf16"),
        ({"ddp": alone}, "the optimizer is on ranks .*, but DDP is on ranks"),
    ):
        mine: Any = arguments if dist.get_rank() == odd else {}
        expect_failure_of([odd], lambda mine=mine: ReduceScatter(twins.zeros, **mine), ValueError, text)  # type: ignore[misc]
    check_pool()


@distributed(2, 3)
def test_an_overlap_hook_on_one_rank_and_the_reduce_scatter_hook_elsewhere_are_an_error(world_size: int) -> None:
    twins = Twins({"overlap_with_ddp": True})

    def register() -> None:
        if dist.get_rank() == 0:
            hook_with_zero_step(allreduce_hook, twins.ddp, twins.zeros[0])
        else:
            twins.register(twins.zeros[0])

    error = failure_of(register)
    expect(error, RanksDisagreeError, "rank 0: making an overlap hook; rank 1: constructing ReduceScatter")
    check_pool()


# The overlap hooks


@pytest.mark.parametrize("make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
@distributed(2, 3)
def test_overlap_hooks_with_different_arguments_are_an_error(world_size: int, make_hook: Callable[..., Any]) -> None:
    odd = world_size - 1
    here = dist.get_rank() == odd
    twins = Twins({"overlap_with_ddp": True})
    for hook, number, text, odd_text in (
        (fp16_compress_hook, 0, "hook: .*allreduce_hook", "hook: .*fp16_compress_hook"),
        (allreduce_hook, 1, "optimizer 0: SGD", "optimizer 0: SGD"),
    ):
        arguments = (hook, twins.ddp, twins.zeros[number]) if here else (allreduce_hook, twins.ddp, twins.zeros[0])
        expect_disagreement(odd, lambda arguments=arguments: make_hook(*arguments), text, odd_text)  # type: ignore[misc]
    expect_failure_of(
        [odd],
        lambda: make_hook(allreduce_hook, twins.ddp, twins.plain if here else twins.zeros[0]),
        TypeError,
        r"takes a onecopy\.ZeroRedundancyOptimizer",
    )
    for option in ("static_graph", "find_unused_parameters"):
        other = Twins({"overlap_with_ddp": True}, {option: here})
        expect_disagreement(
            odd,
            lambda other=other: make_hook(allreduce_hook, other.ddp, other.zeros[0]),  # type: ignore[misc]
            f"{option} of DDP: False",
            f"{option} of DDP: True",
        )
    check_pool()


@distributed(2)
def test_a_complex_parameter_is_refused_by_name(world_size: int) -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    ddp = DistributedDataParallel(Wave())
    zero = ZeroRedundancyOptimizer(ddp.named_parameters(), SGD, lr=0.1)
    expect(failure_of(lambda: ReduceScatter(zero, ddp=ddp)), ValueError, r"parameter 'module\.wave' is complex")
    overlapped = ZeroRedundancyOptimizer(ddp.named_parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    make_hook = lambda: hook_with_zero_step(allreduce_hook, ddp, overlapped)  # noqa: E731
    expect(failure_of(make_hook), ValueError, r"parameter 'module\.wave' is complex")


@distributed(2)
def test_an_interleaved_hook_on_one_rank_is_an_error(world_size: int) -> None:
    twins = Twins({"overlap_with_ddp": True})
    make_hook = hook_with_zero_step_interleaved if dist.get_rank() == 1 else hook_with_zero_step
    expect_disagreement(
        1, lambda: make_hook(allreduce_hook, twins.ddp, twins.zeros[0]), "interleaved: False", "interleaved: True"
    )
    check_pool()
