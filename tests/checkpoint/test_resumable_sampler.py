"""The sampler whose position is in a checkpoint: every sample once per epoch, wherever a run stops and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from onecopy.checkpoint import ResumableSampler

Stops = list[tuple[int, int]]
"""How a run is divided: the number of ranks, and the number of batches that they train."""


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, bool, Stops]:
    """The size of the data set and of a batch, whether to shuffle, and the stops."""
    dataset_size = draw(st.integers(1, 40))
    batch_size = draw(st.integers(1, dataset_size))
    stops = draw(st.lists(st.tuples(st.integers(1, min(8, batch_size)), st.integers(0, 12)), max_size=6))
    return dataset_size, batch_size, draw(st.booleans()), stops


def endless(sampler: ResumableSampler) -> Iterator[list[int]]:
    """The batches of one epoch after the other, each trained before the next one is asked for."""
    while True:
        for part in sampler:
            yield part
            sampler.advance()


def train(samplers: list[ResumableSampler], batches: int) -> list[list[int]]:
    """Train some batches on all ranks, and return the samples of each batch."""
    parts = [endless(sampler) for sampler in samplers]
    trained = [[next(part) for part in parts] for _ in range(batches)]
    for sampler in samplers if batches else ():
        sampler.advance()  # the last batch
    return [sorted(chain.from_iterable(batch)) for batch in trained]


@given(runs())
@example((10, 4, True, [(2, 3), (3, 1), (1, 2), (2, 9)]))  # stops in the batch across two epochs
@example((7, 7, True, [(7, 1), (1, 2)]))  # an epoch has one batch
def test_any_ranks_and_stops_train_the_batches_of_an_undisturbed_run(run: tuple[int, int, bool, Stops]) -> None:
    dataset_size, batch_size, shuffle, stops = run
    batches: list[list[int]] = []
    state = ResumableSampler(dataset_size, batch_size, seed=3, shuffle=shuffle).state_dict()
    for world_size, count in stops:
        samplers = [
            ResumableSampler(dataset_size, batch_size, seed=3, shuffle=shuffle, group_rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for sampler in samplers:
            sampler.load_state_dict(state)
        batches += train(samplers, count)
        assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
        state = samplers[-1].state_dict()
    assert state["position"] == batch_size * len(batches)
    assert batches == train([ResumableSampler(dataset_size, batch_size, seed=3, shuffle=shuffle)], len(batches))


@given(runs())
def test_every_epoch_has_every_sample_once(run: tuple[int, int, bool, Stops]) -> None:
    dataset_size, batch_size, shuffle, _ = run
    sampler = ResumableSampler(dataset_size, batch_size, shuffle=shuffle)
    sequence = list(chain.from_iterable(islice(endless(sampler), 3 * dataset_size)))
    epochs = [sequence[start : start + dataset_size] for start in range(0, len(sequence), dataset_size)]
    for epoch in epochs[: len(sequence) // dataset_size]:
        assert sorted(epoch) == list(range(dataset_size))
        assert shuffle or epoch == sorted(epoch)
    assert len(set(epochs[-1])) == len(epochs[-1])
    if shuffle and dataset_size >= 20:
        assert epochs[0] != epochs[1]


def test_the_position_counts_trained_batches_and_not_those_that_a_loader_has_fetched() -> None:
    dataset, sampler = TensorDataset(torch.arange(60)), ResumableSampler(60, 4)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=3)
    trained = []
    for (samples,) in islice(loader, 3):
        trained.append(samples.tolist())
        sampler.advance()
    assert sampler.state_dict()["position"] == 12
    resumed = ResumableSampler(60, 6)  # another batch size goes on at the same sample
    resumed.load_state_dict(sampler.state_dict())
    rest = [samples.tolist() for (samples,) in DataLoader(dataset, batch_sampler=resumed)]
    assert sorted(chain.from_iterable(trained + rest)) == list(range(60))


def sampler_of(**changed: Any) -> ResumableSampler:
    return ResumableSampler(**{"dataset_size": 10, "batch_size": 2, **changed})


def advance_twice(sampler: ResumableSampler) -> None:
    next(iter(sampler))
    sampler.advance()
    sampler.advance()


def forget_to_advance(sampler: ResumableSampler) -> None:
    assert len(list(sampler)) == 5
    iter(sampler)


@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (lambda: sampler_of(batch_size=0), ValueError, "batch_size must be from 1 to dataset_size=10, got 0"),
        (lambda: sampler_of(group_rank=1), ValueError, "group_rank and world_size must be given together"),
        (lambda: sampler_of(group_rank=2, world_size=2), ValueError, "group_rank must be from 0 to 1"),
        (lambda: iter(sampler_of(group_rank=0, world_size=3)), ValueError, "batch_size=2 is the number of samples of"),
        (lambda: forget_to_advance(sampler_of()), RuntimeError, r"call sampler\.advance\(\) after each batch"),
        (lambda: advance_twice(sampler_of()), RuntimeError, "more often than batches were taken"),
        *(
            (
                lambda changed=changed: sampler_of(**changed).load_state_dict(sampler_of().state_dict()),
                ValueError,
                f"the position was saved with {next(iter(changed))}=",
            )
            for changed in ({"dataset_size": 11}, {"seed": 1}, {"shuffle": False})
        ),
    ],
)
def test_mistakes_are_named(mistake: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        mistake()
