"""A failure on one rank while ``ShardedDataParallel`` is made or steps: all ranks raise soon, in all replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onecopy import MixedPrecision, PeerFailedError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.data_parallel import bucket
from tests.support.data_parallel import Layers, Side, inputs_of
from tests.support.failures import NO_MEMORY, expect, expect_no_memory, failing, failure_of
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal

CAST = MixedPrecision(param_dtype=torch.bfloat16)


class Made:
    """A module with a frozen parameter, and two optimizers over the rest."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.module = Layers()
        self.module.first.bias.requires_grad_(False)
        self.params = list(self.module.parameters())
        parts = [[each for each in self.params if each.requires_grad][part::2] for part in range(2)]
        self.zeros = [ZeroRedundancyOptimizer(part, torch.optim.Adam, lr=0.1) for part in parts]

    def wrap(self, **options: Any) -> ShardedDataParallel:
        return ShardedDataParallel(self.module, self.zeros, bucket_bytes=1, **options)

    def train(self) -> None:
        """Two steps of the optimizers with gradients that all ranks have alike."""
        for _ in range(2):
            for zero in self.zeros:
                for param in zero.param_groups[0]["params"]:
                    param.grad = torch.ones_like(param)
                zero.step()


def train_wrapped(model: ShardedDataParallel, made: Made) -> None:
    model(inputs_of(dist.get_rank(), 0)).square().mean().backward()
    for zero in made.zeros:
        zero.step()


@distributed(2, 3)
@pytest.mark.parametrize("mixed", [None, CAST], ids=["float32", "mixed"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_without_memory_for_buckets(
    world_size: int, mixed: MixedPrecision | None, calls: int, culprit: int
) -> None:
    made, reference = Made(), Made()
    values = [param.detach().clone() for param in made.params]
    with failing(bucket, "_flat_bucket", culprit, calls):
        expect_no_memory(culprit, lambda: made.wrap(mixed_precision=mixed))
    assert_equal(made.params, values, "values")
    assert {param.dtype for param in made.params} == {torch.float32}
    assert all(zero.wait_for_transfers is None for zero in made.zeros)
    # Either the optimizers go on as if nothing had happened ...
    made.train()
    reference.train()
    assert_equal(made.params, reference.params, "after steps without the wrapper")
    # ... or the module is wrapped after all.
    again, other = Made(), Made()
    with failing(bucket, "_flat_bucket", culprit, calls):
        failure_of(lambda: again.wrap(mixed_precision=mixed))
    for each in (again, other):
        train_wrapped(each.wrap(mixed_precision=mixed), each)
    assert_equal(again.params, other.params, "after a step with the wrapper")
    assert_replicas_equal(again.params)


# Replicas


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@distributed(4)
@pytest.mark.parametrize("culprit", [0, 3])
def test_a_mistake_on_one_rank_is_told_to_all_replicas(world_size: int, culprit: int) -> None:
    mesh = mesh_of_two()
    module = Layers()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=mesh.get_group(1), lr=0.1)
    for bad, text in (
        ({"mixed_precision": 3}, "mixed_precision must be"),
        ({"optimizer": [zero, 3]}, "optimizer must"),
    ):
        mine: Any = {"optimizer": zero, **(bad if dist.get_rank() == culprit else {})}
        error = failure_of(lambda mine=mine: ShardedDataParallel(module, mesh=mesh, **mine))  # type: ignore[misc]
        if dist.get_rank() == culprit:
            expect(error, TypeError, text)
        else:
            expect(error, PeerFailedError, f"constructing ShardedDataParallel failed on .*TypeError: {text}")
    model = ShardedDataParallel(module, zero, mesh=mesh)
    model(inputs_of(dist.get_rank(), 0)).square().mean().backward()
    zero.step()
    assert_replicas_equal(list(module.parameters()))


@distributed(4)
def test_a_rank_without_memory_is_told_to_all_replicas(world_size: int) -> None:
    mesh = mesh_of_two()
    module = Layers()
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=mesh.get_group(1), lr=0.1)
    with failing(bucket, "_flat_bucket", 2):
        error = failure_of(lambda: ShardedDataParallel(module, zero, mesh=mesh))
    expect(error, MemoryError if dist.get_rank() == 2 else PeerFailedError, NO_MEMORY)
    model = ShardedDataParallel(module, zero, mesh=mesh)
    model(inputs_of(dist.get_rank(), 0)).square().mean().backward()
    zero.step()
    assert_replicas_equal(list(module.parameters()))


@distributed(4)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_early_in_one_replica_fails_in_all(world_size: int, overlap: bool) -> None:
    mesh = mesh_of_two()
    ours = Side(True, Layers, group=mesh.get_group(1), mesh=mesh, overlap_forward=overlap)
    ours.model(inputs_of(dist.get_rank(), 0)).square().mean().backward()
    if dist.get_rank() == 3:
        ours.params[0].grad = torch.zeros_like(ours.params[0])
    error = failure_of(ours.optimizer.step)
    kinds = {2: (PeerFailedError, "was not reduced"), 3: (RuntimeError, "was not reduced")}
    expect(error, *kinds.get(dist.get_rank(), (PeerFailedError, "failed in another replica")))


@distributed(2, 3)
def test_buffers_of_every_kind_begin_as_those_of_the_first_rank(world_size: int) -> None:
    def make(first: bool) -> Layers:
        module = Layers()
        scale = 1.0 if first else 7.0
        module.register_buffer("rows", torch.arange(12.0).view(3, 4).t() * scale)
        module.register_buffer("some", torch.arange(12.0).view(3, 4)[:, ::2] * scale)
        module.register_buffer("part", (torch.arange(24.0) * scale).view(3, 8)[:, ::2])
        module.register_buffer("flags", torch.tensor([first, True]))
        module.register_buffer("count", torch.tensor(3 if first else 4))
        module.register_buffer("nothing", torch.zeros(0))
        return module

    module, expected = make(dist.get_rank() == 0), make(True)
    zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    ShardedDataParallel(module, zero)
    for found, wanted in zip(module.buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
