"""The simulated device runs work late, counts what it is asked for, and reports mistakes and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.harness import simulated

LATE = 60.0
"""Seconds that the device does not work on its own, so that work runs as late as it can."""

PROGRAMS: dict[str, tuple[Callable[[], object], list[str]]] = {}
"""Small programs by name, each with the kinds of reports that it must give, whatever the order of running."""


def program(*kinds: str) -> Callable[[Callable[[], None]], None]:
    """Add a program to the table."""
    return lambda function: PROGRAMS.update({function.__name__: (function, sorted(kinds))})


def side_and_zeros(*size: int) -> tuple[torch.Stream, Tensor]:
    return torch.Stream("sim"), torch.zeros(size or 1000, device="sim")


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


def columns(first: int) -> None:
    """Write the columns from the first one on on a side stream, and the first four ones on the current stream."""
    side, matrix = side_and_zeros(8, 8)
    torch.accelerator.synchronize()
    with side:
        matrix[:, first:].add_(1)
    matrix[:, :4].add_(1)


PROGRAMS["columns that overlap"] = lambda: columns(3), ["race"]
PROGRAMS["columns that do not overlap"] = lambda: columns(4), []


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


PROGRAMS["memory is reused while another stream reads it"] = freed_in_flight, ["use after free"]
# This allocator would not take that memory.
PROGRAMS["memory may go to a tensor of another size"] = lambda: freed_in_flight(size=1), ["use after free"]


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
def freed_memory_holds_no_old_numbers_and_a_part_is_never_written() -> None:
    torch.ones(100, device="sim").add_(1)
    values = torch.empty(100, device="sim")
    values[:50] = 1
    assert values[:50].sum().item() == 50
    assert values.sum().isnan().item()


@program()
def pinned_memory_is_read_after_its_copy() -> None:
    host = torch.zeros(10).pin_memory()
    host.copy_(torch.ones(10, device="sim"), non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert host.sum() == 10


@pytest.mark.parametrize("host_ahead", [0, 7, "far"])
@simulated(1)
def test_mistakes_and_only_mistakes_are_reported(world_size: int, host_ahead: Any) -> None:
    for name, (function, kinds) in PROGRAMS.items():
        for seed in range(3):
            with device.simulate(seed, host_ahead, idle=LATE) as run:
                function()
            assert sorted({report.kind for report in run.reports}) == kinds, (name, run.reports)


@simulated(1)
def test_mistakes_give_wrong_numbers_when_the_host_runs_ahead(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE) as run:
        side, values = side_and_zeros(10)
        torch.accelerator.synchronize()
        with side:
            values.add_(1)
        assert values.sum().item() == 0
        (race,) = run.collect()
        assert all(word in race.text for word in ("add", "sum"))
        assert race.text.count("test_simulator.py:") == 2
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
        while not event.query():  # the idle device works
            time.sleep(0.005)
        values.add_(1)
    assert run.reports == []


@simulated(1)
def test_operators_run_when_the_host_waits_or_does_nothing_or_in_lockstep(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE):
        values = torch.ones(5, device="sim")
        stream, event = torch.accelerator.current_stream(), torch.Event("sim")
        event.record()
        assert not stream.query()
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert values.tolist() == [1.0] * 5
        assert stream.query()
    with device.simulate(host_ahead=0):
        values.add_(1)
        assert stream.query()
    with device.simulate(host_ahead="far"):
        values.add_(1)
        limit = time.monotonic() + 20
        while not stream.query():
            assert time.monotonic() < limit
            time.sleep(0.01)


SYNCHRONIZING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t[0].item(),
    "bool": lambda t: bool(t[0] > 0),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "masked select": lambda t: t[t > 0],
    "mask": lambda t: t.__setitem__(t > 0, t),
    "equal": lambda t: torch.equal(t, t),
    "from pageable": lambda _: torch.ones(3).to("sim", non_blocking=True),
    "to pageable": lambda t: torch.empty(4).copy_(t, non_blocking=True),
    "from pinned, blocking": lambda _: torch.ones(3).pin_memory().to("sim"),
    "new tensor": lambda _: torch.tensor([1.0], device="sim"),
    "synchronize": lambda _: torch.accelerator.synchronize(),
    "stream": lambda _: torch.accelerator.current_stream().synchronize(),
    "event": lambda _: torch.accelerator.current_stream().record_event().synchronize(),
}
ASYNCHRONOUS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "from pinned": lambda _: torch.ones(3).pin_memory().to("sim", non_blocking=True),
    "to pinned": lambda t: torch.empty(4, pin_memory=True).copy_(t, non_blocking=True),
    "to the host, not blocking": lambda t: t.to("cpu", non_blocking=True),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "scalar of the host": lambda t: t * torch.tensor(2.0),
    "wait": lambda _: torch.Stream("sim").wait_stream(torch.accelerator.current_stream()),
    "norm": lambda t: torch.nn.utils.get_total_norm([t, t]),
    "index": lambda t: t[torch.ones(2, dtype=torch.int64).pin_memory().to("sim", non_blocking=True)],
}


@simulated(1)
def test_blocking_calls_are_counted_with_their_line(world_size: int) -> None:
    for name, call in {**SYNCHRONIZING, **ASYNCHRONOUS}.items():
        with device.simulate(host_ahead="far") as run:
            values = torch.ones(4, device="sim")
            with run.step() as step:
                call(values)
        assert run.reports == [], name
        assert len(step.synchronizations) == (name in SYNCHRONIZING), (name, step)
        assert all(each.site.startswith("test_simulator.py:") for each in step.synchronizations), name


@simulated(1)
def test_kernels_and_memory_are_counted(world_size: int) -> None:
    with device.simulate(idle=LATE) as run:
        values = [torch.ones(2, device="sim") for _ in range(250)]
        with run.step() as batched:
            torch._foreach_add_(values, 1.0)
        held = torch.ones(1024, device="sim")
        with run.step() as freed:
            first = held + 1
            del first
            second = held + 2
        del second
        side = torch.Stream("sim")
        with run.step() as recorded:
            for _ in range(3):
                several = torch.ones(1024, device="sim")
                side.wait_stream(torch.accelerator.current_stream())
                with side:
                    several.add_(1)
                several.record_stream(side)
                del several
    assert run.reports == []
    assert list(batched.kernels.values()) == [3], "one for about 100 tensors"
    assert freed.peak == 4096
    assert (recorded.peak, recorded.peak_held) == (4096, 3 * 4096)


@simulated(1)
def test_an_error_of_the_device_is_raised_at_the_next_synchronisation(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=LATE):
        table, rows = torch.ones(3, 2, device="sim"), torch.tensor([7]).pin_memory().to("sim", non_blocking=True)
        table.index_select(0, rows)
        with pytest.raises(RuntimeError, match=r"index_select, queued at test_simulator.py:\d+, failed on the device"):
            torch.accelerator.synchronize()


@simulated(1)
def test_random_numbers_follow_the_seed_and_not_the_order_of_running(world_size: int) -> None:
    def draw(host_ahead: Any, seed: int) -> list[float]:
        with device.simulate(seed=seed, host_ahead=host_ahead):
            torch.manual_seed(3)
            first = torch.randn(3, device="sim")
            with torch.Stream("sim"):
                second = torch.nn.functional.dropout(torch.ones(20, device="sim"))
            third = torch.rand(3, device="sim")
            torch.accelerator.synchronize()
            return [*first.tolist(), *second.tolist(), *third.tolist()]

    expected = draw(0, 0)
    assert len(set(expected)) > 7
    assert draw("far", 1) == draw(5, 2) == expected
