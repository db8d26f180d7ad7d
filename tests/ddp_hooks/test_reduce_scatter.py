"""The reduce-scatter hook: what owners get, uneven inputs, the type in which gradients travel, and failures."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from onecopy import PeerFailedError, ReduceScatter, ZeroRedundancyOptimizer, reduce_scatter_hook
from onecopy.comm import limits
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.data_parallel import as_if_large
from tests.support.ddp_training import (
    MOMENTUM,
    ROUNDING,
    TWO_ADAMWS,
    VIEW,
    Case,
    Part,
    Split,
    assert_same_state,
    assert_same_values,
    half_model,
    halving,
    loss_of,
    make_ddp,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    train_both,
)
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal, more_for_earlier_ranks, more_for_later_ranks


@pytest.mark.parametrize("direct_bytes", [16, 1 << 18], ids=["large", "small"])
@distributed(2, 3)
def test_around_a_hook_that_compresses_buckets_gradients_are_scaled_once(world_size: int, direct_bytes: int) -> None:
    """torch's wrapper gives the hook a float16 buffer of float32 gradients."""
    reference, compressed = plain_run(Case()), make_ddp(Case())
    zero = ZeroRedundancyOptimizer(compressed.parameters(), torch.optim.SGD, lr=0.1)
    compressed.register_comm_hook(zero, fp16_compress_wrapper(reduce_scatter_hook))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", direct_bytes)
        loss_of(compressed, 0).backward()
    reference.backward(0)
    for owned in zero.engine.inner.owned:
        gradient, plain = owned.param.grad, reference.params[owned.shard.param].grad
        assert isinstance(gradient, ShardGrad)
        assert plain is not None
        mean = plain.flatten()[owned.shard.start : owned.shard.stop]
        torch.testing.assert_close(gradient.local, mean, rtol=5e-3, atol=1e-4)


@distributed(3)
def test_in_a_narrow_type_gradients_are_scaled_and_added_up_as_in_ddps_hooks(world_size: int) -> None:
    run = scattered_run(Case(), reduce_dtype=torch.bfloat16)
    local = [grad.clone() for grad in torch.autograd.grad(loss_of(run.ddp.module, 0), run.params)]
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
            found = run.zero.engine.params[shard.param].grad
            assert isinstance(found, ShardGrad)
            assert torch.equal(found.local, (first + second + third).float())
            checked += shard.numel
    assert checked


@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["one bucket", "bucket views"])
@distributed(2)
def test_parameters_of_no_optimizer_get_whole_gradients(world_size: int, ddp: dict[str, Any]) -> None:
    case = Case(parts=(Part(params=matrices),), ddp=ddp)
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(3):
        for run in (ours, reference):
            run.ddp.zero_grad()
            run.iterate(step)
        for param, other in zip(ours.params, reference.params, strict=True):
            assert isinstance(param.grad, ShardGrad) == (param.dim() == 2)
            if param.dim() < 2:
                assert param.grad is not None
                assert other.grad is not None
                assert_equal([param.grad], [other.grad], "a parameter that no optimizer owns")


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@distributed(2, 3)
def test_a_pass_that_failed_on_all_ranks_with_messages_in_flight_leaves_nothing_behind(world_size: int) -> None:
    """Their messages are not taken for a later pass's gradients."""
    case = Case(ddp={"bucket_cap_mb": 1e-4})
    ours, reference = scattered_run(case), plain_run(case)
    with as_if_large():
        train_both(ours, reference, range(2))  # DDP makes its buckets anew after the first
        ours.ddp.zero_grad()
        handle = ours.params[0].register_hook(_fail)
        with pytest.raises(LookupError):
            ours.loss(50).backward()
        handle.remove()
        ours.ddp.zero_grad()
        # DDP itself cannot go on after that; another one can.
        ours.ddp = DistributedDataParallel(ours.ddp.module, **case.ddp)
        ours.ddp.register_comm_hook(ours.zero, reduce_scatter_hook)
        train_both(ours, reference, range(2, 5))
    assert_replicas_equal(ours.params)


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", MOMENTUM, scheduler=halving),
        Case("whole, in buckets", (Part(ours={"parameters_as_bucket_view": True, "shard_by": "parameter"}),), ddp=VIEW),
        Case("a list", TWO_ADAMWS),
        Case("some are nobody's", (Part(params=matrices),), ddp={}),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_uneven_inputs_equal_plain_ddp(world_size: int, case: Case, counts: Callable[[int], int]) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    for run in (reference, ours):
        with Join([run.ddp, *run.zeros]):
            for step in range(counts(dist.get_rank())):
                run.iterate(step)
    assert_same_values(ours, reference, "after uneven inputs")
    assert_same_state(ours, reference, to=max(range(world_size), key=counts))


SINGLE, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        (Case("", MOMENTUM), BF16, 2e-2),
        (Case("", MOMENTUM), FP16, 2e-3),
        (Case("", MOMENTUM), SINGLE, 0.0),
        (Case("", MOMENTUM, model=half_model), SINGLE, 2e-2),
    ],
    ids=["bfloat16", "float16", "float32", "half precision in float32"],
)
@distributed(2, 3)
def test_gradients_travel_in_the_type_that_was_chosen(
    world_size: int, case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    ours, reference = scattered_run(case, dtype), plain_run(case)
    for step in range(4):
        ours.iterate(step)
        reference.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", tolerance or ROUNDING * (world_size > 2))
    assert_replicas_equal(ours.params)
    different = any(not torch.equal(a, b) for a, b in zip(ours.params, reference.params, strict=True))
    assert different or dtype is SINGLE


@distributed(2)
def test_too_large_for_the_chosen_type_is_seen_by_a_scaler(world_size: int) -> None:
    ours = scattered_run(Case(model=Split, parts=MOMENTUM), FP16)
    scaler = make_scaler()
    scaler.scale(ours.ddp(1000.0, 1.0)).backward()
    scaler.step(ours.zero)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(ours.params, [torch.ones(40, 40), torch.ones(3)], "a skipped step")


@distributed(2)
def test_a_backward_pass_that_only_one_rank_makes(world_size: int) -> None:
    """The other rank never comes, as in ``if rank == 0:``: only the group's timeout ends it."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    ddp = make_ddp(Case())
    dist.barrier()  # the ranks begin together: three seconds may be short for one that is late
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    ddp.register_comm_hook(ReduceScatter(zero, ddp=ddp), reduce_scatter_hook)
    loss = loss_of(ddp, 0)
    if dist.get_rank() == 0:
        text = r"rank 0: backward\(\) has waited for the other ranks in vain.*one of them does not make this call"
        with pytest.raises(PeerFailedError, match=text):
            loss.backward()
    dist.barrier()
