"""Updates inside the backward pass with saved state, groups added later, uneven inputs and subgroups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)

from onecopy import ZeroRedundancyOptimizer
from tests.support.ddp_training import ELEMENT, assert_same_state, assert_same_values, tolerance_of, train_both
from tests.support.failures import expect_failure_of
from tests.support.harness import distributed
from tests.support.logs import logged
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_model,
)
from tests.support.overlapped_step import (
    COUNTING,
    HOOKS,
    UNEVEN,
    Case,
    MakeHook,
    Run,
    assert_parity,
    overlapped_run,
    plain_run,
)

pytestmark = pytest.mark.usefixtures("fresh_processes")


# State


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4], ids=["at once", "before updates move", "after updates moved"])
@distributed(2, 3)
def test_a_saved_run_goes_on_as_if_it_had_never_stopped(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    case = Case(optimizer=torch.optim.AdamW, options={"lr": 1e-2}, ours=ELEMENT)
    first, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(first, reference, range(iterations))
    saved: list[Any] = [None]
    first.zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = [first.zero.state_dict()]
        assert_same_tree(saved[0], reference.optimizer.state_dict(), "saved", tolerance_of(case))
    dist.broadcast_object_list(saved, src=0)
    second = overlapped_run(case, make_hook)
    second.ddp.module.load_state_dict(first.ddp.module.state_dict())
    second.optimizer.load_state_dict(saved[0])
    for step in range(iterations, iterations + 5):
        first.iterate(step)
        second.iterate(step)
        reference.iterate(step)
        assert_same_values(first, reference, f"iteration {step} of the run that went on")
        # Two ranks give the same bits; with more, the order of additions follows DDP's regrouping of its buckets.
        assert_equal(second.params, first.params, f"iteration {step} of the resumed run", tolerance_of(case))
    assert_same_state(second, reference)


@HOOKS
@distributed(2)
def test_an_older_state_can_be_loaded_while_updates_happen_in_backward(world_size: int, make_hook: MakeHook) -> None:
    case = Case(ours=ELEMENT, scheduler=None)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(1))
    older = reference.optimizer.state_dict()
    older = torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, older)
    older["param_groups"][0]["lr"] = 0.02
    train_both(ours, reference, range(1, 5))
    for run in (ours, reference):
        run.optimizer.load_state_dict(older)
    train_both(ours, reference, range(5, 8))
    assert ours.updated_in_backward[-1]
    assert ours.optimizer.param_groups[0]["lr"] == 0.02
    assert_same_state(ours, reference)


@HOOKS
@distributed(2)
def test_state_after_a_backward_pass_without_step_is_the_new_one(world_size: int, make_hook: MakeHook) -> None:
    case = Case()
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(3))
    ours.zero.consolidate_state_dict(to=0)
    ours.backward(3)
    reference.iterate(3)
    with pytest.raises(RuntimeError, match="has changed since it was gathered"):
        ours.optimizer.state_dict()
    assert_same_state(ours, reference)


# Groups and parameters that come later


def first_layer(model: nn.Module) -> Iterable[Any]:
    return model.get_submodule("0").parameters()


@HOOKS
@pytest.mark.parametrize("iterations", [0, 1, 4])
@distributed(2, 3)
def test_a_group_can_be_added_after_registration(world_size: int, iterations: int, make_hook: MakeHook) -> None:
    case = Case(params=first_layer, ours=ELEMENT)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(iterations))
    for run in (ours, reference):
        run.optimizer.add_param_group({"params": list(run.ddp.module.get_submodule("2").parameters()), "lr": 0.05})
    train_both(ours, reference, range(iterations, iterations + 5))
    assert ours.updated_in_backward[-1]
    assert_same_state(ours, reference)


class WithExtra(nn.Module):
    """A model with a parameter that DDP does not see, because it is frozen when DDP is made."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.extra = nn.Parameter(torch.ones(50), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs


@HOOKS
@pytest.mark.parametrize("trainable", [True, False], ids=["unfrozen", "frozen with a gradient"])
@distributed(2, 3)
def test_a_parameter_in_no_bucket_is_updated_by_step(world_size: int, trainable: bool, make_hook: MakeHook) -> None:
    case = Case(**COUNTING, model=WithExtra)
    ours, reference = overlapped_run(case, make_hook), plain_run(case)
    train_both(ours, reference, range(1))
    for run in (ours, reference):
        extra = run.ddp.module.get_parameter("extra")
        extra.requires_grad_(trainable)
    for step in range(1, 6):
        for run in (ours, reference):
            run.backward(step)
            extra = run.ddp.module.get_parameter("extra")
            extra.grad = torch.full_like(extra, 0.1 * step)
            before = extra.detach().clone()
            run.optimizer.step()
            assert not torch.equal(extra, before)
        assert_same_values(ours, reference, f"iteration {step}")
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


def change_option(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def change_gradient(run: Run) -> None:
    gradient = run.params[-1].grad
    assert gradient is not None
    gradient.mul_(0.5)


@HOOKS
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (change_option, RuntimeError, "options in param_groups were changed"),
        (change_gradient, RuntimeError, r"the gradient of parameter .* was changed"),
    ],
    ids=["option", "gradient"],
)
@distributed(2, 3)
def test_a_change_on_one_rank_before_a_step_that_communicates_is_an_error_on_all(
    world_size: int, change: Callable[[Run], None], kind: type[Exception], text: str, make_hook: MakeHook
) -> None:
    ours = overlapped_run(Case(model=WithExtra, params=nn.Module.named_parameters), make_hook)
    extra = ours.ddp.module.get_parameter("extra")
    for step in range(4):
        ours.backward(step)
        extra.grad = torch.ones_like(extra)
        if step < 3:
            ours.optimizer.step()
    assert ours.updated_in_backward[-1]
    zero = ours.optimizer
    assert isinstance(zero, ZeroRedundancyOptimizer)
    culprit = next(shard.owner for shard in zero.layout.shards if zero.layout.params[shard.param].name == "extra")
    if dist.get_rank() == culprit:
        change(ours)
    expect_failure_of([culprit], zero.step, kind, text)


# Construction and logging


@HOOKS
@distributed(2)
def test_parameters_as_bucket_views_are_ignored_and_that_is_logged(world_size: int, make_hook: MakeHook) -> None:
    with logged(logging.WARNING) as messages:
        case = Case(ours={"parameters_as_bucket_view": True})
        ours = overlapped_run(case, make_hook)
    assert len(messages) == 1
    assert "parameters_as_bucket_view=True is ignored" in messages[0]
    pointers = [param.data_ptr() for param in ours.params]
    assert_parity(case, ours, plain_run(case))
    assert [param.data_ptr() for param in ours.params] == pointers


# Process groups


@HOOKS
@pytest.mark.parametrize("case", [Case(ours=ELEMENT), Case(**UNEVEN)], ids=["cut", "unused parameters"])
@distributed(4)
def test_a_subgroup_whose_ranks_are_numbered_otherwise_equals_plain_ddp(
    world_size: int, case: Case, make_hook: MakeHook
) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    assert isinstance(group, dist.ProcessGroup)
    ours = overlapped_run(case, make_hook, allreduce_hook, group, process_group=group)
    reference = plain_run(case, process_group=group)
    for step in range(5):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}")
    assert ours.updated_in_backward == [False, False, True, True, True]
    zero = ours.zero
    assert zero.rank == {1: 0, 3: 1}[dist.get_rank()]
    zero.consolidate_state_dict(to=1)
    if zero.rank == 1:
        assert_same_tree(zero.state_dict(), reference.optimizer.state_dict(), "state")
