"""The ``bucket`` policy on generated models, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onecopy import Layout, ParamSpec
from onecopy.comm.limits import BUCKET_BYTES
from onecopy.layout import CUT_MULTIPLE, BucketPlan, plan_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters of several types and devices, among them empty ones and scalars."""
    specs: list[ParamSpec] = []
    for _ in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 64, 100, 333]), max_size=2)))
        dtype, device = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1))
        for _ in range(draw(st.integers(1, 4))):
            stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            index = len(specs)
            specs.append(ParamSpec(index, f"layer{index}", shape, stride, dtype, 0, device))
    return specs


def check(specs: Sequence[ParamSpec], layout: Layout, plans: Sequence[BucketPlan], world_size: int) -> None:
    """Check the properties that hold whether or not parameters are cut."""
    assert sorted(index for plan in plans for index in plan.params) == list(range(len(specs)))
    for plan in plans:
        assert len(plan.bounds) == world_size + 1
        assert plan.bounds[0] == 0
        assert all(start <= stop for start, stop in pairwise(plan.bounds))
        assert plan.longest == max(plan.range_of(rank)[1] - plan.range_of(rank)[0] for rank in range(world_size))
        assert len({(specs[index].dtype, specs[index].device_ordinal) for index in plan.params}) == 1
        end = 0
        for index, offset in zip(plan.params, plan.offsets, strict=True):
            assert offset >= end, "two parameters overlap"
            assert offset % CUT_MULTIPLE == 0
            end = offset + specs[index].numel
            for shard in layout.shards_of(index):
                low, high = plan.range_of(shard.owner)
                if shard.numel:
                    assert low <= offset + shard.start <= offset + shard.stop <= high
        assert end == plan.numel


@given(models(), st.integers(1, 64), st.booleans(), st.integers(1, 200_000), st.randoms())
def test_every_parameter_is_in_one_bucket_and_owned_once(
    specs: list[ParamSpec], world_size: int, splittable: bool, bucket_bytes: int, random: object
) -> None:
    order = list(range(len(specs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    layout, plans = plan_buckets(specs, order, world_size, splittable, bucket_bytes)
    check(specs, layout, plans, world_size)
    assert sum(layout.elements_per_rank) == sum(spec.numel for spec in specs)
    if not splittable:
        assert not layout.cut_params
    for plan in plans:
        # Small parameters of an owner lie together, so that their gradients are one message.
        held = [index for index in plan.params if specs[index].numel]
        places = [(0 if splittable else layout.shards_of(index)[0].owner, -specs[index].numel) for index in held]
        assert places == sorted(places)
        sizes = [specs[index].nbytes for index in plan.params]
        assert len(sizes) == 1 or max(sizes) < bucket_bytes, "a large parameter shares a bucket"
        assert sum(sizes) < 2 * bucket_bytes or len(sizes) == 1
    assert (layout, plans) == plan_buckets(specs, order, world_size, splittable, bucket_bytes)


@given(
    st.integers(1, 64),
    st.lists(st.sampled_from([1, 64, 100, 1000, 4096, 65_536, 1_000_003]), min_size=1, max_size=10),
)
@settings(max_examples=60)
def test_parameters_that_may_be_cut_are_divided_evenly(world_size: int, sizes: list[int]) -> None:
    """Where every rank has 100,000 elements, the largest share is at most a hundredth over the mean."""
    while sum(sizes) < 100_000 * world_size:
        sizes = [1_000_003, *sizes]
    specs = [ParamSpec(index, str(index), (size,), (1,), torch.float32) for index, size in enumerate(sizes)]
    layout, plans = plan_buckets(specs, list(reversed(range(len(specs)))), world_size, True, BUCKET_BYTES)
    check(specs, layout, plans, world_size)
    assert layout.imbalance <= 1.01
