"""The process group of the simulated accelerator behaves as NCCL does."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onecopy.common.torch_private import all_gather_single, reduce_scatter_single
from tests.accelerator import device
from tests.accelerator.harness import HYBRID, SIMCCL, simulated

LATE = 60.0


def rank_values(size: int) -> torch.Tensor:
    """Return 1, 2, 3, ... times one plus the rank."""
    return torch.arange(1.0, size + 1, device="sim") * (1 + dist.get_rank())


@pytest.mark.parametrize("host_ahead", [0, 5, "far"])
@simulated(2, 3)
def test_collectives_give_the_right_numbers(world_size: int, host_ahead: Any) -> None:
    rank, total = dist.get_rank(), sum(range(1, world_size + 1))
    ends = dist.new_group([0, world_size - 1])
    with device.simulate(host_ahead=host_ahead) as run:
        if rank in (0, world_size - 1):
            of_two = rank_values(2)
            dist.all_reduce(of_two, group=ends)
            assert of_two.tolist() == [1 + world_size, 2 + 2 * world_size]
        values, mean, most, sent = (rank_values(4) for _ in range(4))
        dist.all_reduce(values)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.broadcast(sent, src=1)
        gathered = torch.empty(2 * world_size, device="sim")
        all_gather_single(gathered, rank_values(2))
        part = torch.empty(2, device="sim")
        reduce_scatter_single(part, rank_values(2 * world_size))
        with run.step() as lists:
            uneven = [torch.empty(1 + r, device="sim") for r in range(world_size)]
            dist.all_gather(uneven, rank_values(1 + rank))
            even = [torch.empty(3, device="sim") for _ in range(world_size)]
            dist.all_gather(even, rank_values(3))
            own = torch.empty(1 + rank, device="sim")
            dist.reduce_scatter(own, [rank_values(1 + r) for r in range(world_size)], op=dist.ReduceOp.AVG)
        received = torch.empty(3, device="sim")
        if rank == 0:
            dist.send(rank_values(3), 1)
            dist.recv(received, 1)
        elif rank == 1:
            dist.recv(received, 0)
            dist.send(rank_values(3), 0)
        dist.barrier(device_ids=[rank])
        assert rank > 1 or received.tolist() == [(2 - rank) * i for i in (1, 2, 3)]
        assert values.tolist() == [total * i for i in (1, 2, 3, 4)]
        torch.testing.assert_close(mean.cpu(), torch.arange(1.0, 5) * total / world_size)
        assert most.tolist() == [world_size * i for i in (1, 2, 3, 4)]
        assert sent.tolist() == [2, 4, 6, 8]
        assert gathered.tolist() == [i * (1 + r) for r in range(world_size) for i in (1, 2)]
        assert part.tolist() == [total * (2 * rank + 1), total * (2 * rank + 2)]
        assert [u.tolist() for u in uneven] == [[i * (1 + r) for i in range(1, r + 2)] for r in range(world_size)]
        torch.testing.assert_close(own.cpu(), torch.arange(1.0, rank + 2) * total / world_size)
    assert run.reports == []
    # As NCCL would run them: one operation per part of a list with uneven parts.
    assert [(c.name, c.operations, c.size) for c in lists.collectives] == [
        ("all_gather", world_size, 4 * total),
        ("all_gather", 1, 12 * world_size),
        ("reduce_scatter", world_size, 4 * total),
    ]
    assert all(c.site.startswith("test_process_group.py:") for c in lists.collectives)
    assert lists.synchronizations == []


@simulated(2)
def test_waiting_makes_the_current_stream_wait_and_not_the_host(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        values = rank_values(5)
        with run.step() as step:
            work = dist.all_reduce(values, async_op=True)
            assert not work.is_completed()
            work.wait()
            assert not work.is_completed()
            values.mul_(2)
            future = dist.all_reduce(rank_values(5), async_op=True).get_future()
            result = future.then(lambda done: done.value()[0] * 10).wait()
        assert step.synchronizations == []
        assert values[0].item() == 6
        assert work.is_completed()
        assert result[0].item() == 30
    assert run.reports == []
    with device.simulate(host_ahead="far", idle=LATE) as run:
        work = dist.all_reduce(values, async_op=True)
        values.mul_(2)  # nobody has waited
        torch.accelerator.synchronize()
        address = values.data_ptr()
        del values
        assert torch.full((5,), 5.0, device="sim").data_ptr() != address, "a tensor lives until a stream has waited"
        del work
    assert {report.kind for report in run.reports} == {"race"}
    with device.simulate(host_ahead="far", idle=LATE) as run:
        with torch.Stream("sim"):
            values = rank_values(5)
        dist.all_reduce(values)  # it waits for the stream that launches it only
        torch.accelerator.synchronize()
    assert "race" in {report.kind for report in run.reports}


@simulated(2)
def test_ranks_in_different_collectives_fail(world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    with device.simulate() as run:
        size = 3 + dist.get_rank()
        dist.all_reduce(torch.ones(size, device="sim"), group=group)
        with pytest.raises(RuntimeError, match="the ranks are in different collectives"):
            torch.accelerator.synchronize()
    assert {report.kind for report in run.reports} == {"collective order"}


@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@simulated(2)
def test_tensors_of_the_cpu_and_strided_tensors_are_refused(world_size: int, backend: str) -> None:
    values = torch.ones(2)
    if backend == HYBRID:
        dist.all_reduce(values)
        assert values.tolist() == [2, 2]
    else:
        with pytest.raises(RuntimeError, match="cpu"):
            dist.all_reduce(values)
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="sim")[:, :2])
