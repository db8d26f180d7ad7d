"""Subgroups, backends per device, and messages of the user in the same group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.both import BUCKET_VIEWS, POLICIES, Tensors
from tests.support.harness import distributed


def values(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(60, 40), torch.randn(7), torch.randn(3, 3)]


@distributed(4)
@BUCKET_VIEWS
@POLICIES
def test_two_subgroups_train_side_by_side(world_size: int, shard_by: str, bucket_view: bool) -> None:
    members = [[1, 3], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = 0 if dist.get_rank() in members[0] else 1
    options: dict[str, Any] = {"shard_by": shard_by, "parameters_as_bucket_view": bucket_view}
    tensors = Tensors(values(seed=mine), process_group=groups[mine], **options)
    ours, rank = tensors.ours, dist.get_rank()
    assert (ours.world_size, ours.rank, ours.global_rank) == (2, members[mine].index(rank), rank)
    assert ours.process_group is ours.join_process_group is groups[mine]
    tensors.train(5)
    ours.consolidate_state_dict(to=1)
    if ours.rank == 1:
        assert rank in (2, 3)
        for index, state in ours.state_dict()["state"].items():
            assert torch.equal(state["exp_avg"], tensors.plain.state_dict()["state"][index]["exp_avg"])
    dist.barrier()


@distributed(3)
def test_a_group_with_a_backend_per_device(world_size: int) -> None:
    tensors = Tensors(values(), process_group=dist.new_group(backend="cpu:gloo"))
    tensors.train()
    assert tensors.ours.join_device == torch.device("cpu")
    dist.barrier()


@distributed(2, 3)
@BUCKET_VIEWS
def test_messages_that_a_user_has_in_flight_in_the_same_group_are_left_alone(
    world_size: int, bucket_view: bool
) -> None:
    tensors = Tensors(values(), parameters_as_bucket_view=bucket_view)
    arriving = [torch.zeros(5000) for _ in range(world_size)]
    others = [rank for rank in range(world_size) if rank != dist.get_rank()]
    works = [dist.irecv(arriving[rank], rank) for rank in others]
    tensors.train(1)
    tensors.ours.consolidate_state_dict()
    works += [dist.isend(torch.full((5000,), dist.get_rank() + 1.0), rank) for rank in others]
    for work in works:
        assert work is not None
        work.wait()
    for rank in others:
        assert torch.equal(arriving[rank], torch.full((5000,), rank + 1.0))
    tensors.train(1)
