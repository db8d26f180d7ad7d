"""The model of memory, traffic and time on machines that are not here."""

from __future__ import annotations

import pytest

from onecopy.planning import estimate
from onecopy.planning.estimate import Job, Machine, Way

# The time model


def job(**changes: float) -> Job:
    return Job(**{"elements": 1_000_000, "largest": 600_000, "compute": 0.3, "update": 0.1, **changes})  # type: ignore[arg-type]


def test_traffic_is_exact() -> None:
    machine = Machine(ranks=4, bandwidth=1e9)
    sent = {way: sum(estimate.sent_bytes(way, job(), machine)) for way in Way}
    assert sent[Way.DDP] == pytest.approx(2 * 4e6 * 3 / 4)
    assert sent[Way.LEVEL_ONE] == sent[Way.TORCH] == pytest.approx(1.5 * sent[Way.DDP])
    assert sent[Way.SHARDED] == sent[Way.REDUCE_SCATTER] == pytest.approx(sent[Way.DDP])


def test_on_busy_cores_everything_adds_up_and_on_a_link_the_backward_pass_hides_reductions() -> None:
    small = job(bucket_bytes=1000)  # the largest parameter, 60%, is reduced last
    busy = Machine(ranks=2, bandwidth=40e6, busy=1.0)  # 4 MB, half of it: 0.05 s each way
    assert estimate.step_seconds(Way.DDP, small, busy) == pytest.approx(estimate.CONTENTION * (0.3 + 0.1 + 0.1))
    assert estimate.step_seconds(Way.SHARDED, small, busy) == pytest.approx(estimate.CONTENTION * 0.45)
    link = Machine(ranks=2, bandwidth=40e6)
    assert estimate.step_seconds(Way.DDP, small, link) == pytest.approx(0.3 + 0.1 + 0.6 * 0.1)
    partly = Machine(ranks=2, bandwidth=40e6, busy=0.5)
    expected = estimate.CONTENTION * (0.3 + 0.1 + 0.05) + 0.6 * 0.05
    assert estimate.step_seconds(Way.DDP, small, partly) == pytest.approx(expected)
    slow = Machine(ranks=2, bandwidth=4e6)  # 0.5 s each way
    assert estimate.step_seconds(Way.DDP, small, slow) == pytest.approx(0.3 + (1.0 - 0.2) + 0.1)
    waits, hides = (estimate.step_seconds(way, small, slow) for way in (Way.SHARDED, Way.SHARDED_OVERLAP))
    assert waits - hides == pytest.approx(0.1), "the forward pass hides a third of the computing time"


def test_memory_by_kind_and_latency() -> None:
    machine = Machine(ranks=4, bandwidth=1e9)
    found = estimate.memory_bytes(Way.SHARDED, job(bucket_bytes=1000), machine)
    assert found == {"parameters": 4e6, "gradients": 1e6, "state": 2e6, "buffers": 1.5 * 2.4e6}
    assert estimate.memory_bytes(Way.TORCH, job(), machine)["state"] == pytest.approx(8e6 * 0.6)
    slow = Machine(ranks=4, bandwidth=1e9, latency=1.0, busy=1.0)
    assert estimate.step_seconds(Way.DDP, job(), slow) > estimate.step_seconds(Way.DDP, job(), machine)
