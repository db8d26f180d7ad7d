"""Subgroups, backends per device, messages of the user in the same group, and the log of shards."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.support.harness import distributed
from tests.support.parameter_storage import BOTH, POLICIES, Tensors, Twins


@distributed(4)
@BOTH
@POLICIES
def test_two_subgroups_train_side_by_side(world_size: int, shard_by: str, bucket_view: bool) -> None:
    members = [[1, 3], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = 0 if dist.get_rank() in members[0] else 1
    torch.manual_seed(20 + mine)
    tensors = Tensors(
        [torch.randn(60, 40), torch.randn(7), torch.randn(3, 3)],
        process_group=groups[mine],
        shard_by=shard_by,
        parameters_as_bucket_view=bucket_view,
    )
    ours = tensors.ours
    assert (ours.world_size, ours.rank, ours.global_rank) == (
        2,
        members[mine].index(dist.get_rank()),
        dist.get_rank(),
    )
    assert ours.process_group is ours.join_process_group is groups[mine]
    tensors.train(5)
    ours.consolidate_state_dict(to=1)
    if ours.rank == 1:
        assert dist.get_rank() in (2, 3)
        for index, state in ours.state_dict()["state"].items():
            assert torch.equal(state["exp_avg"], tensors.plain.state_dict()["state"][index]["exp_avg"])
    dist.barrier()


@distributed(3)
def test_a_subgroup_of_one_and_a_rank_without_an_optimizer(world_size: int) -> None:
    alone = dist.new_group([1])
    if dist.get_rank() == 1:
        tensors = Tensors([torch.randn(60, 40), torch.randn(3)], process_group=alone, shard_by="element")
        tensors.train()
        tensors.ours.consolidate_state_dict()
        assert len(tensors.ours.state_dict()["state"]) == 2
    dist.barrier()


@distributed(2)
def test_a_group_with_a_backend_per_device_works(world_size: int) -> None:
    group = dist.new_group(backend="cpu:gloo")
    tensors = Tensors([torch.randn(60, 40), torch.randn(7)], process_group=group)
    tensors.train()
    assert tensors.ours.join_device == torch.device("cpu")
    dist.barrier()


@distributed(2, 3)
@BOTH
def test_messages_that_a_user_has_in_flight_in_the_same_group_are_left_alone(
    world_size: int, bucket_view: bool
) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view)
    arriving = [torch.zeros(5000) for _ in range(world_size)]
    others = [rank for rank in range(world_size) if rank != dist.get_rank()]
    works = [dist.irecv(arriving[rank], rank) for rank in others]
    twins.train(1)
    twins.ours.consolidate_state_dict()
    works += [dist.isend(torch.full((5000,), dist.get_rank() + 1.0), rank) for rank in others]
    for work in works:
        assert work is not None
        work.wait()
    for rank, received in enumerate(arriving):
        expected = 0.0 if rank == dist.get_rank() else rank + 1.0
        assert torch.equal(received, torch.full((5000,), expected))
    twins.train(1)
