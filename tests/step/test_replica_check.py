"""Parameters that differ between ranks: with ``check_replicas_every`` all ranks raise before the next step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

from onecopy import PeerFailedError, RanksDisagreeError
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.failures import expect, expect_disagreement, failure_of
from tests.support.guards import NAME, OURS, Training
from tests.support.harness import distributed
from tests.support.models import assert_replicas_equal, assert_same_tree, more_for_earlier_ranks, more_for_later_ranks

LEVELS = [level for level in OURS if level not in ("overlap hook", "level 1 master weights")]

DIFFERENT = f"parameter {NAME!r}: checksum"


def nudge(training: Training) -> None:
    """Change two elements by the smallest amount, in opposite directions."""
    memory = training.param.detach().view(torch.int32)
    memory[0, 0] += 1
    memory[3, 7] -= 1


def last_rank() -> int:
    return dist.get_world_size() - 1


def step_at(training: Training, step: int) -> Callable[[], object]:
    """A step after its backward pass, in which ranks wait for each other anyway."""
    training.backward(step)
    return lambda: training.step(step)


@pytest.mark.parametrize("level", LEVELS)
@distributed(2, 3)
def test_all_ranks_raise_before_the_step_in_which_it_is_due(world_size: int, level: str) -> None:
    training, plain = Training(level, check_replicas_every=3), Training(level)
    for each in (training, plain):
        each.iterate(0, 1, 2)
    assert_same_tree(training.values(), plain.values(), "after three steps")
    if dist.get_rank() == last_rank():
        nudge(training)
    expect_disagreement(last_rank(), step_at(training, 3), DIFFERENT, DIFFERENT)
    dist.broadcast(training.param.detach(), 0)
    for each in (training, plain):
        each.iterate(3, 4, 5)
    assert_same_tree(training.values(), plain.values(), "in the end")


@distributed(2)
def test_between_two_comparisons_the_owners_overwrite_a_difference(world_size: int) -> None:
    training = Training("level 1", check_replicas_every=3)
    training.iterate(0)
    if dist.get_rank() != training.owner:
        nudge(training)
    training.iterate(1)
    assert_replicas_equal(training.module.parameters())
    training.iterate(2, 3)


@pytest.mark.parametrize("level", ["level 1", "level 3", "level 3 overlap"])
@distributed(2)
def test_on_an_accelerator_too(world_size: int, level: str) -> None:
    with as_on_accelerators():
        training = Training(level, check_replicas_every=2)
        training.iterate(0, 1)
        if dist.get_rank() == 1:
            nudge(training)
        expect_disagreement(1, step_at(training, 2), DIFFERENT, DIFFERENT)


@distributed(2)
def test_with_an_overlap_hook_the_comparison_comes_after_the_update(world_size: int) -> None:
    training, plain = Training("overlap hook", check_replicas_every=1), Training("overlap hook")
    for each in (training, plain):
        each.iterate(*range(5))
    assert_same_tree(training.values(), plain.values(), "in the end")
    training.backward(5)
    if dist.get_rank() == 1:
        nudge(training)
    expect_disagreement(1, lambda: training.step(5), DIFFERENT, DIFFERENT)


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@distributed(2)
def test_ranks_without_inputs_take_part(world_size: int, counts: Callable[[int], int]) -> None:
    training = Training("level 1", check_replicas_every=1)
    with Join([training.model, training.zero]):
        training.iterate(*range(counts(dist.get_rank())))
    assert_replicas_equal(training.module.parameters())


@distributed(4)
def test_the_replicas_of_a_mesh_are_compared(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = Training("level 3", mesh, check_replicas_every=1)
    training.iterate(0, 1)
    if dist.get_rank() >= 2:  # a whole replica
        nudge(training)
    error = failure_of(step_at(training, 2))
    expect(error, RanksDisagreeError, f"between replicas of the mesh.*rank 0: {DIFFERENT}.*rank 1: {DIFFERENT}")
    dist.broadcast(training.param.detach(), 0)
    training.iterate(2)
    if dist.get_rank() == 3:
        nudge(training)
    error = failure_of(step_at(training, 3))
    expect(error, PeerFailedError if dist.get_rank() < 2 else RanksDisagreeError, DIFFERENT)
