"""The rule that chooses which cases of a large table are run."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering

TABLES = st.lists(st.integers(1, 7), min_size=1, max_size=4)
"""How many values each of some parameters has."""


def every_combination(sides: list[int]) -> list[dict[str, int]]:
    return [{f"side {side}": value for side, value in enumerate(row)} for row in product(*map(range, sides))]


@given(TABLES)
def test_every_value_occurs(sides: list[int]) -> None:
    table = every_combination(sides)
    picked = [table[position] for position in covering(table)]
    assert {item for case in picked for item in case.items()} == {item for case in table for item in case.items()}


@given(TABLES)
def test_no_more_cases_are_picked_than_the_longest_side_has_values(sides: list[int]) -> None:
    assert len(covering(every_combination(sides))) == max(sides)


@given(TABLES)
def test_the_values_of_a_parameter_occur_equally_often_up_to_one(sides: list[int]) -> None:
    table = every_combination(sides)
    counts = Counter(item for position in covering(table) for item in table[position].items())
    for side in range(len(sides)):
        occurrences = [count for (name, _), count in counts.items() if name == f"side {side}"]
        assert max(occurrences) - min(occurrences) <= 1


def test_two_short_sides_beside_a_long_one_meet_in_every_way() -> None:
    table = every_combination([8, 2, 2])
    met = Counter((table[position]["side 1"], table[position]["side 2"]) for position in covering(table))
    assert met == {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 2}


def test_a_table_that_lacks_combinations_is_covered_too() -> None:
    table = [{"case": "a", "who": "all"}, {"case": "b", "who": "all"}, {"case": "b", "who": "last"}]
    assert covering(table) == [0, 2]
