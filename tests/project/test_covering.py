"""The rule that chooses which cases of a large table are run."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering


def every_combination(sides: list[int]) -> list[dict[str, int]]:
    """Of parameters with these numbers of values."""
    return [{f"side {side}": value for side, value in enumerate(row)} for row in product(*map(range, sides))]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_few_cases_are_picked_in_which_every_value_occurs_equally_often_up_to_one(sides: list[int]) -> None:
    table = every_combination(sides)
    picked = covering(table)
    assert len(picked) == max(sides)
    counts = Counter(item for position in picked for item in table[position].items())
    assert counts.keys() == {item for case in table for item in case.items()}
    for side in range(len(sides)):
        occurrences = [count for (name, _), count in counts.items() if name == f"side {side}"]
        assert max(occurrences) - min(occurrences) <= 1


def test_two_short_sides_beside_a_long_one_meet_in_every_way_and_combinations_may_lack() -> None:
    table = every_combination([8, 2, 2])
    met = Counter((table[position]["side 1"], table[position]["side 2"]) for position in covering(table))
    assert met == {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 2}
    lacking = [{"case": "a", "who": "all"}, {"case": "b", "who": "all"}, {"case": "b", "who": "last"}]
    assert covering(lacking) == [0, 2]
