"""A step that fails on one rank, and ranks at different calls: an error on every rank, soon."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from onecopy import PeerFailedError, RanksDisagreeError, ZeroRedundancyOptimizer
from tests.support.both import tensors_of
from tests.support.failures import (
    check_pool,
    expect,
    expect_disagreement,
    expect_failure_of,
    failure_of,
    parameter,
)
from tests.support.harness import distributed
from tests.support.state_dicts import expect_same
from tests.support.unchanged import VARIANTS, Training


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
    training = Training(Fragile)
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
    training = Training(Fragile)
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
@pytest.mark.parametrize("ours", VARIANTS, ids=["whole", "cut in buckets"])
def test_gradients_for_different_parameters_are_an_error_that_names_the_first(
    world_size: int, ours: dict[str, Any]
) -> None:
    training = Training(**ours)
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
    "grad_norm() or clip_grad_norm_()": lambda training: training.ours.clip_grad_norm_(1.0),
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
        for param, plain in zip(training.params, tensors_of(training.plain), strict=True):
            param.copy_(plain)
    training.ours.load_state_dict(training.plain.state_dict())
    training.train()


@distributed(2, 3)
def test_a_step_that_only_one_rank_gives_an_unknown_argument_is_an_error_on_all(world_size: int) -> None:
    training = Training()
    kwargs: dict[str, Any] = {"speed": 3} if dist.get_rank() == 0 else {}
    expect_failure_of([0], lambda: training.ours.step(**kwargs), TypeError, "speed")
    check_pool()


@distributed(2, 3)
def test_a_sparse_gradient_is_refused_by_the_name_of_a_cut_parameter_as_by_the_plain_class(world_size: int) -> None:
    embedding = nn.Embedding(64, 32, sparse=True)
    optimizer = ZeroRedundancyOptimizer(embedding.named_parameters(), AdamW, lr=0.1)
    assert optimizer.layout.cut_params == (0,)
    embedding(torch.tensor([1, 2])).sum().backward()
    expect(failure_of(optimizer.step), RuntimeError, "parameter 'weight' has a sparse gradient, which AdamW does not")
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
