"""What an iteration asks of an accelerator, counted on the simulated one: it does not depend on its speed."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest

from onecopy import GradientsNotReducedWarning
from tests.accelerator import counting, device
from tests.accelerator.cases import BY_NAME
from tests.accelerator.counters import Step
from tests.accelerator.counting import COUNTED, LARGE, LEVELS, Counts, counts
from tests.accelerator.harness import HYBRID, SIMCCL, run, simulated
from tests.accelerator.process_group import Communicator
from tests.accelerator.training import Case, Training, level_1, on_device, one_pass, small_sizes
from tests.support import paths

OURS = [name for name in COUNTED if name != "DDP, AdamW"]
GROUP = pytest.mark.parametrize("backend", [SIMCCL, HYBRID], ids=["pure", "hybrid"])
RANKS = pytest.mark.parametrize("world_size", [2, 3])


@pytest.mark.parametrize("level", OURS)
@RANKS
@GROUP
def test_collectives_and_waits_of_an_iteration(level: str, world_size: int, backend: str) -> None:
    found = counts(level, world_size, backend)
    check_waits(level, found.synchronizations, found.buckets)
    if level.startswith("level 3"):
        # Two collectives per bucket, and a vote in each direction.
        assert found.buckets > counts(level, world_size, backend, blocks=3).buckets > 1
        assert [name for name in found.names if name != "all_reduce"] == [
            *["reduce_scatter_tensor"] * found.buckets,
            *["all_gather_into_tensor"] * found.buckets,
        ]
        assert found.calls - 2 * found.buckets <= 2 + level.endswith("clipped")
        assert found.operations == found.calls
    elif level.startswith("level"):
        # One collective per bucket and one per round of all-gathers.
        reductions = {"all_reduce"} if level.startswith("level 1") else {"reduce_scatter_tensor", "reduce_scatter"}
        norms = "clipped" in level  # an all-reduce of a norm counts as a bucket
        assert sum(name in reductions for name in found.names) >= found.buckets - norms > 2
        assert found.rounds > 1
        assert found.calls <= found.buckets + found.rounds + 2
    else:
        check_overlapped_updates(level, found)
    if not level.startswith("level 1") and level.startswith("level"):
        sent, size = found.bytes  # every gradient and every parameter once
        assert sent <= 2.6 * size  # the parts of these small buckets are padded


def check_waits(level: str, waits: list[tuple[str, str, int]], buckets: int) -> None:
    """The host waits for flags that are a step old, and for offloaded gradients: at level 3 in each part of a step."""
    offloaded = [wait for wait in waits if wait[1].startswith("onecopy/step/batched_copies.py")]
    parts = buckets if level.startswith("level 3") else 1
    assert bool(offloaded) == level.endswith("offload")
    assert len(offloaded) <= parts
    flags = [wait for wait in waits if wait not in offloaded]
    # The flags of the last backward pass are waited for before those of the last step: a rank that fails in between
    # takes no part in the second exchange.
    assert len(flags) <= (2 if level.startswith("level 3") else 1), waits
    for kind, site, age in flags:
        assert kind == "event"
        assert site.startswith("onecopy/comm/status_flags.py")
        assert age >= 1


def check_overlapped_updates(level: str, found: Counts) -> None:
    """A bucket is shared at once, in the same group; an interleaved one when the next one is reduced."""
    reduced = ["all_reduce" in name for name in found.names[:-1]]  # the last one is the vote
    at_once = [len(list(run)) for is_reduction, run in itertools.groupby(reduced) if is_reduction]
    buckets = sum(reduced)
    assert at_once == ([buckets] if level == "after backward" else [2, *[1] * (buckets - 2)])
    assert found.calls <= 3 * buckets + 1  # a bucket may be larger than a round of all-gathers
    assert found.groups == 1


@pytest.mark.parametrize("level", [name for name in OURS if name != "level 2 zeroed in place"])
def test_launches_do_not_grow_with_the_number_of_parameters(level: str) -> None:
    """But DDP itself copies into each gradient that is zeroed in place."""
    few, many = (counts(level, bucket=LARGE, blocks=blocks).launches for blocks in (2, 4))
    assert many == few


@pytest.mark.parametrize("level", OURS)
@RANKS
def test_a_host_far_ahead_needs_no_more_memory(level: str, world_size: int) -> None:
    lockstep, far = (counts(level, world_size, host_ahead=ahead).peak for ahead in (0, "far"))
    assert far <= 1.2 * lockstep


@pytest.mark.parametrize("level", list(LEVELS))
def test_the_docs_have_these_counts(level: str) -> None:
    lines = (paths.ROOT / "docs/accelerators.md").read_text().splitlines()
    without_peaks = counting.row(level).rsplit("|", 3)[0]  # a peak depends a little on the other ranks' progress
    assert any(line.startswith(without_peaks) for line in lines)


# The first layer of the second program reads a bias that is in the last bucket of the second optimizer.
@pytest.mark.parametrize(("level", "all_of_them"), [("level 3 overlap", False), ("level 3 Muon overlap", True)])
@GROUP
def test_the_next_forward_waits_for_no_parameters_that_it_does_not_read_yet(
    level: str, all_of_them: bool, backend: str
) -> None:
    run(check_overlap, 2, {"level": level, "all_of_them": all_of_them}, backend)


def check_overlap(level: str, all_of_them: bool) -> None:
    """In a worker: the clock of the compute stream tells which all-gathers it has waited for."""
    seen: list[tuple[bool, bool]] = []
    gathers: list[tuple[int, int]] = []
    loaded = device.load()
    races = loaded.scheduler.races

    def note(_: Communicator, name: str, stream: int) -> None:
        if name.startswith("all_gather"):
            gathers.append((stream, races.clock(stream)[stream]))

    def waited_for() -> list[bool]:
        loaded.scheduler.read_log()
        clock = races.clock(loaded.core.current_stream())
        return [clock.get(stream, 0) >= epoch for stream, epoch in gathers]

    with small_sizes(), device.simulate(seed=1) as simulation:
        training = Training(BY_NAME[level], on_device())
        for step in range(3):
            one_pass(training, step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Communicator, "observers", [note])
            one_pass(training, 3)
        after_step = waited_for()
        training.module.get_submodule("first").register_forward_hook(
            lambda *_: seen.append((all(waited_for()), any(waited_for())))
        )
        training.loss(4)
        training.results()
    assert simulation.reports == []
    assert len(gathers) > 3
    assert not any(after_step)
    assert seen == [(all_of_them, True)]


@simulated(2)
def test_buffers_are_sent_by_one_broadcast(world_size: int) -> None:
    with small_sizes(), device.simulate(seed=9) as simulation:
        training = Training(BY_NAME["level 3 buffers"], on_device())
        for step in range(3):
            with simulation.step() as forward:
                loss = training.loss(step)
            loss.backward()
            training.step()
    assert simulation.reports == []
    assert [each.name for each in forward.collectives] == ["broadcast"]
    assert forward.synchronizations == []


def without_ddp(training: Training) -> None:
    training.model = training.module
    training.add_optimizers()


def probes(step: Step) -> int:
    """Number of kernels that the probe of gradients has launched."""
    return sum(count for (_, where), count in step.kernels.items() if where.startswith("onecopy/step/checks"))


@pytest.mark.parametrize(("setup", "warns", "probed"), [(without_ddp, [3], 4), (level_1, [], 2)])
@simulated(2)
def test_gradients_that_nothing_averages_are_noticed_without_a_wait(
    world_size: int, setup: Any, warns: list[int], probed: int
) -> None:
    """All ranks warn when the flags of the third step are read."""
    warned, counted = [], []
    with small_sizes(), device.simulate(seed=3, host_ahead="far") as simulation:
        training = Training(Case("probed", setup), on_device())
        for step in range(7):
            with warnings.catch_warnings(record=True) as caught, simulation.step() as iteration:
                warnings.simplefilter("always")
                one_pass(training, step)
            warned += [step for each in caught if each.category is GradientsNotReducedWarning]
            counted.append(iteration)
        training.results()
    assert simulation.reports == []
    assert warned == warns
    assert [bool(probes(step)) for step in counted] == [True] * probed + [False] * (7 - probed)
    # From the second step on the host waits for older flags only.
    for wait in itertools.chain.from_iterable(step.synchronizations for step in counted[1:]):
        if wait.site.startswith("onecopy/"):
            assert wait.site.startswith("onecopy/comm/status_flags.py"), wait
            assert wait.age >= 1, wait
