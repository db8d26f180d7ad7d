"""What an iteration asks of an accelerator, counted on the simulated one: it does not depend on its speed."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.accelerator import counting, device, table
from tests.accelerator.comparing import on_device
from tests.accelerator.counting import LARGE, LEVELS, Counts, Launch, noted_launches, waited_for
from tests.accelerator.harness import HYBRID, SIMCCL, run
from tests.accelerator.training import Training, one_pass, small_sizes
from tests.support import paths
from tests.support.harness import EVERYTHING

FEW = ["level 1", "level 1 master weights", "level 2", "interleaved", "level 3 overlap", "level 3 bf16"]
OURS = [name for name in LEVELS if name != "DDP, AdamW"] if EVERYTHING else FEW
LEVEL = pytest.mark.parametrize("level", OURS)
GROUP = pytest.mark.parametrize("backend", [SIMCCL, HYBRID], ids=["pure", "hybrid"])
RANKS = pytest.mark.parametrize("world_size", [2, 3])


@functools.cache
def counted(level: str, world_size: int = 2, backend: str = SIMCCL, **options: Any) -> Counts:
    """The counts of rank 0."""
    found: Counts = run(
        counting.count, world_size, {"name": level, "blocks": 6, "host_ahead": "far", **options}, backend
    )[0]
    return found


@LEVEL
@RANKS
@GROUP
def test_the_host_waits_at_most_once_and_for_flags_that_are_a_step_old(
    level: str, world_size: int, backend: str
) -> None:
    waits = counted(level, world_size, backend).synchronizations
    # The flags of the last backward pass are waited for before those of the last step: a rank that fails in between
    # takes no part in the second exchange.
    assert len(waits) <= (2 if level.startswith("level 3") else 1), waits
    for kind, site, age in waits:
        assert kind == "event"
        assert site.startswith("onecopy/comm/status_flags.py")
        assert age >= 1


@pytest.mark.parametrize("level", [level for level in OURS if level.startswith("level 3")])
def test_sharded_data_parallel_has_two_collectives_per_bucket(level: str) -> None:
    found = {(ranks, blocks): counted(level, ranks, blocks=blocks) for ranks in (2, 3) for blocks in (3, 6)}
    assert found[2, 6].buckets > found[2, 3].buckets > 1
    assert {each.calls - 2 * each.buckets for each in found.values()} in ({1}, {2})
    assert all(each.operations == each.calls for each in found.values())
    for blocks in (3, 6):
        assert found[2, blocks].buckets == found[3, blocks].buckets


@pytest.mark.parametrize("level", [level for level in OURS if level.startswith(("level 1", "level 2"))])
@RANKS
def test_levels_1_and_2_have_a_collective_per_bucket_and_per_round(level: str, world_size: int) -> None:
    found = counted(level, world_size)
    assert found.buckets > 3
    assert found.rounds > 1
    assert found.calls <= found.buckets + found.rounds + 2


@LEVEL
def test_launches_do_not_grow_with_the_number_of_parameters(level: str) -> None:
    few, many = (counted(level, bucket=LARGE, blocks=blocks).launches for blocks in (2, 4))
    assert many == few


@LEVEL
@RANKS
def test_a_host_far_ahead_needs_no_more_memory(level: str, world_size: int) -> None:
    lockstep, far = (counted(level, world_size, host_ahead=ahead).peak for ahead in (0, "far"))
    assert far <= 1.2 * lockstep


@pytest.mark.parametrize("level", list(LEVELS))
def test_the_docs_have_these_counts(level: str) -> None:
    lines = (paths.ROOT / "docs/accelerators.md").read_text().splitlines()
    without_peaks = table.row(level).rsplit("|", 3)[0]  # a peak depends a little on the other ranks' progress
    assert any(line.startswith(without_peaks) for line in lines)


@GROUP
def test_the_next_forward_waits_for_no_parameters_that_it_does_not_read_yet(backend: str) -> None:
    run(check_overlap, 2, {}, backend)


def check_overlap() -> None:
    """In a worker: the clock of the compute stream tells which all-gathers it has waited for."""
    seen: list[tuple[bool, bool]] = []
    gathers: list[Launch] = []
    with small_sizes(), device.simulate(seed=1) as simulation, noted_launches() as launches:
        training = Training(LEVELS["level 3 overlap"], on_device())
        for step in range(3):
            one_pass(training, step)
        launches.clear()
        one_pass(training, 3)
        gathers += [each for each in launches if each.name.startswith("all_gather")]
        after_step = [waited_for(each) for each in gathers]
        counting.first_module(training.module).register_forward_hook(
            lambda *_: seen.append((waited_for(gathers[0]), waited_for(gathers[-1])))
        )
        training.loss(4)
        training.results()
    assert simulation.reports == []
    assert len(gathers) > 3
    assert not any(after_step)
    assert seen == [(True, False)]
