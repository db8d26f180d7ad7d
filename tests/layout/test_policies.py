"""Which rank owns which elements: properties over generated models, without processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onecopy import Layout, ParamSpec, Shard
from onecopy.layout import CUT_MULTIPLE, ShardBy, even_range, extend
from onecopy.layout.policies import SLACK

POLICIES = ("parameter", "element")

Shape = tuple[int, ...]


def spec(index: int, shape: Shape | int, group: int = 0, dtype: torch.dtype = torch.float32) -> ParamSpec:
    sizes = (shape,) if isinstance(shape, int) else shape
    stride = tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    return ParamSpec(index, f"layer{index}", sizes, stride, dtype, group)


def specs_of(*groups: Sequence[Shape | int]) -> list[ParamSpec]:
    shapes = [(shape, position) for position, group in enumerate(groups) for shape in group]
    return [spec(index, shape, group) for index, (shape, group) in enumerate(shapes)]


def plan(specs: Sequence[ParamSpec], world_size: int, shard_by: ShardBy = "parameter", cut: bool = True) -> Layout:
    return extend(None, specs, world_size, shard_by, splittable=cut)


def groups_of(specs: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    return [list(members) for _, members in itertools.groupby(specs, key=lambda item: item.group)]


# Models: a few kinds of layer, each repeated, so that hundreds of parameters come from a handful of choices.

WIDTHS = st.sampled_from([1, 3, 10, 33, 64, 100, 127, 256, 384, 768, 1000, 1024])
RANKS = st.integers(1, 64)


@st.composite
def layers(draw: st.DrawFn) -> list[Shape]:
    width, other = draw(WIDTHS), draw(WIDTHS)
    kinds: list[list[Shape]] = [
        [(width,)],  # a norm
        [(width, other), (other,)],  # linear
        [(other, width, 3, 3), (other,)],  # convolution
        [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,), (width, 4)],
        [()],  # a temperature
        [(0, width)],
        [(width * 31 + draw(st.integers(0, 200)),)],
    ]
    return draw(st.sampled_from(kinds)) * draw(st.integers(1, 14))


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    parts = draw(st.lists(st.lists(layers(), min_size=1, max_size=3), min_size=1, max_size=5))
    groups = [list(itertools.chain(*part)) for part in parts]
    if draw(st.booleans()):
        embedding = (draw(st.sampled_from([1_000, 32_000, 50_257])), draw(st.sampled_from([64, 300, 1024])))
        draw(st.sampled_from(groups)).insert(0, embedding)
    return specs_of(*groups)


@st.composite
def large_models(draw: st.DrawFn) -> tuple[list[ParamSpec], int]:
    """A model and a number of ranks, such that every rank has at least 100,000 elements."""
    specs = draw(models())
    total = sum(item.numel for item in specs)
    if total < 100_000:
        specs = [*specs, spec(len(specs), (50_257, 256), specs[-1].group)]
        total += specs[-1].numel
    return specs, draw(st.integers(1, min(64, total // 100_000)))


def check_exact_cover(layout: Layout) -> None:
    """Every element once, cuts at legal places, one range per rank: told from the shards alone."""
    ranges: dict[int, list[Shard]] = {item.index: [] for item in layout.params}
    for shard in layout.shards:
        ranges[shard.param].append(shard)
    for item in layout.params:
        mine = ranges[item.index]
        assert mine, f"{item.name} has no owner"
        assert [shard.start for shard in mine] == [0, *(shard.stop for shard in mine[:-1])]
        assert mine[-1].stop == item.numel
        assert all(shard.start % CUT_MULTIPLE == 0 for shard in mine)
        assert item.numel == 0 or all(shard.start < shard.stop for shard in mine)
        owners = [shard.owner for shard in mine]
        assert len(set(owners)) == len(owners)
        assert all(0 <= owner < layout.world_size for owner in owners)


@settings(max_examples=200)
@given(models(), RANKS)
def test_every_policy_covers_every_element_exactly_once(specs: list[ParamSpec], world_size: int) -> None:
    for policy in POLICIES:
        layout = plan(specs, world_size, policy)
        check_exact_cover(layout)
        assert layout.params == tuple(specs)
        assert layout.world_size == world_size
    whole = plan(specs, world_size, cut=False)
    check_exact_cover(whole)
    assert whole.cut_params == ()
    assert all(whole.is_whole(shard) for shard in whole.shards)
    check_exact_cover(plan(specs, world_size, lambda items, ranks: [item.index % ranks for item in items]))


@settings(max_examples=200)
@given(large_models())
@example((specs_of([1025] * 300), 2))
@example((specs_of([(33, 33)] * 300), 3))
@example((specs_of([(50_257, 64)], [(127,)] * 200), 32))
@example((specs_of([100_000 * 64 + 1]), 64))
def test_the_largest_rank_is_within_a_hundredth_of_the_mean(case: tuple[list[ParamSpec], int]) -> None:
    specs, world_size = case
    total = sum(item.numel for item in specs)
    assert total >= 100_000 * world_size
    owned = plan(specs, world_size, "element").elements_per_rank
    assert sum(owned) == total
    assert max(owned) * world_size / total <= 1.01


@settings(max_examples=100)
@given(models(), RANKS, st.booleans())
@example(specs_of([100] * 7), 3, True)
@example(specs_of([(), (0, 5), 3]), 8, False)
def test_whole_parameters_go_largest_first_to_the_lowest_least_loaded_rank(
    specs: list[ParamSpec], world_size: int, cut: bool
) -> None:
    layout = plan(specs, world_size, cut=cut)
    loads = [0] * world_size
    for item in sorted(specs, key=lambda item: (-item.numel, item.index)):
        least = loads.index(min(loads))
        assert [shard.owner for shard in layout.shards_of(item.index)] == [least], item.name
        loads[least] += item.numel
    assert tuple(loads) == layout.elements_per_rank


@settings(max_examples=75)
@given(models(), RANKS, st.data())
def test_a_group_added_later_moves_nothing(specs: list[ParamSpec], world_size: int, data: st.DataObject) -> None:
    groups = groups_of(specs)
    first = data.draw(st.integers(1, len(groups)))
    before, after = (list(itertools.chain(*part)) for part in (groups[:first], groups[first:]))
    cases: list[tuple[ShardBy, bool]] = [("parameter", True), ("parameter", False), ("element", True)]
    cases.append((lambda items, ranks: [item.numel % ranks for item in items], False))
    for shard_by, cut in cases:
        start = plan(before, world_size, shard_by, cut)
        grown = extend(start, after, world_size, shard_by, cut)
        assert grown.shards[: len(start.shards)] == start.shards
        # Groups that are whole are assigned together if they come together.
        assert shard_by == "parameter" or grown == plan(specs, world_size, shard_by, cut)


@settings(max_examples=200)
@given(st.integers(0, 5_000), RANKS, st.integers(0, 100_000))
def test_an_even_range_equals_dealing_out_units_one_by_one(numel: int, world_size: int, dealt: int) -> None:
    sizes = [0] * world_size
    turn = dealt // CUT_MULTIPLE
    for unit in range(0, numel, CUT_MULTIPLE):
        sizes[turn % world_size] += min(CUT_MULTIPLE, numel - unit)
        turn += 1
    ranges = [even_range(numel, world_size, dealt, rank) for rank in range(world_size)]
    assert [stop - start for start, stop in ranges] == sizes
    shards = plan(specs_of([numel]), world_size, "element").shards
    assert len(shards) == (1 if numel <= SLACK else min(world_size, -(-numel // CUT_MULTIPLE)))
    position = 0
    for rank in range(turn, turn + world_size):
        start, stop = ranges[rank % world_size]
        assert start == min(position, numel)
        position = stop
    assert position == numel


# What a layout says of itself.


def test_a_layout_answers_which_rank_owns_which_elements() -> None:
    layout = Layout(
        (spec(0, 200), spec(1, 5, dtype=torch.float64), spec(2, 0)),
        (Shard(0, 0, 128, 1), Shard(0, 128, 200, 0), Shard(1, 0, 5, 1), Shard(2, 0, 0, 2)),
        3,
    )
    assert layout.owned_by(0) == (Shard(0, 128, 200, 0),)
    assert layout.owned_by(1) == (Shard(0, 0, 128, 1), Shard(1, 0, 5, 1))
    assert layout.shards_of(0) == layout.shards[:2]
    assert layout.cut_params == (0,)
    assert [layout.is_whole(shard) for shard in layout.shards] == [False, False, True, True]
    assert layout.elements_per_rank == (72, 133, 0)
    assert layout.bytes_per_rank == (72 * 4, 128 * 4 + 5 * 8, 0)
    assert layout.imbalance == pytest.approx(133 * 3 / 205)


def test_printing_a_layout_shows_one_row_per_rank() -> None:
    layout = Layout(
        (spec(0, 1_500_000), spec(1, 500_000, dtype=torch.float64), spec(2, 1)),
        (Shard(0, 0, 960_000, 0), Shard(0, 960_000, 1_500_000, 1), Shard(1, 0, 500_000, 1), Shard(2, 0, 1, 0)),
        2,
    )
    title, header, *rows = str(layout).splitlines()
    assert title == "3 parameters, 2,000,001 elements on 2 ranks, 1 cut, largest/mean 1.040"
    assert header.split() == ["rank", "parameters", "pieces", "elements", "share", "bytes"]
    assert [row.split() for row in rows] == [
        ["0", "1", "1", "960,001", "48.0%", "3,840,004"],
        ["1", "1", "1", "1,040,000", "52.0%", "6,160,000"],
    ]
    assert len({len(row) for row in (header, *rows)}) == 1, "columns line up"


def test_every_part_of_a_layout_counts_for_its_digest() -> None:
    base = spec(0, (2, 100))
    divisions = [
        (Shard(0, 0, 128, 0), Shard(0, 128, 200, 1)),
        (Shard(0, 0, 128, 1), Shard(0, 128, 200, 0)),
        (Shard(0, 0, 64, 0), Shard(0, 64, 200, 1)),
        (Shard(0, 0, 200, 0),),
    ]
    others = [
        replace(base, name="other"),
        replace(base, shape=(100, 2), stride=(2, 1)),
        replace(base, stride=(1, 2)),
        replace(base, dtype=torch.int32),
        replace(base, group=1),
        replace(base, device_ordinal=1),
    ]
    variants = [Layout((base,), shards, 2) for shards in divisions]
    variants += [Layout((other,), divisions[0], 2) for other in others]
    variants.append(Layout((base,), divisions[0], 3))
    assert len({variant.digest() for variant in variants}) == len(variants)
    assert all(0 <= variant.digest() < 2**63 for variant in variants), "a digest fits into a signed word"


# What is refused.

NOT_COVERED = "'layer0'.*not covered exactly once"

BAD_SHARDS: dict[str, tuple[list[tuple[int, int, int]], str]] = {
    "nothing": ([], "'layer0' has 200 elements, but its ranges end at 0"),
    "a gap": ([(0, 64, 0), (128, 200, 1)], NOT_COVERED),
    "an overlap": ([(0, 128, 0), (64, 200, 1)], NOT_COVERED),
    "too short": ([(0, 128, 0)], "'layer0' has 200 elements, but its ranges end at 128"),
    "too long": ([(0, 201, 0)], "'layer0' has 200 elements, but its ranges end at 201"),
    "a late start": ([(64, 200, 0)], NOT_COVERED),
    "backwards": ([(0, -64, 0), (-64, 200, 1)], NOT_COVERED),
    "an empty range": ([(0, 0, 0), (0, 200, 1)], NOT_COVERED),
    "a cut elsewhere": ([(0, 100, 0), (100, 200, 1)], "'layer0' is cut at element 100.*multiples of 64"),
    "a rank too many": ([(0, 200, 2)], "'layer0' is given to rank 2, but there are 2 ranks"),
    "a negative rank": ([(0, 200, -1)], "'layer0' is given to rank -1"),
    "two ranges": ([(0, 64, 0), (64, 128, 1), (128, 200, 0)], "'layer0' gives rank 0 more than one range"),
}
"""Start, stop and owner of the shards of one parameter of 200 elements, on two ranks; and the error."""

BAD_LAYOUTS: dict[str, tuple[list[ParamSpec], tuple[Shard, ...], int, str]] = {
    **{
        name: ([spec(0, 200)], tuple(Shard(0, *shard) for shard in shards), 2, message)
        for name, (shards, message) in BAD_SHARDS.items()
    },
    "a stranger": ([spec(0, 200)], (Shard(0, 0, 200, 0), Shard(7, 0, 200, 0)), 2, "param=7.*belongs to no parameter"),
    "out of order": (specs_of([10, 10]), (Shard(1, 0, 10, 0), Shard(0, 0, 10, 0)), 1, "'layer0'"),
    "no rank": ([], (), 0, "world_size must be at least 1, got 0"),
    "two owners of nothing": ([spec(0, 0)], (Shard(0, 0, 0, 0), Shard(0, 0, 0, 1)), 2, "'layer0'"),
    "another index": ([spec(5, 10)], (Shard(5, 0, 10, 0),), 1, "'layer5'"),
}


@pytest.mark.parametrize("kind", BAD_LAYOUTS)
def test_a_layout_that_does_not_cover_exactly_or_contradicts_itself_is_refused(kind: str) -> None:
    specs, shards, ranks, message = BAD_LAYOUTS[kind]
    with pytest.raises(ValueError, match=message):
        Layout(tuple(specs), shards, ranks)


def test_a_function_sees_specs_and_ranks_and_decides_by_rank_or_by_shards() -> None:
    seen: list[tuple[list[ParamSpec], int]] = []

    def function(specs: Sequence[ParamSpec], world_size: int) -> list[int | list[Shard]]:
        seen.append((list(specs), world_size))
        pieces = [Shard(1, 64, 200, 0), Shard(1, 0, 64, 1)]
        return [pieces if item.index == 1 else world_size - 1 for item in specs]

    specs = specs_of([10, 200], [30])
    start = plan(specs[:2], 5, function)
    grown = extend(start, specs[2:], 5, function, splittable=False)
    assert seen == [(specs[:2], 5), (specs[2:], 5)]
    assert grown.shards == (Shard(0, 0, 10, 4), Shard(1, 0, 64, 1), Shard(1, 64, 200, 0), Shard(2, 0, 30, 4))


NO_OWNER = "group rank or shards of that parameter for 'layer1'"
BAD_ANSWERS: dict[str, tuple[object, str]] = {
    "a rank too many": ([0, 2], "'layer1' is given to rank 2, but there are 2 ranks"),
    "a negative rank": ([0, -1], "'layer1' is given to rank -1"),
    "None": ([0, None], f"{NO_OWNER}, got None"),
    "a name": ([0, "rank1"], f"{NO_OWNER}, got 'rank1'"),
    "a fraction": ([0, 0.5], f"{NO_OWNER}, got 0.5"),
    "ranks in a list": ([0, [0, 1]], NO_OWNER),
    "another parameter's shard": ([0, [Shard(0, 0, 200, 0)]], NO_OWNER),
    "nothing": (None, "shard_by function"),
    "no list": (3, "shard_by function"),
    "too few": ([0], "shard_by function returned 1 owners for 2 parameters"),
    "too many": ([0, 0, 0], "shard_by function returned 3 owners for 2 parameters"),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_a_function_that_answers_nonsense_is_refused_with_the_parameter(kind: str) -> None:
    answer, message = BAD_ANSWERS[kind]
    with pytest.raises((TypeError, ValueError), match=message):
        plan(specs_of([10, 200]), 2, lambda _specs, _ranks: answer)  # type: ignore[arg-type, return-value]


def test_planning_ten_thousand_parameters_over_a_thousand_ranks_takes_under_a_second() -> None:
    specs = specs_of([(200_000, 1_000), *[(257 + index % 4_000, 300 + index % 7) for index in range(9_999)]])
    start = time.process_time()
    layout = plan(specs, 1_024)
    assert time.process_time() - start < 1.0
    assert layout.cut_params == ()
