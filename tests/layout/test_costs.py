"""Owners of whole parameters by the cost of their update."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy import ParamSpec, ZeroRedundancyOptimizer
from onecopy.layout import Layout, newton_schulz_cost, plan_buckets
from onecopy.layout.costs import owners_by_cost
from onecopy.layout.policies import extend
from tests.support.harness import distributed

Shapes = list[tuple[int, ...]]

MODELS: dict[str, Shapes] = {
    "GPT-2 124M": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "Llama-8B": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)] * 32,
    "MoE of 16 x 64 experts": ([*[(2048, 2048)] * 4, *[(1408, 2048), (1408, 2048), (2048, 1408)] * 64]) * 16,
    "ConvNet": [
        *[(64, 64, 3, 3)] * 6,
        (128, 64, 3, 3),
        *[(128, 128, 3, 3)] * 7,
        (256, 128, 3, 3),
        *[(256, 256, 3, 3)] * 11,
        (512, 256, 3, 3),
        *[(512, 512, 3, 3)] * 5,
    ],
}


def specs_of(shapes: Shapes) -> list[ParamSpec]:
    return [
        ParamSpec(index, f"p{index}", shape, (1,) * len(shape), torch.float32, cost=newton_schulz_cost(shape))
        for index, shape in enumerate(shapes)
    ]


def balance(specs: list[ParamSpec], owners: dict[int, int], world_size: int) -> tuple[float, float, int]:
    """The largest cost and number of elements over the mean, and the number of stacks of equal shape on all ranks."""
    costs, elements = [0.0] * world_size, [0] * world_size
    for spec in specs:
        costs[owners[spec.index]] += spec.cost
        elements[owners[spec.index]] += spec.numel
    stacks = {(owners[spec.index], spec.shape) for spec in specs}
    return max(costs) * world_size / sum(costs), max(elements) * world_size / sum(elements), len(stacks)


@pytest.mark.parametrize(
    ("model", "world_size", "cost", "elements", "stacks"),
    [
        ("GPT-2 124M", 4, 1.02, 1.03, 12),
        ("GPT-2 124M", 16, 1.01, 1.01, 36),
        ("Llama-8B", 8, 1.01, 1.05, 32),
        ("Llama-8B", 64, 1.06, 1.08, 149),
        ("MoE of 16 x 64 experts", 64, 1.02, 1.04, 192),
        ("ConvNet", 4, 1.13, 1.3, 15),
    ],
)
def test_known_models(model: str, world_size: int, cost: float, elements: float, stacks: int) -> None:
    specs = specs_of(MODELS[model])
    found = balance(specs, owners_by_cost(specs, [0.0] * world_size, [0] * world_size), world_size)
    assert found[0] <= cost
    assert found[1] <= elements
    assert found[2] <= stacks, "equal shapes are on more ranks than if each were dealt to the least-loaded one"


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40),
    st.integers(1, 9),
    st.lists(st.integers(0, 5000), min_size=9, max_size=9),
)
def test_no_worse_than_one_parameter_above_the_mean(shapes: Shapes, world_size: int, before: list[int]) -> None:
    specs, costs = specs_of(shapes), [float(each) for each in before[:world_size]]
    owners = owners_by_cost(specs, costs, [0] * world_size)
    assert set(owners) == set(range(len(specs)))
    total, elements = list(costs), [0] * world_size
    for spec in specs:
        total[owners[spec.index]] += spec.cost
        elements[owners[spec.index]] += spec.numel
    mean, largest = sum(total) / world_size, max(spec.cost for spec in specs)
    numel = sum(elements) / world_size
    if max(elements) <= 1.2 * numel:  # the cap on elements did not decide
        assert max(total) <= max(2 * (mean + largest), *costs)
    assert max(elements) <= max(1.3 * numel * 1.1, 2 * max(spec.numel for spec in specs) + 1.5 * numel)


@pytest.mark.timeout(30)
def test_one_rank_has_a_sum_that_is_rounded_up() -> None:
    costs = [0.1, 0.4, 0.2]
    assert sum(costs) < 0.4 + 0.2 + 0.1, "the order of the costs decides"
    specs = [ParamSpec(index, "p", (1,), (1,), torch.float32, cost=cost) for index, cost in enumerate(costs)]
    assert owners_by_cost(specs, [0.0], [0]) == {0: 0, 1: 0, 2: 0}


def test_groups_that_come_later_level_what_is_there() -> None:
    first = extend(None, specs_of([(64, 64)] * 3), 2, None, False)
    later = [ParamSpec(3, "late", (64, 64), (64, 1), torch.float32, 1, cost=newton_schulz_cost((64, 64)))]
    whole = extend(first, later, 2, None, False)
    assert sorted(shard.owner for shard in whole.shards) == [0, 0, 1, 1]


def test_level_3_places_matrices_by_cost_too() -> None:
    specs = [*specs_of([(512, 8)] * 4), ParamSpec(4, "square", (64, 64), (64, 1), torch.float32)]
    specs[4] = ParamSpec(4, "square", (64, 64), (64, 1), torch.float32, cost=newton_schulz_cost((64, 64)))
    layout, _ = plan_buckets(specs, range(5), 2, False, 1 << 20)
    assert isinstance(layout, Layout)
    square = layout.shards_of(4)[0].owner
    assert sum(shard.owner == square for shard in layout.shards) == 2, "a long matrix of as many elements costs less"


@distributed(2)
def test_the_class_or_the_user_tells_the_cost(world_size: int) -> None:
    matrices = [torch.nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (256, 16), (256, 16), (256, 16))]
    muon = ZeroRedundancyOptimizer(matrices, torch.optim.Muon)
    expected = [newton_schulz_cost(tuple(each.shape)) for each in matrices]
    assert [spec.cost for spec in muon.layout.params] == expected
    told = ZeroRedundancyOptimizer(matrices, torch.optim.Adafactor, cost=lambda shape: shape[0] ** 2)
    assert [spec.cost for spec in told.layout.params] == [64**2, 256**2, 256**2, 256**2]
    plain = ZeroRedundancyOptimizer(matrices, torch.optim.Adafactor)
    assert [spec.cost for spec in plain.layout.params] == [float(prod(each.shape)) for each in matrices]
    with pytest.raises(ValueError, match="cost must return a finite number"):
        ZeroRedundancyOptimizer(matrices, torch.optim.Adafactor, cost=lambda _: float("nan"))
    with pytest.raises(TypeError, match="cost must be a function of a shape"):
        ZeroRedundancyOptimizer(matrices, torch.optim.Adafactor, cost=1.0)  # type: ignore[arg-type]
