"""The model of memory, traffic and time on machines that are not here."""

from __future__ import annotations

from itertools import pairwise

import pytest

from onecopy.comm import limits
from onecopy.planning import estimate
from onecopy.planning.collectives import Way, collectives_of, ddp_buckets
from onecopy.planning.estimate import Job, Machine
from onecopy.planning.model_shapes import Model, gpt_xl, specs_of, wrapped_units
from onecopy.planning.peers import fsdp2_collectives


def job(bucket_bytes: int | None = None, splittable: bool = True) -> Job:
    """A model of 4 MB, of which one parameter is 60%."""
    specs = specs_of({"large": (600_000,), "small": (400_000,)})
    return Job(Model(specs, splittable, bucket_bytes=bucket_bytes), compute=0.3, update=0.1)


def test_traffic_is_exact() -> None:
    machine = Machine(ranks=4, bandwidth=1e9)
    sent = {way: sum(estimate.sent_bytes(way, job(), machine)) for way in Way}
    assert sent[Way.DDP] == pytest.approx(2 * 4e6 * 3 / 4)
    assert sent[Way.LEVEL_ONE] == sent[Way.TORCH] == pytest.approx(1.5 * sent[Way.DDP])
    assert sent[Way.OVERLAP] == sent[Way.LEVEL_ONE]
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
    overlapped = estimate.step_seconds(Way.OVERLAP, small, link)
    assert overlapped == pytest.approx(0.3 + 0.05 + 0.6 * 0.15), "only the last bucket's share is not hidden"
    assert estimate.step_seconds(Way.OVERLAP, small, slow) == pytest.approx(0.3 + 0.05 + 1.5 - 0.2)


def test_memory_by_kind_and_latency() -> None:
    machine = Machine(ranks=4, bandwidth=1e9)
    found = estimate.memory_bytes(Way.SHARDED, job(bucket_bytes=1000), machine)
    expected = {"parameters": 4e6, "gradients": 1e6, "state": 2e6, "master weights": 0, "buffers": 1.5 * 2.4e6}
    assert found == expected
    assert estimate.memory_bytes(Way.TORCH, job(), machine)["state"] == pytest.approx(8e6 * 0.6)
    slow = Machine(ranks=4, bandwidth=1e9, latency=1.0, busy=1.0)
    assert estimate.step_seconds(Way.DDP, job(), slow) > estimate.step_seconds(Way.DDP, job(), machine)


def test_whole_parameters_are_not_evenly_owned() -> None:
    machine = Machine(ranks=4, bandwidth=1e9)
    whole = estimate.memory_bytes(Way.SHARDED, job(splittable=False), machine)
    assert whole["state"] == pytest.approx(8e6 * 0.6)
    assert whole["gradients"] == pytest.approx(4e6 * 0.6)
    slower = estimate.step_seconds(Way.SHARDED, job(splittable=False), machine)
    assert slower - estimate.step_seconds(Way.SHARDED, job(), machine) == pytest.approx(0.1 * 0.35, abs=2e-3)


def test_buffers_on_accelerators() -> None:
    large = Job(gpt_xl(), compute=0.3, update=0.1)
    embedding, mib = 50257 * 2048 * 2, 1 << 20
    few, many = estimate.accelerators(8), estimate.accelerators(512)
    assert estimate.memory_bytes(Way.SHARDED, large, few)["buffers"] == embedding
    assert estimate.memory_bytes(Way.SHARDED, large, many)["buffers"] == 2 * 512 * mib
    assert estimate.memory_bytes(Way.LEVEL_ONE, large, few)["buffers"] == 2 * 64 * mib
    assert estimate.memory_bytes(Way.DDP, large, few)["buffers"] == 0


def test_level_2_also_has_a_copy_and_a_part_of_two_ddp_buckets() -> None:
    large = Job(gpt_xl(), compute=0.3, update=0.1)
    for ranks in (8, 512):
        machine = estimate.accelerators(ranks)
        ways = (Way.LEVEL_ONE, Way.REDUCE_SCATTER)
        level_1, level_2 = (estimate.buffer_bytes(way, large.model, machine) for way in ways)
        buckets = ddp_buckets(large.model.specs, large.model.order)
        sizes = [sum(large.model.specs[index].nbytes for index in bucket) for bucket in buckets]
        largest = max(one + other for one, other in pairwise(sizes))
        assert level_2 - level_1 == pytest.approx(largest * (1 + 1 / ranks))


def test_buffers_between_pairs_hold_small_ranges_and_messages_of_other_ranks() -> None:
    machine = Machine(ranks=4, bandwidth=1e9)
    small = job().model
    assert estimate.buffer_bytes(Way.LEVEL_ONE, small, machine) == small.nbytes, "all parameters may be packed"
    most = (limits.PACKS_IN_FLIGHT + 1) * limits.PACK_BYTES
    assert estimate.buffer_bytes(Way.LEVEL_ONE, gpt_xl(), machine) <= most
    messages = (estimate.buffer_bytes(way, gpt_xl(), machine) for way in (Way.REDUCE_SCATTER, Way.LEVEL_ONE))
    assert next(messages) - next(messages) > limits.PACK_BYTES


def test_the_latency_of_a_collective_grows_with_the_ranks() -> None:
    for ranks, seconds in estimate.COLLECTIVE_LATENCY.items():
        assert estimate.collective_latency(ranks) == pytest.approx(seconds)
    found = [estimate.collective_latency(ranks) for ranks in (2, 3, 8, 9, 64, 100, 512, 4096)]
    assert found == sorted(found)
    assert 5e-6 < found[0] < 20e-6
    assert found[-1] == pytest.approx(200e-6)


def test_the_time_of_collectives_is_latency_and_bytes() -> None:
    units = wrapped_units(gpt_xl().specs)
    found = [
        estimate.communication_seconds(fsdp2_collectives(units, ranks), estimate.accelerators(ranks))
        for ranks in (8, 64, 512)
    ]
    assert found == pytest.approx([0.024, 0.0543, 0.0578], rel=0.01)
    level_three = collectives_of(Way.SHARDED, gpt_xl(), 512)
    assert estimate.communication_seconds(level_three, estimate.accelerators(512)) < found[-1]
