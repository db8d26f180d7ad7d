"""Which rank owns which whole parameter, if the cost of an update does not follow from the number of elements.

A matrix optimizer takes longest for its matrix products. So the cost of the updates is balanced, and the elements,
which decide about memory, are kept below a limit. Parameters of equal shape stay together where that costs no balance,
because an optimizer such as :class:`onecopy.optim.Muon` updates them as one stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf, prod

from onecopy.layout.shards import ParamSpec

CostFunction = Callable[[tuple[int, ...]], float]
"""The cost of one update of a parameter, in any unit, as a function of its shape."""

MOST_ELEMENTS = 1.3
"""The elements that a rank may own, divided by the mean. Large parameters may make more necessary."""

SEARCHES = 24
"""The number of halvings in the search for the least highest cost."""


def newton_schulz_cost(shape: tuple[int, ...]) -> float:
    """The multiplications of one Newton-Schulz iteration; dimensions after the first count as one."""
    if not shape or not prod(shape):
        return 0.0
    rows = shape[0]
    short, long = sorted((rows, prod(shape) // rows))
    return 2.0 * short * short * long + short**3


def owners_by_cost(specs: Sequence[ParamSpec], costs: Sequence[float], elements: Sequence[int]) -> dict[int, int]:
    """Return the owner of each parameter, by index.

    It fills one rank after another, with the parameters ordered by cost and shape, up to the least cost with which all
    find room. That is bin packing by first fit decreasing, and the search for the capacity makes it MULTIFIT.

    Args:
        specs: the parameters to assign.
        costs: the cost that each rank has already.
        elements: the number of elements that each rank owns already.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.cost, spec.shape, spec.index))
    shapes = [list(group) for _, group in groupby(ordered, key=lambda spec: (spec.cost, spec.shape))]
    world_size = len(costs)
    most_elements = MOST_ELEMENTS * (sum(elements) + sum(spec.numel for spec in specs)) / world_size
    # Without a limit first: a sum in another order may be rounded to less than what one rank can get.
    found = _fill(shapes, costs, elements, inf, most_elements)
    while found is None:
        most_elements *= 1.1
        found = _fill(shapes, costs, elements, inf, most_elements)
    high = max(costs) + sum(spec.cost for spec in specs)
    low = (sum(costs) + sum(spec.cost for spec in specs)) / world_size
    for _ in range(SEARCHES):
        middle = (low + high) / 2
        tried = _fill(shapes, costs, elements, middle, most_elements)
        if tried is None:
            low = middle
        else:
            found, high = tried, middle
    return found


def _fill(
    shapes: Sequence[Sequence[ParamSpec]],
    costs: Sequence[float],
    elements: Sequence[int],
    most_cost: float,
    most_elements: float,
) -> dict[int, int] | None:
    """Return an owner for each parameter with no rank above the two limits, or None."""
    costs, elements, owners = list(costs), list(elements), dict[int, int]()
    for members in shapes:
        group_rank, cost, numel = 0, members[0].cost, members[0].numel
        for spec in members:
            # Equal parameters fill a rank completely before the next one, so no rank is looked at twice.
            while costs[group_rank] + cost > most_cost or elements[group_rank] + numel > most_elements:
                group_rank += 1
                if group_rank == len(costs):
                    return None
            owners[spec.index] = group_rank
            costs[group_rank] += cost
            elements[group_rank] += numel
    return owners
