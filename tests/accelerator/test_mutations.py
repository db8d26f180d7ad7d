"""Every mistake of a list is found on the simulated accelerator, by wrong numbers or by a report."""

from __future__ import annotations

import pytest

from tests.accelerator.abandoning import abandoning_on_failure
from tests.accelerator.cases import BY_NAME
from tests.accelerator.comparing import Setting, compare, on_cpu, on_device, simulated
from tests.accelerator.harness import run
from tests.accelerator.mutations import MUTATIONS
from tests.support.harness import EVERYTHING

SETTINGS: list[Setting] = [(0, "far"), (1, 6), (2, 0)] if EVERYTHING else [(0, "far")]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name: str) -> None:
    for seed, ahead in SETTINGS:
        setting: Setting = (seed, "far" if MUTATIONS[name].is_on_host else ahead)
        assert any(run(outcome, 2, {"case": MUTATIONS[name].case, "mutation": name, "setting": setting})), setting


@pytest.mark.parametrize("case", sorted({mutation.case for mutation in MUTATIONS.values()}))
def test_without_a_mistake_nothing_is_found(case: str) -> None:
    for setting in SETTINGS:
        assert run(outcome, 2, {"case": case, "mutation": None, "setting": setting}) == [[], []], setting


def outcome(case: str, mutation: str | None, setting: Setting) -> list[str]:
    """In a worker: train, with a mistake or without one, and return what was found."""
    expected = on_cpu(case)
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if mutation is not None:
            MUTATIONS[mutation].apply(patch)
        try:
            with abandoning_on_failure(), simulated(setting) as simulation:
                actual = BY_NAME[case].run(on_device())
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    found += map(str, simulation.reports[:1])
    try:
        compare(BY_NAME[case], actual, expected, "numbers")
    except AssertionError as error:
        found.append(str(error))
    return found
