"""The collectives of a step from closed forms, next to the real layouts and plans of small numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from onecopy import ParamSpec
from onecopy.comm import limits
from onecopy.layout import extend, plan_buckets
from onecopy.planning.collectives import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    Collective,
    Kind,
    Way,
    collectives_of,
    ddp_buckets,
    is_padded,
    owned_bytes,
    sharing_rounds,
)
from onecopy.planning.memory import buffer_bytes, memory_bytes
from onecopy.planning.models import Model, specs_of
from tests.planning import table
from tests.support.paths import ROOT

RANKS = st.integers(1, 40)
POLICIES = [("parameter", True), ("parameter", False), ("element", True)]
"""How parameters are divided, and whether they may be cut."""


SHAPES = st.lists(st.sampled_from([0, 1, 3, 64, 100, 1333]), max_size=2).map(tuple)
PARAMS = st.lists(
    st.tuples(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1), st.integers(0, 1)),
    min_size=1,
    max_size=12,
)
"""Parameters of several shapes, types, groups and devices, among them empty ones and scalars."""


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    specs = []
    for index, (shape, dtype, group, device) in enumerate(sorted(draw(PARAMS), key=lambda param: param[2])):
        stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        specs.append(ParamSpec(index, f"p{index}", shape, stride, dtype, group, device))
    return specs


@given(models(), RANKS, st.sampled_from(POLICIES), st.data())
def test_owned_bytes_are_those_of_the_layout(
    specs: list[ParamSpec], ranks: int, policy: tuple[str, bool], data: st.DataObject
) -> None:
    parts: list[list[int]] = [[], [], []]  # the parameters of the last one are left out
    for index in range(len(specs)):
        parts[data.draw(st.integers(0, 2))].append(index)
    layout = extend(None, specs, ranks, *policy)
    expected = [[0] * ranks for _ in parts[:2]]
    for row, params in zip(expected, parts, strict=False):
        for shard in layout.shards:
            if shard.param in params:
                row[shard.owner] += shard.numel * specs[shard.param].dtype.itemsize
    model = Model(tuple(specs), policy[1], policy[0])
    assert owned_bytes(model, parts[:2], ranks).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 12 << 20), st.booleans()), min_size=1, max_size=40))
def test_ddp_closes_the_same_buckets(sizes: list[tuple[int, bool]]) -> None:
    dtypes = [torch.float32 if full else torch.bfloat16 for _, full in sizes]
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for (numel, _), dtype in zip(sizes, dtypes, strict=True)]
    # DDP rebuilds its buckets from the gradients in the order in which they were ready.
    order = list(reversed(range(len(sizes))))
    expected, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        [tensors[index] for index in order], [DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES], [False] * len(order), order
    )
    specs = [ParamSpec(i, f"p{i}", (t.numel(),), (1,), t.dtype) for i, t in enumerate(tensors)]
    # The rest of each data type comes last, in no order.
    assert sorted(ddp_buckets(specs, order)) == sorted(expected)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=20), st.integers(1, 100))
@example([10] * 16, 32)
@example([10] * 15 + [11], 32)
def test_a_round_sends_at_most_a_bucket(owned: list[int], most: int) -> None:
    sizes = torch.tensor(owned)
    rounds = sharing_rounds(sizes, most)
    assert all(nbytes <= most for nbytes, _ in rounds)
    if is_padded(sizes):
        padding = len(owned) * max(owned) - sum(owned)
        assert padding <= max(sum(owned) / 16, limits.PADDING_BYTES_PER_RANK * (len(owned) - 1))
        assert sum(nbytes for nbytes, _ in rounds) == len(owned) * max(owned)
        assert {operations for _, operations in rounds} <= {1}
    else:  # the bytes of all owners, one after the other, are cut
        stream = [owner for owner, nbytes in enumerate(owned) for _ in range(nbytes)]
        cut = [stream[start : start + most] for start in range(0, len(stream), most)]
        assert rounds == [(len(each), len(set(each))) for each in cut]


def sent_by_kind(collectives: Sequence[Collective]) -> dict[Kind, tuple[int, int, float]]:
    """The calls, the operations and the bytes that a rank sends."""
    found: dict[Kind, tuple[int, int, float]] = {}
    for each in collectives:
        calls, operations, sent = found.get(each.kind, (0, 0, 0.0))
        found[each.kind] = (calls + 1, operations + each.operations, sent + each.sent_bytes)
    return found


@given(models(), RANKS, st.booleans())
def test_level_3_sends_the_buckets_of_the_plan(specs: list[ParamSpec], ranks: int, splittable: bool) -> None:
    model = Model(tuple(specs), splittable, bucket_bytes=20_000)
    _, plans = plan_buckets(specs, model.order, ranks, splittable, 20_000)
    found = collectives_of(Way.LEVEL_3, model, ranks)
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        expected = []
        for plan in plans:
            owners = sum(start < stop for start, stop in pairwise(plan.bounds))
            if plan.numel:
                nbytes = plan.padded_numel * specs[plan.params[0]].dtype.itemsize
                expected.append(Collective(kind, nbytes, ranks, 1 if plan.equal else owners))
        sent = [each for each in found if each.kind is kind]
        assert sent == (expected if kind is Kind.REDUCE_SCATTER else expected[::-1])
    assert sent_by_kind(found)[Kind.VOTE][:2] == (2, 2)


def test_the_traffic_of_all_ways() -> None:
    model = Model(specs_of({"large": (600_000,), "small": (400_000,)}))  # 4 MB
    for way, passes in {Way.DDP: 2, Way.LEVEL_1: 3, Way.OVERLAP: 3, Way.LEVEL_2: 2, Way.LEVEL_3: 2}.items():
        found = collectives_of(way, model, 4)
        assert sum(each.sent_bytes for each in found) == pytest.approx(passes * 4e6 * 3 / 4, rel=1e-3), way
        votes = sum(each.kind is Kind.VOTE for each in found)
        assert votes == {Way.DDP: 0, Way.LEVEL_3: 2}.get(way, 1), way
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        collectives_of(Way.DDP, model, 0)


# The bytes of one rank by kind; tests/step/test_memory_report.py compares them with real tensors

MIB = 1 << 20


@pytest.mark.parametrize(
    ("way", "splittable", "gradients", "state"),
    [
        (Way.LEVEL_2, True, 4e6, 2e6),
        (Way.LEVEL_3, True, 1e6, 2e6),
        (Way.LEVEL_1, False, 4e6, 0.6 * 8e6),
        (Way.LEVEL_3, False, 0.6 * 4e6, 0.6 * 8e6),
    ],
)
def test_memory_by_kind(way: Way, splittable: bool, gradients: float, state: float) -> None:
    """A model of 4 MB, of which one parameter is 60%, on 4 ranks."""
    model = Model(specs_of({"large": (600_000,), "small": (400_000,)}), splittable)
    found = memory_bytes(way, model, 4, 8, 4)
    assert (found["parameters"], found["gradients"]) == pytest.approx((4e6, gradients))
    assert (found["state"], found["master weights"]) == pytest.approx((state, state / 2))


def test_buffers_are_bounded() -> None:
    model, embedding = table.gpt_xl(), 50257 * 2048 * 2
    sizes = [sum(model.specs[index].nbytes for index in bucket) for bucket in ddp_buckets(model.specs, model.order)]
    two_buckets = max(one + other for one, other in pairwise(sizes))
    for way, ranks, expected in (
        (Way.DDP, 8, 0),
        (Way.LEVEL_1, 8, 2 * 64 * MIB),
        (Way.LEVEL_2, 8, 2 * 64 * MIB + two_buckets * (1 + 1 / 8)),  # a copy of two of DDP's buckets, and a part
        (Way.LEVEL_3, 8, embedding),
        (Way.LEVEL_3, 512, 2 * 512 * MIB),
    ):
        assert buffer_bytes(way, model, ranks) == pytest.approx(expected), way


def test_the_tables_of_the_page_are_the_generated_ones(tmp_path: Path) -> None:
    page, copy = ROOT / "docs/accelerators.md", tmp_path / "page.md"
    copy.write_text(page.read_text())
    table.write(copy, "collectives", table.tables())
    assert copy.read_text() == page.read_text(), f"run python -m tests.planning.table {page}"
