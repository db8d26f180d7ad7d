"""Mistakes with streams, events and memory are reported, and give wrong numbers; correct programs are not reported."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.harness import simulated
from tests.accelerator.races import Races, runs

LATE = 60.0
"""Seconds that the device does not work on its own, so that work runs as late as it can."""

AHEAD = pytest.mark.parametrize("host_ahead", [0, 7, "far"])


def kinds(run: device.Run) -> set[str]:
    return {report.kind for report in run.reports}


@AHEAD
@simulated(1)
def test_a_missing_wait_for_another_stream_is_a_race(world_size: int, host_ahead: Any) -> None:
    with device.simulate(host_ahead=host_ahead) as run:
        values, side = torch.zeros(1000, device="sim"), torch.Stream("sim")
        with side:
            values.add_(1)
    assert kinds(run) == {"race"}
    (report,) = run.reports
    assert "add" in report.text
    assert "zero_" in report.text
    assert report.text.count("test_races.py:") == 2


@simulated(1)
def test_a_missing_wait_gives_wrong_numbers_when_the_host_runs_ahead(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE):
        values, side = torch.zeros(10, device="sim"), torch.Stream("sim")
        torch.accelerator.synchronize()
        with side:
            values.add_(1)
        assert values.sum().item() == 0
        side.synchronize()
        assert values.sum().item() == 10


@AHEAD
@pytest.mark.parametrize("seed", [0, 1, 2])
@simulated(1)
def test_waits_for_streams_and_events_are_enough(world_size: int, host_ahead: Any, seed: int) -> None:
    with device.simulate(seed=seed, host_ahead=host_ahead) as run:
        values, side, event = torch.zeros(1000, device="sim"), torch.Stream("sim"), torch.Event("sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            values.add_(1)
            event.record()
            torch.ones(10, device="sim").mul_(2)
        torch.accelerator.current_stream().wait_event(event)
        values.mul_(3)
        assert values.sum().item() == 3000
    assert run.reports == []


@simulated(1)
def test_an_event_orders_only_the_work_before_it(world_size: int) -> None:
    with device.simulate() as run:
        early, late, side, event = (
            torch.zeros(10, device="sim"), torch.zeros(10, device="sim"), torch.Stream("sim"), torch.Event("sim")
        )  # fmt: skip
        torch.accelerator.synchronize()
        with side:
            early.add_(1)
            event.record()
            late.add_(1)
        torch.accelerator.current_stream().wait_event(event)
        early.add_(1)
        late.add_(1)
    assert [report.kind for report in run.reports] == ["race"]


@simulated(1)
def test_a_host_that_saw_an_event_done_orders_what_it_queues(world_size: int) -> None:
    with device.simulate(idle=0.01) as run:
        values, side, event = torch.zeros(10, device="sim"), torch.Stream("sim"), torch.Event("sim")
        torch.accelerator.synchronize()
        with side:
            values.add_(1)
            event.record()
        limit = time.monotonic() + 20
        while not event.query():
            assert time.monotonic() < limit, "the idle device did not work"
            time.sleep(0.005)
        values.add_(1)
    assert run.reports == []


def freed_in_flight(recorded: bool) -> float:
    """Read a tensor on a side stream, free it, and let the current stream reuse its memory."""
    side = torch.Stream("sim")
    values = torch.ones(4096, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = values.sum()
    if recorded:
        values.record_stream(side)
    del values
    other = torch.full((4096,), 7.0, device="sim")
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    del other
    return total.item()


@simulated(1)
def test_memory_reused_while_another_stream_reads_it_is_a_use_after_free(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        assert freed_in_flight(recorded=False) != 4096
    assert kinds(run) == {"use after free"}


@pytest.mark.parametrize("waits", [False, True])
@simulated(1)
def test_freed_memory_may_go_to_any_tensor_that_is_allocated_next(world_size: int, waits: bool) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        side = torch.Stream("sim")
        values = torch.ones(4096, device="sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            total = values.sum()
        del values
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        torch.ones(1, device="sim")  # of another size: this allocator would not take that memory
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        assert (total.item() == 4096) == waits
    assert kinds(run) == (set() if waits else {"use after free"})


@AHEAD
@simulated(1)
def test_record_stream_keeps_memory_until_the_stream_is_done(world_size: int, host_ahead: Any) -> None:
    with device.simulate(host_ahead=host_ahead, idle=LATE) as run:
        assert freed_in_flight(recorded=True) == 4096
        # The stream is done now: the memory may be reused, and that is no mistake.
        before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
        torch.full((4096,), 7.0, device="sim").add_(1)
        assert torch.sim.memory_allocated() == before  # type: ignore[attr-defined]
    assert run.reports == []


@simulated(1)
def test_memory_is_reused_on_the_stream_that_it_was_allocated_on(world_size: int) -> None:
    with device.simulate() as run:
        first = torch.ones(4096, device="sim")
        address = first.data_ptr()
        first.mul_(2)
        del first
        with torch.Stream("sim"):
            elsewhere = torch.empty(4096, device="sim")
        again = torch.empty(4096, device="sim")
        assert elsewhere.data_ptr() != address
        assert again.data_ptr() == address
        again.fill_(1)
    assert run.reports == []


@simulated(1)
def test_reads_of_unwritten_memory_are_reported_and_give_nan(world_size: int) -> None:
    with device.simulate() as run:
        values = torch.empty(100, device="sim")
        values[:50] = 1
        assert values[:50].sum().item() == 50
        assert values.sum().isnan().item()
    assert {str(report).partition("[")[0] for report in run.reports} == {"unwritten: sum"}


@simulated(1)
def test_freed_memory_holds_no_old_numbers(world_size: int) -> None:
    with device.simulate() as run:
        values = torch.ones(100, device="sim")
        del values
        assert torch.empty(100, device="sim").sum().isnan().item()
    assert kinds(run) == {"unwritten"}


@simulated(1)
def test_pinned_memory_is_read_when_the_copy_runs(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        host = torch.ones(10).pin_memory()
        values = host.to("sim", non_blocking=True)
        host.fill_(5)
        assert values.sum().item() == 50
    assert kinds(run) == {"pinned source"}


@simulated(1)
def test_pinned_memory_is_written_when_the_copy_runs(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        values = torch.ones(10, device="sim")
        host = torch.zeros(10).pin_memory()
        host.copy_(values, non_blocking=True)
        assert host.isnan().all()
        torch.accelerator.current_stream().synchronize()
        assert host.sum() == 10
    assert run.reports == []


@simulated(1)
def test_columns_of_one_matrix_may_be_written_by_two_streams(world_size: int) -> None:
    with device.simulate() as run:
        matrix, side = torch.zeros(8, 8, device="sim"), torch.Stream("sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            matrix[:, 4:].add_(1)
        matrix[:, :4].add_(1)
    assert run.reports == []
    with device.simulate() as run:
        torch.accelerator.synchronize()
        with side:
            matrix[:, 3:].add_(1)
        matrix[:, :4].add_(1)
    assert kinds(run) == {"race"}


def test_the_ranges_of_strided_tensors() -> None:
    assert runs(2, (3,), (1,), 4) == [(8, 20)]
    assert runs(0, (2, 3), (3, 1), 4) == [(0, 24)]
    assert runs(0, (3, 2), (1, 3), 4) == [(0, 24)]
    assert runs(1, (2, 2), (4, 1), 2) == [(2, 6), (10, 14)]
    assert runs(0, (5, 3), (0, 1), 1) == [(0, 3)]
    assert runs(0, (4, 0), (1, 1), 1) == []
    assert runs(0, (), (), 8) == [(0, 8)]
    assert runs(0, (100, 100), (300, 2), 1) == [(0, 99 * 300 + 99 * 2 + 1)]


def test_clocks_know_what_is_ordered() -> None:
    races = Races()
    races.allocate(1000, 64, 0)
    races.access(0, "write", [], [(1000, [(0, 64)])])
    races.access(1, "read", [(1000, [(0, 32)])], [])
    assert [report.kind for report in races.reports] == ["race"]
    races.reports.clear()
    races.merge(races.clock(2), races.clock(0))
    races.access(2, "ordered read", [(1000, [(0, 64)])], [])
    assert races.reports == {}
    races.access(2, "write over", [], [(1000, [(0, 16)])])
    assert [report.text for report in races.reports] == [
        "write over is not ordered after read, which reads the same memory"
    ]
