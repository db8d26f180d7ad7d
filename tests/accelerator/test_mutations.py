"""Every mistake of a list is found on the simulated accelerator, by wrong numbers or by a report."""

from __future__ import annotations

import pytest

from tests.accelerator.cases import BY_NAME
from tests.accelerator.comparing import Setting, abandoning_on_failure, compare, on_cpu, simulated
from tests.accelerator.harness import run
from tests.accelerator.mutations import MUTATIONS
from tests.accelerator.training import on_device
from tests.support.harness import EVERYTHING

SETTINGS: list[Setting] = [(0, "far"), (1, 6), (2, 0)] if EVERYTHING else [(0, "far")]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found_and_without_it_nothing(name: str) -> None:
    mutation = MUTATIONS[name]
    for seed, ahead in SETTINGS:
        setting: Setting = (seed, "far" if mutation.is_on_host else ahead)
        assert run(outcome, 2, {"case": mutation.case, "mutation": None, "setting": setting}) == [[], []], setting
        assert any(run(outcome, 2, {"case": mutation.case, "mutation": name, "setting": setting})), setting


def outcome(case: str, mutation: str | None, setting: Setting) -> list[str]:
    """In a worker: train, with a mistake or without one, and return what was found."""
    expected = on_cpu(case)
    with pytest.MonkeyPatch.context() as patch:
        if mutation is not None:
            MUTATIONS[mutation].apply(patch)
        try:
            with abandoning_on_failure(), simulated(setting) as simulation:
                actual = BY_NAME[case].run(on_device())
            compare(BY_NAME[case], actual, expected, "numbers")
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    return [str(report) for report in simulation.reports[:1]]
