"""The reduce-scatter hook: owners get their gradients, ``step()`` updates, and training equals plain DDP."""

from __future__ import annotations

import gc
import weakref
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
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.ddp_training import (
    ADAMW,
    BRANCHING,
    ELEMENT,
    ROUNDING,
    SGD,
    TINY,
    VIEW,
    Branching,
    Counting,
    assert_same_state,
    assert_same_values,
    half_loss,
    half_model,
    make_ddp,
    train_both,
)
from tests.support.harness import distributed
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    more_for_earlier_ranks,
    more_for_later_ranks,
    small_loss,
    small_model,
)
from tests.support.reduce_scatter import (
    BUCKETS,
    MUON_AND_ADAMW,
    TWO_ADAMWS,
    Case,
    Part,
    Split,
    assert_parity,
    double_loss,
    double_model,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    vectors,
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


# Unused and frozen parameters


@distributed(2, 3)
def test_a_parameter_without_a_gradient_anywhere_is_left_alone(world_size: int) -> None:
    case = Case(**BRANCHING)
    ours, reference = scattered_run(case), plain_run(case)
    train_both(ours, reference, range(4))
    module = ours.ddp.module
    assert isinstance(module, Branching)
    untouched = make_ddp(case).module.get_parameter("never.weight")
    assert torch.equal(module.never.weight, untouched), "weight decay alone must not move it"
    assert module.never.weight not in ours.zero.state
    assert_same_state(ours, reference)


@distributed(2, 3)
def test_a_layer_frozen_half_way_stays_equal_to_plain_ddp(world_size: int) -> None:
    case = Case(**BRANCHING)
    ours, reference = scattered_run(case), plain_run(case)
    train_both(ours, reference, range(3))
    for trainable, steps in ((False, range(3, 6)), (True, range(6, 8))):
        for run in (ours, reference):
            run.ddp.module.get_submodule("middle").requires_grad_(trainable)
        train_both(ours, reference, steps)
    assert_same_state(ours, reference)


# A pass that fails


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@distributed(2, 3)
def test_a_pass_that_failed_on_all_ranks_with_messages_in_flight_leaves_nothing_behind(world_size: int) -> None:
    """Their messages are not taken for a later pass's gradients."""
    case = Case(ddp={"bucket_cap_mb": 1e-4})
    ours, reference = scattered_run(case), plain_run(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 16)
        patch.setattr("onecopy.comm.limits.REDUCE_MESSAGE_BYTES", 256)
        train_both(ours, reference, range(2))  # DDP makes its buckets anew after the first
        ours.ddp.zero_grad()
        handle = ours.params[0].register_hook(_fail)
        with pytest.raises(LookupError):
            small_loss(ours.ddp, 50).backward()
        handle.remove()
        ours.ddp.zero_grad()
        # DDP itself cannot go on after that; another one can.
        ours.ddp = DistributedDataParallel(ours.ddp.module, **case.ddp)
        ours.ddp.register_comm_hook(ours.zero, reduce_scatter_hook)
        train_both(ours, reference, range(2, 5))
    assert_replicas_equal(ours.params)


# Uneven inputs


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", (Part(torch.optim.SGD, SGD),), scheduled=True),
        Case("whole, in buckets", (Part(ours=BUCKETS),), ddp=VIEW, scheduled=True),
        Case("a list", TWO_ADAMWS),
        Case("some are nobody's", (Part(params=matrices),), ddp={}),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3, 4)
def test_uneven_inputs_equal_plain_ddp(world_size: int, case: Case, counts: Callable[[int], int]) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    count = counts(dist.get_rank())
    for run in (reference, ours):
        with Join([run.ddp, *run.zeros]):
            for step in range(count):
                run.iterate(step)
    assert_same_values(ours, reference, "after uneven inputs")
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference, to=max(range(world_size), key=counts))


# The type in which gradients travel


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, ROUNDING)]
)
@distributed(2, 3)
def test_gradients_travel_in_the_type_that_was_chosen(world_size: int, dtype: torch.dtype, tolerance: float) -> None:
    case = Case(parts=(Part(torch.optim.SGD, SGD),))
    ours, reference = scattered_run(case, dtype), plain_run(case)
    for step in range(4):
        ours.iterate(step)
        reference.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", tolerance)
    assert_replicas_equal(ours.params)
    different = any(not torch.equal(a, b) for a, b in zip(ours.params, reference.params, strict=True))
    if world_size == 2:
        assert different == (dtype is not torch.float32)


@distributed(2)
def test_half_precision_gradients_can_travel_in_single_precision(world_size: int) -> None:
    case = Case(model=half_model, loss=half_loss, parts=(Part(torch.optim.SGD, SGD),))
    ours, reference = scattered_run(case, torch.float32), plain_run(case)
    for step in range(3):
        ours.iterate(step)
        reference.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", 2e-2)


@distributed(2)
def test_too_large_for_the_chosen_type_is_seen_by_a_scaler(world_size: int) -> None:
    case = Case(model=Split, parts=(Part(torch.optim.SGD, SGD),))
    ours = scattered_run(case, torch.float16)
    scaler = make_scaler()
    scaler.scale(ours.ddp(1000.0, 1.0)).backward()
    scaler.step(ours.zero)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(ours.params, [torch.ones(40, 40), torch.ones(3)], "a skipped step")


# Groups that come later, and lifetime


@pytest.mark.parametrize("iterations", [0, 1, 3])
@distributed(2, 3)
def test_a_group_can_be_added_later(world_size: int, iterations: int) -> None:
    case = Case(parts=(Part(params=matrices),), ddp={})
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(iterations + 4):
        for run in (ours, reference):
            if step == iterations:
                run.optimizers[0].add_param_group({"params": vectors(run.ddp.module), "lr": 0.05})
            run.ddp.zero_grad()
            small_loss(run.ddp, step).backward()
            run.update()
        assert_same_values(ours, reference, f"iteration {step}")
    assert_same_state(ours, reference)


@pytest.mark.parametrize("parts", [(Part(),), TWO_ADAMWS], ids=["one", "a list"])
@distributed(2)
def test_nothing_is_left_behind_when_model_and_optimizers_go_away(world_size: int, parts: tuple[Part, ...]) -> None:
    ours = scattered_run(Case(parts=parts))
    for step in range(3):
        ours.iterate(step)
    remains: list[Any] = [weakref.ref(ours.ddp), weakref.ref(ours.params[0])]
    remains += [weakref.ref(optimizer) for optimizer in ours.optimizers]
    gc.collect()
    gc.disable()
    try:
        del ours
        assert [reference() for reference in remains] == [None] * len(remains)
    finally:
        gc.enable()


@distributed(2)
def test_a_backward_pass_that_only_one_rank_makes(world_size: int) -> None:
    """The other rank never comes, as in ``if rank == 0:``: only the group's timeout ends it."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    ddp = DistributedDataParallel(small_model())
    dist.barrier()  # the ranks begin together: three seconds may be short for one that is late
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    ddp.register_comm_hook(ReduceScatter(zero, ddp=ddp), reduce_scatter_hook)
    loss = small_loss(ddp, 0)
    if dist.get_rank() == 0:
        text = r"rank 0: backward\(\) has waited for the other ranks in vain.*one of them does not make this call"
        with pytest.raises(PeerFailedError, match=text):
            loss.backward()
    dist.barrier()
