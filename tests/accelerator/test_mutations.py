"""Every mistake of a list is found on the simulated accelerator, by wrong numbers or by a report."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.accelerator import device
from tests.accelerator.abandoning import abandoning_on_failure
from tests.accelerator.cases import BY_NAME
from tests.accelerator.harness import SIMCCL, run
from tests.accelerator.mutations import MUTATIONS
from tests.accelerator.test_training import Setting, compare, on_cpu
from tests.accelerator.training import Place

SETTINGS: list[Setting] = [(0, "far"), (1, 6)]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name: str) -> None:
    correct, wrong = (run(outcome, 2, {"name": name, "mutated": mutated}, SIMCCL) for mutated in (False, True))
    assert correct == [[], []]
    assert any(wrong)


def outcome(name: str, mutated: bool) -> list[str]:
    """In a worker: train, with the mistake or without it, and return what was found."""
    mutation = MUTATIONS[name]
    case = BY_NAME[mutation.case]
    expected = on_cpu(mutation.case)
    found: list[str] = []
    place = Place(torch.device("sim", torch.accelerator.current_device_index()), None)
    for seed, ahead in SETTINGS:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            if mutated:
                mutation.apply(patch)
            try:
                with abandoning_on_failure(), device.simulate(seed=seed, host_ahead=ahead) as simulation:
                    actual = case.run(place)
            except Exception as error:
                return [*found, f"{type(error).__name__}: {error}"]
        found += map(str, simulation.reports[:1])
        try:
            compare(case, actual, expected, "numbers")
        except AssertionError as error:
            found.append(str(error))
    return found
