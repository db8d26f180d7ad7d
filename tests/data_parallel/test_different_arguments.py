"""``ShardedDataParallel`` with different arguments on the ranks: an error on all ranks, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

from onecopy import (
    MixedPrecision,
    PeerFailedError,
    RanksDisagreeError,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
)
from tests.support.data_parallel import SMALL, Layers
from tests.support.failures import check_pool, expect_disagreement, failure_of
from tests.support.harness import distributed

# ShardedDataParallel

REDUCE_BF16 = MixedPrecision(reduce_dtype=torch.bfloat16)

WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "broadcast_buffers": ({}, {"broadcast_buffers": False}, "broadcast_buffers: True", "broadcast_buffers: False"),
    "bucket_bytes": ({}, {"bucket_bytes": SMALL + 1}, f"bucket_bytes: {SMALL}", f"bucket_bytes: {SMALL + 1}"),
    "overlap_forward": ({}, {"overlap_forward": True}, "overlap_forward: False", "overlap_forward: True"),
    "uses": (
        {"overlap_forward": True, "uses": {"last": ["first.weight"]}},
        {"uses": {"last": ["first"]}},
        r"uses: .*'first\.weight'",
        r"uses: .*'first'",
    ),
    "reduce_dtype": ({}, {"mixed_precision": REDUCE_BF16}, "reduce_dtype=None", "reduce_dtype=torch.bfloat16"),
    "cast_inputs": (
        {},
        {"mixed_precision": MixedPrecision(cast_inputs=False)},
        "mixed_precision: .*cast_inputs=True",
        "mixed_precision: .*cast_inputs=False",
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
@distributed(2, 3)
def test_wrapping_with_different_arguments_is_an_error(world_size: int, case: str) -> None:
    common, odd_arguments, text, odd_text = WRAPPED[case]
    odd, module = world_size - 1, Layers()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=1e-2)
    arguments = {"bucket_bytes": SMALL, **common, **(odd_arguments if dist.get_rank() == odd else {})}
    prefix = "" if ":" in text else "mixed_precision: .*"
    call = lambda: ShardedDataParallel(module, optimizer, **arguments)  # noqa: E731
    expect_disagreement(odd, call, prefix + text, prefix + odd_text)
    check_pool()


@distributed(2)
def test_a_mesh_on_one_rank_only_is_an_error(world_size: int) -> None:
    module, mesh = Layers(), init_device_mesh("cpu", (1, world_size))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, process_group=mesh.get_group(1), lr=1e-2)
    mine = mesh if dist.get_rank() == 1 else None
    expect_disagreement(1, lambda: ShardedDataParallel(module, optimizer, mesh=mine), "mesh: None", r"mesh: \(1, 2\)")


@distributed(4)
def test_an_argument_that_one_rank_of_a_mesh_is_refused_is_an_error_in_all_replicas(world_size: int) -> None:
    module, mesh = Layers(), init_device_mesh("cpu", (2, 2))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, process_group=mesh.get_group(1), lr=1e-2)
    for odd_arguments, own, text in (
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be a positive"),
        ({"bucket_bytes": SMALL}, RanksDisagreeError, f"bucket_bytes: {SMALL}"),
    ):
        mine: Any = odd_arguments if dist.get_rank() == 3 else {}
        error = failure_of(lambda mine=mine: ShardedDataParallel(module, optimizer, mesh=mesh, **mine))  # type: ignore[misc]
        assert type(error) in ((own,) if dist.get_rank() == 3 else (own, PeerFailedError)), repr(error)
        assert text in str(error)
