"""The reduce-scatter hook: owners get their gradients, ``step()`` updates, and training equals plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

from onecopy import ZeroRedundancyOptimizer, reduce_scatter_hook
from onecopy.comm import limits
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.ddp_training import (
    ADAMW,
    BRANCHING,
    ELEMENT,
    ROUNDING,
    SGD,
    TINY,
    VIEW,
    Counting,
    half_loss,
    half_model,
    make_ddp,
)
from tests.support.harness import distributed
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    small_loss,
)
from tests.support.reduce_scatter import (
    BUCKETS,
    MUON_AND_ADAMW,
    TWO_ADAMWS,
    Case,
    Part,
    assert_parity,
    double_loss,
    double_model,
    matrices,
    plain_run,
    scattered_run,
)

CASES = (
    Case("cut"),
    Case("cut, default buckets", ddp={}),
    Case("cut, in buckets", (Part(ours={**ELEMENT, **BUCKETS}),)),
    Case("cut, in buckets, gradients are views", (Part(ours={**ELEMENT, **BUCKETS}),), ddp=VIEW),
    Case("whole", (Part(ours={}),)),
    Case("whole, in buckets", (Part(torch.optim.SGD, SGD, BUCKETS),)),
    Case("whole, gradients are views", (Part(torch.optim.SGD, SGD, {}),), ddp=VIEW),
    Case("gradients are views, set to zero", ddp=VIEW, set_to_none=False),
    Case("fused", (Part(options={**ADAMW, "fused": True}),), scheduled=True),
    Case("static graph", ddp={"static_graph": True, "bucket_cap_mb": TINY}),
    Case("a list", MUON_AND_ADAMW, tolerance=1e-3),
    Case("a list, gradients are views", MUON_AND_ADAMW, ddp=VIEW, scheduled=True, tolerance=1e-3),
    Case("a list, all in one bucket", TWO_ADAMWS, ddp={}),
    Case("some parameters are nobody's", (Part(params=matrices),)),
    Case("some parameters are nobody's, in one bucket", (Part(params=matrices),), ddp={}),
    Case("unused parameters", **BRANCHING),
    Case("unused parameters, whole", (Part(ours={}),), **BRANCHING),
    Case("unused parameters, set to zero", **BRANCHING, set_to_none=False),
    Case("accumulation", passes=3),
    Case("accumulation in bucket views", ddp=VIEW, passes=3),
    Case("accumulation, in one bucket, whole", (Part(ours={}),), ddp={}, passes=2),
    Case("accumulation with unused parameters", **BRANCHING, passes=3),
    Case("double precision", model=double_model, loss=double_loss),
    Case("half precision", model=half_model, loss=half_loss, tolerance=2e-2),
    Case("counters", (Part(Counting, {"lr": 0.1}, {**ELEMENT, "elementwise": True}),)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(2)
def test_training_equals_plain_ddp(world_size: int, case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(3)
def test_three_ranks_equal_plain_ddp_within_rounding(world_size: int, case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", [Case("a list", TWO_ADAMWS), Case("unused", **BRANCHING)], ids=lambda case: case.name)
@distributed(1, 4)
def test_one_and_four_ranks_equal_plain_ddp(world_size: int, case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize(
    "case",
    [Case("cut"), Case("whole", (Part(ours={}),)), Case("a list", TWO_ADAMWS, ddp={}), Case("unused", **BRANCHING)],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_the_collective_of_other_backends_gives_the_same_within_rounding(world_size: int, case: Case) -> None:
    reference = plain_run(case)
    with as_on_accelerators():
        ours = scattered_run(case)
        for step in range(5):
            reference.iterate(step)
            ours.iterate(step)
            assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)
    assert_replicas_equal(ours.params)


@distributed(4)
def test_a_subgroup_whose_ranks_are_numbered_otherwise_equals_plain_ddp(world_size: int) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    case = Case(parts=TWO_ADAMWS)
    ours, reference = scattered_run(case, process_group=group), plain_run(case, process_group=group)
    for step in range(4):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}")


@pytest.mark.parametrize("direct_bytes", [16, 1 << 18], ids=["large", "small"])
@distributed(2, 3)
def test_around_a_hook_that_compresses_buckets_gradients_are_scaled_once(world_size: int, direct_bytes: int) -> None:
    """torch's wrapper gives the hook a float16 buffer of float32 gradients."""
    case = Case("one")
    reference, compressed = plain_run(case), make_ddp(case)
    zero = ZeroRedundancyOptimizer(compressed.parameters(), torch.optim.SGD, lr=0.1)
    compressed.register_comm_hook(zero, fp16_compress_wrapper(reduce_scatter_hook))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", direct_bytes)
        small_loss(compressed, 0).backward()
    reference.backward(0)
    for param, plain in zip(zero.engine.params, reference.params, strict=True):
        shards = [shard for shard in zero.engine.layout.shards if zero.engine.params[shard.param] is param]
        for shard in shards:
            if shard.owner == zero.rank:
                assert isinstance(param.grad, ShardGrad)
                assert plain.grad is not None
                own, mean = param.grad.local, plain.grad.flatten()[shard.start : shard.stop]
                torch.testing.assert_close(own, mean, rtol=5e-3, atol=1e-4)


@distributed(3)
def test_in_a_narrow_type_gradients_are_scaled_and_added_up_as_in_ddps_hooks(world_size: int) -> None:
    case = Case("one")
    run = scattered_run(case, reduce_dtype=torch.bfloat16)
    local = [grad.clone() for grad in torch.autograd.grad(small_loss(run.ddp.module, 0), run.params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 16)
        run.backward(0)
    checked = 0
    for shard in run.zero.engine.layout.shards:
        gradient = local[shard.param].flatten()[shard.start : shard.stop]
        rows = [torch.empty_like(gradient) for _ in range(world_size)]
        dist.all_gather(rows, gradient.clone())
        if shard.owner == run.zero.rank:
            first, second, third = (row.bfloat16() * (1 / 3) for row in rows)  # as DDP's compression hooks do it
            expected = (first + second + third).float()
            found = run.zero.engine.params[shard.param].grad
            assert isinstance(found, ShardGrad)
            assert torch.equal(found.local, expected)
            checked += shard.numel
    assert checked


# What is in the gradients after backward


@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["one bucket", "bucket views"])
@distributed(2)
def test_parameters_of_no_optimizer_get_whole_gradients(world_size: int, ddp: dict[str, Any]) -> None:
    case = Case(parts=(Part(params=matrices),), ddp=ddp)
    scattered, reference = scattered_run(case), plain_run(case)
    for step in range(3):
        for run in (scattered, reference):
            run.ddp.zero_grad()
            run.backward(step)
        for param, other in zip(scattered.params, reference.params, strict=True):
            assert isinstance(param.grad, ShardGrad) == (param.dim() == 2)
            if param.dim() < 2:
                assert param.grad is not None
                assert other.grad is not None
                assert_equal([param.grad], [other.grad], "a parameter that no optimizer owns")
        for run in (scattered, reference):
            run.update()
