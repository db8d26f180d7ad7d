"""Mistakes with streams, events and memory are reported, and give wrong numbers; correct programs are not reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.harness import simulated
from tests.accelerator.races import Races, runs

LATE = 60.0
"""Seconds that the device does not work on its own, so that work runs as late as it can."""

PROGRAMS: dict[str, tuple[Callable[[], None], list[str]]] = {}
"""Small programs by name, each with the kinds of reports that it must give, whatever the order of running."""


def program(*kinds: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a program to the table."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        PROGRAMS[function.__name__] = function, sorted(kinds)
        return function

    return add


def side_and_zeros(size: int = 1000) -> tuple[torch.Stream, Tensor]:
    return torch.Stream("sim"), torch.zeros(size, device="sim")


@program("race")
def no_wait_for_another_stream() -> None:
    side, values = side_and_zeros()
    with side:
        values.add_(1)


@program()
def streams_and_events_are_waited_for() -> None:
    (side, values), event = side_and_zeros(), torch.Event("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        values.add_(1)
        event.record()
        torch.ones(10, device="sim").mul_(2)
    torch.accelerator.current_stream().wait_event(event)
    values.mul_(3)
    assert values.sum().item() == 3000


@program("race")
def work_after_the_event() -> None:
    (side, early), late, event = side_and_zeros(), torch.zeros(10, device="sim"), torch.Event("sim")
    torch.accelerator.synchronize()
    with side:
        early.add_(1)
        event.record()
        late.add_(1)
    torch.accelerator.current_stream().wait_event(event)
    early.add_(1)
    late.add_(1)


@program("race")
def columns_that_overlap() -> None:
    side, matrix = torch.Stream("sim"), torch.zeros(8, 8, device="sim")
    torch.accelerator.synchronize()
    with side:
        matrix[:, 3:].add_(1)
    matrix[:, :4].add_(1)


@program()
def columns_that_do_not_overlap() -> None:
    side, matrix = torch.Stream("sim"), torch.zeros(8, 8, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        matrix[:, 4:].add_(1)
    matrix[:, :4].add_(1)


def freed_in_flight(recorded: bool = False, waits: bool = False, size: int = 4096) -> Tensor:
    """Read a tensor on a side stream, free it, and allocate another one on the current stream."""
    side, values = torch.Stream("sim"), torch.ones(4096, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = values.sum()
    if recorded:
        values.record_stream(side)
    del values
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    torch.full((size,), 7.0, device="sim")
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    return total


@program("use after free")
def memory_is_reused_while_another_stream_reads_it() -> None:
    freed_in_flight()


@program("use after free")
def memory_may_go_to_a_tensor_of_another_size() -> None:
    freed_in_flight(size=1)  # this allocator would not take that memory


@program()
def the_current_stream_waits_before_memory_is_reused() -> None:
    assert freed_in_flight(waits=True).item() == 4096


@program()
def record_stream_keeps_memory_until_the_stream_is_done() -> None:
    assert freed_in_flight(recorded=True).item() == 4096
    # The stream is done now: the memory may be reused, and that is no mistake.
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
    torch.full((4096,), 7.0, device="sim").add_(1)
    assert torch.sim.memory_allocated() == before  # type: ignore[attr-defined]


@program()
def memory_is_reused_on_the_stream_that_it_was_allocated_on() -> None:
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


@program("unwritten")
def a_part_was_never_written() -> None:
    values = torch.empty(100, device="sim")
    values[:50] = 1
    assert values[:50].sum().item() == 50
    assert values.sum().isnan().item()


@program("unwritten")
def freed_memory_holds_no_old_numbers() -> None:
    values = torch.ones(100, device="sim")
    del values
    assert torch.empty(100, device="sim").sum().isnan().item()


@program()
def pinned_memory_is_read_after_its_copy() -> None:
    host = torch.zeros(10).pin_memory()
    host.copy_(torch.ones(10, device="sim"), non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert host.sum() == 10


@pytest.mark.parametrize("host_ahead", [0, 7, "far"])
@pytest.mark.parametrize("name", PROGRAMS)
@simulated(1)
def test_mistakes_and_only_mistakes_are_reported(world_size: int, name: str, host_ahead: Any) -> None:
    function, kinds = PROGRAMS[name]
    for seed in range(3):
        with device.simulate(seed, host_ahead, idle=LATE) as run:
            function()
        assert sorted({report.kind for report in run.reports}) == kinds, run.reports


@simulated(1)
def test_a_report_has_both_operators_with_their_lines(world_size: int) -> None:
    with device.simulate() as run:
        no_wait_for_another_stream()
    (report,) = run.reports
    assert "add" in report.text
    assert "zero_" in report.text
    assert report.text.count("test_races.py:") == 2


@simulated(1)
def test_mistakes_give_wrong_numbers_when_the_host_runs_ahead(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        side, values = side_and_zeros(10)
        torch.accelerator.synchronize()
        with side:
            values.add_(1)
        assert values.sum().item() == 0
        side.synchronize()
        assert values.sum().item() == 10
        assert freed_in_flight().item() != 4096
        host = torch.ones(10).pin_memory()
        on_device = host.to("sim", non_blocking=True)
        host.fill_(5)
        assert on_device.sum().item() == 50
        host.copy_(on_device, non_blocking=True)
        assert host.isnan().all()
    assert {report.kind for report in run.reports} == {"race", "use after free", "pinned source"}


@simulated(1)
def test_a_host_that_saw_an_event_done_orders_what_it_queues(world_size: int) -> None:
    with device.simulate(idle=0.01) as run:
        (side, values), event = side_and_zeros(), torch.Event("sim")
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
