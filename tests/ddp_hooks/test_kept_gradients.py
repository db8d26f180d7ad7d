"""Gradients that are kept, zeroed or added to under DDP with the reduce-scatter hook: always those of plain DDP."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from onecopy import RanksDisagreeError
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.ddp_training import (
    BRANCHING,
    ROUNDING,
    STATIC,
    TINY,
    Branching,
    Case,
    Part,
    Run,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    vectors,
)
from tests.support.failures import failure_of
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal, small_inputs

Backward = Callable[[Run, int], None]
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def whole_branching_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step), True).square().mean()
    return loss


def set_to_none(run: Run, step: int) -> None:
    run.ddp.zero_grad()
    run.loss(step).backward()


def set_to_zero(run: Run, step: int) -> None:
    run.ddp.zero_grad(set_to_none=False)
    run.loss(step).backward()


def keep(run: Run, step: int) -> None:
    run.loss(step).backward()


def first_without_sync(run: Run, step: int) -> None:
    """Some of these passes add to gradients that are None, some to zeros, some to gradients that a step has used."""
    if step % 3 < 2:
        run.ddp.zero_grad(set_to_none=step % 3 == 0)
    if step:  # a static graph is found in the first pass
        with run.ddp.no_sync():
            run.loss(100 + 2 * step).backward()
    run.loss(step).backward()


GRAPHS: dict[str, dict[str, Any]] = {
    "all used": {},
    "unused parameters": BRANCHING,
    "static graph": {"model": Branching, "loss": whole_branching_loss, "ddp": STATIC},
}

MODES = [
    pytest.param(view, graph, backward, id=f"{'views' if view else 'copies'}, {graph}, {backward.__name__}")
    for view, graph, backward in itertools.product(
        (False, True), GRAPHS, (set_to_none, set_to_zero, keep, first_without_sync)
    )
]


def case_of(view: bool, graph: str, *parts: Part) -> Case:
    options = GRAPHS[graph]
    ddp = {"bucket_cap_mb": TINY, **options.get("ddp", {}), "gradient_as_bucket_view": view}
    return Case("", parts or (Part(),), **{**options, "ddp": ddp})


def compare_gradients(ours: Run, reference: Run, tolerance: float, what: str) -> None:
    """Every gradient exists where plain DDP has one, and has its values in the range that this rank owns."""
    owned = {id(entry.param): entry.shard for zero in ours.zeros for entry in zero.engine.inner.owned}
    for param, plain in zip(ours.params, reference.params, strict=True):
        assert (param.grad is None) == (plain.grad is None), what
        if plain.grad is not None:
            assert isinstance(param.grad, ShardGrad)
            shard = owned.get(id(param))
            expected = plain.grad.flatten()[shard.start : shard.stop] if shard else plain.grad.flatten()[:0]
            assert_equal([param.grad.local], [expected], what, tolerance)


def both(case: Case) -> tuple[Run, Run]:
    return scattered_run(case), plain_run(case)


@pytest.mark.parametrize(("view", "graph", "backward"), MODES)
@distributed(2, 3)
def test_gradients_and_parameters_equal_plain_ddp(world_size: int, view: bool, graph: str, backward: Backward) -> None:
    ours, reference = both(case_of(view, graph))
    tolerance = 0.0 if world_size == 2 and backward in (set_to_none, set_to_zero) else ROUNDING
    for step in range(7):
        for run in (reference, ours):
            backward(run, step)
        compare_gradients(ours, reference, tolerance, f"gradients of step {step}")
        for run in (reference, ours):
            run.update()
        assert_equal(ours.params, reference.params, f"step {step}", tolerance)
    assert_replicas_equal(ours.params)


@VIEWS
@pytest.mark.parametrize("graph", ["all used", "unused parameters"])
@distributed(2, 3)
def test_two_optimizers_stepped_in_turn_keep_each_others_gradients(world_size: int, graph: str, view: bool) -> None:
    """Each zeroes its own gradients only, so that those of the other one are kept for a pass."""
    parts = [Part(torch.optim.SGD, {"lr": 0.1}, {"shard_by": "parameter"}, each) for each in (matrices, vectors)]
    ours, reference = both(case_of(view, graph, *parts))
    for step in range(8):
        for run in (reference, ours):
            run.optimizers[step % 2].zero_grad()
            run.loss(step).backward()
        compare_gradients(ours, reference, ROUNDING, f"gradients of step {step}")
        for run in (reference, ours):
            run.optimizers[step % 2].step()
        assert_equal(ours.params, reference.params, f"step {step}", ROUNDING)


@VIEWS
@distributed(2, 3)
def test_a_gradient_that_is_kept_while_its_parameter_is_frozen_is_not_averaged_again(
    world_size: int, view: bool
) -> None:
    ours, reference = both(case_of(view, "unused parameters"))
    for run in (reference, ours):
        keep(run, 0)
        run.ddp.module.get_submodule("middle").requires_grad_(False)
    for step in range(1, 4):
        for run in (reference, ours):
            for param in run.params:
                param.grad = None if param.requires_grad else param.grad
            keep(run, step)
            run.update()
        assert_equal(ours.params, reference.params, f"step {step}", ROUNDING)


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


@distributed(2, 3)
def test_a_hook_that_is_registered_late_scales_kept_gradients_as_with_plain_ddp(world_size: int) -> None:
    ours, reference = both(case_of(False, "all used"))
    for step in range(4):
        for run in (reference, ours):
            keep(run, step)
            run.update()
            if step == 0:
                for param in run.params:
                    param.register_post_accumulate_grad_hook(halve)
        compare_gradients(ours, reference, ROUNDING, f"gradients of step {step}")
        assert_equal(ours.params, reference.params, f"step {step}", ROUNDING)


@distributed(2)
def test_a_gradient_that_one_rank_alone_keeps_is_no_error(world_size: int) -> None:
    """The other rank has zeroed it: the mean of the pass is added to what each owner has kept."""
    ours = scattered_run(case_of(True, "unused parameters"))
    ours.iterate(0)
    if dist.get_rank() == 0:
        ours.ddp.zero_grad()
    ours.loss(2).backward()  # all parameters are used on some rank
    ours.update()
    assert_replicas_equal(ours.params)


def clip_with_torch(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.params, 1.0)


def take_a_norm(run: Run) -> None:
    run.zero.grad_norm()


@pytest.mark.parametrize("use", [Run.update, take_a_norm, clip_with_torch])
@distributed(2)
def test_reduced_gradients_to_which_a_pass_without_sync_has_added_are_refused(
    world_size: int, use: Callable[[Run], None]
) -> None:
    ours = scattered_run(Case())
    ours.iterate(0)
    with ours.ddp.no_sync():
        ours.loss(1).backward()
    with pytest.raises(RuntimeError, match=r"was not reduced: the last backward pass ran under no_sync\(\)"):
        use(ours)
    ours.loss(2).backward()
    ours.update()
    assert_replicas_equal(ours.params)


READS: dict[str, Callable[[Tensor], object]] = {
    "a sum": torch.sum,
    "a copy": lambda gradient: torch.empty_like(torch.zeros(gradient.shape)).copy_(gradient),
    "an addition": lambda gradient: gradient.add_(1.0),
    "a mask": lambda gradient: gradient.mul_(torch.ones(gradient.shape)),
    "a view": torch.flatten,
}


@distributed(2)
def test_what_needs_the_values_of_other_ranks_is_an_error(world_size: int) -> None:
    ours = scattered_run(Case())
    for step in range(4):
        ours.iterate(step)
    gradient = ours.params[0].grad
    assert gradient is not None
    for read in READS.values():
        with pytest.raises(RuntimeError, match=r"only this rank's range of it is here \(param.grad.local\)"):
            read(gradient)


@pytest.mark.parametrize("use", ["norm", "scaler"])
@distributed(2)
def test_ranks_without_inputs_are_missed_by_a_norm_and_a_scaler(world_size: int, use: str) -> None:
    """They take no norm and unscale nothing: all ranks raise, instead of waiting for each other."""
    ours, scaler = scattered_run(Case()), make_scaler()

    def train() -> None:
        with Join([ours.ddp, *ours.zeros]):
            for step in range(1 + 2 * dist.get_rank()):
                ours.zero.zero_grad()
                loss = ours.loss(step)
                (scaler.scale(loss) if use == "scaler" else loss).backward()
                if step:
                    torch.nn.utils.clip_grad_norm_(ours.params, 1.0) if use == "norm" else scaler.unscale_(ours.zero)
                ours.update()

    assert isinstance(failure_of(train), RanksDisagreeError)
