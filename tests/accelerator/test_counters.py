"""What an iteration asks of an accelerator, counted on the simulated one: it does not depend on its speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator import counting, device
from tests.accelerator.counting import LARGE, LEVELS, Counts, Launch, noted_launches, waited_for
from tests.accelerator.harness import HYBRID, SIMCCL, run
from tests.accelerator.training import Place, Training, one_pass, small_sizes

OURS = [name for name in LEVELS if name != "DDP, AdamW"]
LEVEL = pytest.mark.parametrize("level", OURS)
GROUP = pytest.mark.parametrize("backend", [SIMCCL, HYBRID], ids=["pure", "hybrid"])
RANKS = pytest.mark.parametrize("world_size", [2, 3])


def counted(level: str, world_size: int = 2, backend: str = SIMCCL, **options: Any) -> Counts:
    """The counts of rank 0."""
    found: Counts = run(counting.count, world_size, {"name": level, "blocks": 6, **options}, backend)[0]
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


@pytest.mark.parametrize("level", ["level 3", "level 3 overlap", "level 3 bf16"])
def test_sharded_data_parallel_has_two_collectives_per_bucket(level: str) -> None:
    found = {(ranks, blocks): counted(level, ranks, blocks=blocks) for ranks in (2, 3) for blocks in (6, 12)}
    assert found[2, 12].buckets > found[2, 6].buckets > 3
    assert {each.calls - 2 * each.buckets for each in found.values()} in ({1}, {2})
    assert all(each.operations == each.calls for each in found.values())
    for blocks in (6, 12):
        assert found[2, blocks].buckets == found[3, blocks].buckets


@pytest.mark.parametrize("level", ["level 1", "level 1 by element", "level 2", "level 2 by parameter"])
@RANKS
def test_levels_1_and_2_have_a_collective_per_bucket_and_per_round(level: str, world_size: int) -> None:
    found = counted(level, world_size)
    assert found.buckets > 3
    assert found.rounds > 1
    assert found.calls <= found.buckets + found.rounds + 2


@LEVEL
def test_launches_do_not_grow_with_the_number_of_parameters(level: str) -> None:
    few, many = (counted(level, bucket=LARGE, blocks=blocks).launches for blocks in (6, 12))
    assert many == few


@LEVEL
@RANKS
def test_a_host_far_ahead_needs_no_more_memory(level: str, world_size: int) -> None:
    lockstep, far = (counted(level, world_size, blocks=12, host_ahead=ahead).peak for ahead in (0, "far"))
    assert far <= 1.2 * lockstep


@GROUP
def test_the_next_forward_waits_for_no_parameters_that_it_does_not_read_yet(backend: str) -> None:
    run(check_overlap, 2, {}, backend)


def check_overlap() -> None:
    """In a worker: the clock of the compute stream tells which all-gathers it has waited for."""
    seen: list[tuple[bool, bool]] = []
    gathers: list[Launch] = []
    place = Place(torch.device("sim", torch.accelerator.current_device_index()), None)
    with small_sizes(), device.simulate(seed=1) as simulation, noted_launches() as launches:
        training = Training(LEVELS["level 3 overlap"], place)
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
