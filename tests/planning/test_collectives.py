"""The collectives of a step from closed forms, next to the real layouts and plans of small numbers of ranks."""

from __future__ import annotations

import time
from itertools import pairwise
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from onecopy import ParamSpec
from onecopy.comm import limits
from onecopy.layout import bucket_sizes, even_range, extend, plan_buckets
from onecopy.planning.collectives import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    Collective,
    Kind,
    Way,
    collectives_of,
    ddp_buckets,
    is_padded,
    sharing_rounds,
    summary,
)
from onecopy.planning.model_shapes import Model, gpt2_small, gpt_xl, llama_70b, specs_of, wrapped_units
from onecopy.planning.ownership import even_lengths, owned_bytes
from onecopy.planning.peers import fsdp2_collectives, megatron_collectives

RANKS = st.integers(1, 40)
POLICIES = [("parameter", True), ("parameter", False), ("element", True)]
"""How parameters are divided, and whether they may be cut."""


@st.composite
def models(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters of several types, devices and groups, among them empty ones and scalars."""
    specs: list[ParamSpec] = []
    for group in range(draw(st.integers(1, 2))):
        for _ in range(draw(st.integers(1, 8))):
            shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 64, 100, 1333]), max_size=2)))
            dtype, device = draw(st.sampled_from([torch.float32, torch.bfloat16])), draw(st.integers(0, 1))
            stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            specs.append(ParamSpec(len(specs), f"p{len(specs)}", shape, stride, dtype, group, device))
    return specs


@given(models(), RANKS, st.booleans(), st.integers(1, 200_000))
def test_bucket_sizes_are_those_of_the_plan(
    specs: list[ParamSpec], ranks: int, splittable: bool, bucket_bytes: int
) -> None:
    order = list(reversed(range(len(specs))))
    _, plans = plan_buckets(specs, order, ranks, splittable, bucket_bytes)
    sizes = bucket_sizes(specs, order, ranks, splittable, bucket_bytes)
    assert [size.params for size in sizes] == [plan.params for plan in plans]
    assert [size.numel for size in sizes] == [plan.numel for plan in plans]
    for size, plan in zip(sizes, plans, strict=True):
        assert size.owners == sum(start < stop for start, stop in pairwise(plan.bounds))
        if splittable:
            assert plan.equal
            assert size.longest >= plan.longest
            assert size.longest == plan.longest or size.owners == 1, "one rank may own less than a full range"


@given(st.integers(1, 50_000), RANKS, st.integers(0, 10_000))
def test_even_lengths_are_those_of_even_range(numel: int, ranks: int, dealt: int) -> None:
    ranges = [even_range(numel, ranks, dealt, group_rank) for group_rank in range(ranks)]
    assert even_lengths(numel, ranks, dealt).tolist() == [stop - start for start, stop in ranges]


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
    assert owned_bytes(specs, parts[:2], ranks, *policy).tolist() == expected


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


def rounds_by_hand(owned: list[int], most: int) -> list[tuple[int, int]]:
    """Cut the bytes of all owners, one after the other, into rounds."""
    stream = [owner for owner, nbytes in enumerate(owned) for _ in range(nbytes)]
    rounds = [stream[start : start + most] for start in range(0, len(stream), most)]
    return [(len(each), len(set(each))) for each in rounds]


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
    else:
        assert rounds == rounds_by_hand(owned, most)


@given(models(), RANKS, st.booleans(), st.sampled_from([1, 3]))
def test_sharded_data_parallel_sends_the_buckets_of_the_plan(
    specs: list[ParamSpec], ranks: int, splittable: bool, replicas: int
) -> None:
    model = Model(tuple(specs), splittable, bucket_bytes=20_000)
    _, plans = plan_buckets(specs, model.order, ranks, splittable, 20_000)
    found = collectives_of(Way.SHARDED, model, ranks, replicas=replicas)
    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
        sent = [each for each in found if each.kind is kind]
        expected = []
        for plan in plans:
            itemsize = specs[plan.params[0]].dtype.itemsize
            owners = sum(start < stop for start, stop in pairwise(plan.bounds))
            nbytes = ranks * bucket_part(plan.numel, ranks) if splittable else plan.numel
            if plan.numel:
                expected.append(Collective(kind, nbytes * itemsize, ranks, 1 if splittable else owners))
        assert sent == (expected if kind is Kind.REDUCE_SCATTER else expected[::-1])
    kinds = summary(found)
    buckets = sum(bool(plan.numel) for plan in plans)
    assert kinds[Kind.FLAGS][:2] == ((2, 2) if replicas == 1 else (4, 4))
    assert kinds.get(Kind.ALL_REDUCE, (0, 0))[:2] == ((0, 0) if replicas == 1 else (buckets, buckets))


def bucket_part(numel: int, ranks: int) -> int:
    """The elements of one rank's range: all ranges but the last ones are as long, in units of 64."""
    return -(-numel // (64 * ranks)) * 64


@given(models(), st.integers(2, 40), st.sampled_from(POLICIES))
def test_with_ddp_every_byte_is_reduced_and_shared_once(
    specs: list[ParamSpec], ranks: int, policy: tuple[str, bool]
) -> None:
    model = Model(tuple(specs), policy[1], policy[0])
    total = model.nbytes
    for way in (Way.LEVEL_ONE, Way.OVERLAP, Way.REDUCE_SCATTER):
        found = collectives_of(way, model, ranks)
        reduced = sum(each.nbytes for each in found if each.kind.reduces_gradients)
        shared = sum(each.nbytes for each in found if each.kind.shares_parameters)
        allowed = limits.PADDING_BYTES_PER_RANK * (ranks - 1) * len(found)
        padded = max((1 + limits.MOST_PADDING) * total, total + allowed)
        assert total <= shared <= padded
        assert total <= reduced <= (padded if way is Way.REDUCE_SCATTER else total)
        assert summary(found)[Kind.FLAGS][0] == 1


def test_level_two_by_hand() -> None:
    shapes = {"a": (1 << 20,), "b": (1 << 20,)}  # 4 MiB each: two of DDP's buckets, of which the first is b
    model = Model(specs_of(shapes), splittable=False)
    found = collectives_of(Way.REDUCE_SCATTER, model, 2)
    half = 4 << 20
    assert found == (
        Collective(Kind.REDUCE_SCATTER, half, 2, 1),
        Collective(Kind.REDUCE_SCATTER, half, 2, 1),
        Collective(Kind.FLAGS, 152, 2),
        Collective(Kind.ALL_GATHER, 2 * half, 2, 1),
    )
    assert [each.sent_bytes for each in found[:2]] == [half / 2] * 2
    assert Collective(Kind.ALL_REDUCE, half, 4).sent_bytes == 2 * half * 3 / 4
    evenly = collectives_of(Way.REDUCE_SCATTER, Model(specs_of(shapes), shard_by="element"), 4)
    assert summary(evenly)[Kind.REDUCE_SCATTER] == (2, 2, 2 * half * 3 / 4)
    wide = summary(collectives_of(Way.LEVEL_ONE, model, 8))
    assert wide[Kind.ALL_GATHER] == (1, 2, 2 * half * 7 / 8), "two of eight ranks own something"


def test_between_pairs_an_operation_is_a_message_of_one_rank() -> None:
    model = Model(specs_of({"a": (4 << 20,)}))  # 16 MiB
    four = summary(collectives_of(Way.SHARDED, model, 4, pairwise=True))
    # A quarter of 4 MiB goes to each of three ranks, in a message of 4 MiB each; it comes back in one message each.
    assert four[Kind.REDUCE_SCATTER] == (1, 3, 12 << 20)
    assert four[Kind.ALL_GATHER] == (1, 3, 12 << 20)
    with_hook = summary(collectives_of(Way.REDUCE_SCATTER, model, 4, pairwise=True))
    assert with_hook[Kind.REDUCE_SCATTER] == (1, 3, 12 << 20)
    assert with_hook[Kind.BROADCAST] == (1, 3, 12 << 20)
    assert summary(collectives_of(Way.DDP, model, 4, pairwise=True)) == {Kind.ALL_REDUCE: (1, 6, 24 << 20)}


def test_torch_broadcasts_every_parameter() -> None:
    assert summary(collectives_of(Way.TORCH, gpt2_small(), 8))[Kind.BROADCAST][0] == 148


def test_impossible_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="replicas=2: only ShardedDataParallel takes a mesh, not 'DDP'"):
        collectives_of(Way.DDP, gpt2_small(), 8, replicas=2)
    with pytest.raises(ValueError, match="at least one rank and one replica, got 0 and 1"):
        collectives_of(Way.DDP, gpt2_small(), 0)


def test_the_bucket_size_follows_the_transport_and_the_ranks() -> None:
    mib = 1 << 20
    found = [limits.bucket_bytes(ranks, pairwise=False) // mib for ranks in (1, 64, 100, 512, 4096)]
    assert found == [64, 64, 100, 512, 512]
    assert limits.bucket_bytes(4096, pairwise=True) == limits.BUCKET_BYTES


def test_the_models_have_the_known_sizes() -> None:
    assert [(len(model.specs), model.elements) for model in (gpt2_small(), gpt_xl(), llama_70b())] == [
        (148, 124_439_808),
        (292, 1_315_723_264),
        (723, 68_976_648_192),
    ]


def test_the_calls_of_other_libraries() -> None:
    units = wrapped_units(gpt_xl().specs)
    assert len(units) == 25
    assert len(fsdp2_collectives(units, 8)) == 50
    assert len(fsdp2_collectives(units, 8, reshard_after_forward=True)) == 74
    tall = specs_of({"weight": (5, 3), "scale": ()})
    assert fsdp2_collectives([tall], 4)[0].nbytes == (8 * 3 + 4) * 4, "rows are padded to a multiple of the ranks"
    million = Model(specs_of({f"p{number}": (10**6,) for number in range(90)}))
    assert [len(megatron_collectives(million.specs, ranks)) for ranks in (8, 64, 512)] == [6, 4, 2]
    assert sum(each.nbytes for each in megatron_collectives(million.specs, 8)) == 2 * million.nbytes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_of_70_billion_elements_on_16384_ranks_takes_under_two_seconds(policy: tuple[str, bool]) -> None:
    model = Model(llama_70b().specs, policy[1], policy[0])
    for way in Way:
        start = time.process_time()
        collectives_of(way, model, 16_384)
        assert time.process_time() - start < 2, way
