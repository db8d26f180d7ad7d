"""The simulated device computes what the CPU computes, later, and counts what it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.harness import simulated


class Everything(torch.nn.Module):
    """A model with the layers that people train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.attention = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(48, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.attention(self.embedding(tokens)))
        result: Tensor = self.head(hidden.flatten(1))
        return result


def train(where: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Everything().to(where)
    # Gradients that are zero but for rounding must not become steps of full size.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, foreach=True)
    for _ in range(2):
        tokens, targets = torch.randint(11, (3, 6)), torch.randint(5, (3,))
        torch.nn.functional.cross_entropy(model(tokens.to(where)), targets.to(where)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in model.state_dict().values()]


@pytest.mark.parametrize("host_ahead", [0, 7, "far"])
@simulated(1)
def test_training_gives_the_numbers_of_the_cpu(world_size: int, host_ahead: Any) -> None:
    expected = train("cpu")
    with device.simulate(seed=1, host_ahead=host_ahead) as run:
        actual = train("sim")
    assert run.reports == []
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@simulated(1)
def test_operators_run_when_the_host_waits_or_does_nothing_or_in_lockstep(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=60):
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
        assert len(step.synchronizations) == (name in SYNCHRONIZING), f"{name}: {step.summary()}"
        assert all(each.site.startswith("test_device.py:") for each in step.synchronizations), name


@simulated(1)
def test_kernels_and_memory_are_counted(world_size: int) -> None:
    with device.simulate(idle=60) as run:
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
    with device.simulate(host_ahead="far", idle=60):
        table, rows = torch.ones(3, 2, device="sim"), torch.tensor([7]).pin_memory().to("sim", non_blocking=True)
        table.index_select(0, rows)
        with pytest.raises(RuntimeError, match=r"index_select, queued at test_device.py:\d+, failed on the device"):
            torch.accelerator.synchronize()


@simulated(1)
def test_random_numbers_follow_the_seed_and_not_the_order_of_running(world_size: int) -> None:
    def draw(host_ahead: Any, seed: int) -> list[float]:
        with device.simulate(seed=seed, host_ahead=host_ahead):
            torch.manual_seed(3)
            side = torch.Stream("sim")
            first = torch.randn(3, device="sim")
            with side:
                second = torch.nn.functional.dropout(torch.ones(20, device="sim"))
            third = torch.rand(3, device="sim")
            torch.accelerator.synchronize()
            return [*first.tolist(), *second.tolist(), *third.tolist()]

    expected = draw(0, 0)
    assert len(set(expected)) > 7
    assert draw("far", 1) == expected
    assert draw(5, 2) == expected


@simulated(1)
def test_storages_are_resized_in_stream_order(world_size: int) -> None:
    with device.simulate(host_ahead="far", idle=60) as run:
        values = torch.arange(4.0, device="sim")
        values.resize_(8)[4:] = 9
        assert values.tolist() == [0, 1, 2, 3, 9, 9, 9, 9]
    assert run.reports == []
