"""Of a table with every combination of some values, a few cases in which each value occurs about equally often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain, combinations


def covering(table: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the positions of cases that together have every value of every parameter.

    For each value that has not occurred yet, this takes the case whose other values were used least so far; among
    equals, the one whose pairs of other values were used least, and then the first.
    """
    used: Counter[tuple[tuple[str, Hashable], ...]] = Counter()
    picked: list[int] = []
    for value in dict.fromkeys(chain.from_iterable(case.items() for case in table)):
        if used[(value,)]:
            continue
        having = [position for position, case in enumerate(table) if value in case.items()]
        best = min(having, key=lambda position: (_uses(used, table[position], 1), _uses(used, table[position], 2)))
        picked.append(best)
        for size in (1, 2):
            used.update(combinations(table[best].items(), size))
    return sorted(picked)


def _uses(used: Counter[tuple[tuple[str, Hashable], ...]], case: Mapping[str, Hashable], size: int) -> int:
    """Count how often the values of a case, or its pairs of values, were used."""
    return sum(used[values] for values in combinations(case.items(), size))
