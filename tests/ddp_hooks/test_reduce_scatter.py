"""The reduce-scatter hook: ``param.grad`` is always that of plain DDP; uneven inputs, types that are sent, failures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from onecopy import RanksDisagreeError, reduce_scatter_hook
from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from onecopy.step.sharded_gradient import ShardGrad
from tests.support.data_parallel import (
    BRANCHING,
    MOMENTUM,
    ROUNDING,
    SGD,
    STATIC,
    Branching,
    Case,
    Part,
    Run,
    Split,
    as_if_large,
    assert_same_values,
    half_model,
    make_scaler,
    matrices,
    plain_run,
    scattered_run,
    sharded_run,
    train_both,
    vectors,
)
from tests.support.failures import failure_of
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal

# What is in the gradients


def set_to_none(run: Run, step: int) -> None:
    run.model.zero_grad()
    run.loss(step).backward()


def set_to_zero(run: Run, step: int) -> None:
    run.model.zero_grad(set_to_none=False)
    run.loss(step).backward()


def keep(run: Run, step: int) -> None:
    run.loss(step).backward()


def freeze(run: Run, step: int) -> None:
    """A gradient that is kept while its parameter is frozen is not averaged again."""
    for param in run.params:
        param.grad = None if param.requires_grad else param.grad
    run.loss(step).backward()
    run.model.module.get_submodule("middle").requires_grad_(False)


GRAPHS: dict[str, dict[str, Any]] = {
    "all used": {},
    "unused parameters": BRANCHING,
    "some are nobody's": {"parts": (Part(params=matrices),), "ddp": {}},
    "static graph": {"model": Branching, "ddp": STATIC},
}
USED = ("all used", "unused parameters", "static graph")
MODES = [
    *itertools.product((False, True), USED, (set_to_none, set_to_zero, keep)),
    *itertools.product((False, True), ("unused parameters",), (freeze,)),
    *itertools.product((False, True), ("some are nobody's",), (set_to_none,)),
]


def compare_gradients(ours: Run, reference: Run, tolerance: float, what: str) -> None:
    """Every gradient exists where plain DDP has one, and has its values in the range that this rank owns.

    The gradient of a parameter that no optimizer has is whole.
    """
    sharded = {id(param) for zero in ours.zeros for param in zero.engine.params}
    owned = {id(entry.param): entry.shard for zero in ours.zeros for entry in zero.engine.inner.owned}
    for param, plain in zip(ours.params, reference.params, strict=True):
        assert (param.grad is None) == (plain.grad is None), what
        if plain.grad is not None:
            assert param.grad is not None
            assert isinstance(param.grad, ShardGrad) == (id(param) in sharded)
            found, expected = param.grad, plain.grad
            if isinstance(found, ShardGrad):
                shard = owned.get(id(param))
                found, expected = found.local, expected.flatten()[slice(shard.start, shard.stop) if shard else slice(0)]
            assert_equal([found], [expected], what, tolerance)


@pytest.mark.parametrize(
    ("view", "graph", "backward"),
    MODES,
    ids=[f"{'views' if view else 'copies'}, {graph}, {backward.__name__}" for view, graph, backward in MODES],
)
@distributed(2, 3)
def test_gradients_and_parameters_equal_plain_ddp(
    world_size: int, view: bool, graph: str, backward: Callable[[Run, int], None]
) -> None:
    case = Case(**GRAPHS[graph])
    ours, reference = (run(case, gradient_as_bucket_view=view) for run in (scattered_run, plain_run))
    tolerance = 0.0 if world_size == 2 and backward in (set_to_none, set_to_zero) else ROUNDING
    for step in range(8):
        for run in (reference, ours):
            backward(run, step)
        compare_gradients(ours, reference, tolerance, f"gradients of step {step}")
        for run in (reference, ours):
            run.update()
        assert_equal(ours.params, reference.params, f"step {step}", tolerance)
    assert_replicas_equal(ours.params)


@distributed(2)
def test_a_gradient_that_one_rank_alone_keeps_is_no_error(world_size: int) -> None:
    """The other rank has zeroed it: the mean of the pass is added to what each owner has kept."""
    ours = scattered_run(Case(**BRANCHING), gradient_as_bucket_view=True)
    ours.iterate(0)
    if dist.get_rank() == 0:
        ours.model.zero_grad()
    ours.loss(2).backward()  # all parameters are used on some rank
    ours.update()
    assert_replicas_equal(ours.params)


@distributed(2)
def test_reduced_gradients_to_which_a_pass_without_sync_has_added_are_refused(world_size: int) -> None:
    ours = scattered_run(Case())
    ours.iterate(0)
    with ours.model.no_sync():
        ours.loss(1).backward()
    for use in (ours.update, ours.zero.grad_norm, lambda: torch.nn.utils.clip_grad_norm_(ours.params, 1.0)):
        with pytest.raises(RuntimeError, match=r"was not reduced: the last backward pass ran under no_sync\(\)"):
            use()
    ours.loss(2).backward()
    ours.update()
    assert_replicas_equal(ours.params)


@pytest.mark.parametrize("use", ["norm", "scaler"])
@distributed(2)
def test_ranks_without_inputs_are_missed_by_a_norm_and_a_scaler(world_size: int, use: str) -> None:
    """They take no norm and unscale nothing: all ranks raise, instead of waiting for each other."""
    ours, scaler = scattered_run(Case()), make_scaler()

    def train() -> None:
        with Join([ours.ddp, *ours.zeros]):
            for step in range(1 + 2 * dist.get_rank()):
                ours.zero.zero_grad()
                loss = ours.loss(step)
                (scaler.scale(loss) if use == "scaler" else loss).backward()
                if step:
                    torch.nn.utils.clip_grad_norm_(ours.params, 1.0) if use == "norm" else scaler.unscale_(ours.zero)
                ours.update()

    assert isinstance(failure_of(train), RanksDisagreeError)


@pytest.mark.parametrize("direct_bytes", [16, 1 << 18], ids=["large", "small"])
@distributed(2, 3)
def test_around_a_hook_that_compresses_buckets_gradients_are_scaled_once(world_size: int, direct_bytes: int) -> None:
    """torch's wrapper gives the hook a float16 buffer of float32 gradients."""
    reference, ours = plain_run(Case()), sharded_run(Case())
    ours.ddp.register_comm_hook(ours.zero, fp16_compress_wrapper(reduce_scatter_hook))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", direct_bytes)
        for run in (reference, ours):
            run.backward(0)
    compare_gradients(ours, reference, 1e-3, "in float16")


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@distributed(2, 3)
def test_a_pass_that_failed_on_all_ranks_with_messages_in_flight_leaves_nothing_behind(world_size: int) -> None:
    """Their messages are not taken for a later pass's gradients."""
    case = Case(ddp={"bucket_cap_mb": 1e-4})
    ours, reference = scattered_run(case), plain_run(case)
    with as_if_large():
        train_both(ours, reference, range(2))  # DDP makes its buckets anew after the first
        ours.model.zero_grad()
        handle = ours.params[0].register_hook(_fail)
        with pytest.raises(LookupError):
            ours.loss(50).backward()
        handle.remove()
        ours.model.zero_grad()
        # DDP itself cannot go on after that; another one can.
        ours.model = DistributedDataParallel(ours.model.module, **case.ddp)
        ours.ddp.register_comm_hook(ours.zero, reduce_scatter_hook)
        train_both(ours, reference, range(2, 5))
    assert_replicas_equal(ours.params)


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
    scaler.scale(ours.model(1000.0, 1.0)).backward()
    scaler.step(ours.zero)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(ours.params, [torch.ones(40, 40), torch.ones(3)], "a skipped step")


# Norms, clipping and gradient scaling; data_parallel/test_training_loops.py has more of it


def unscale(run: Run) -> None:
    scaler = make_scaler(2.0)
    scaler.scale(torch.ones(()))  # makes the factor
    scaler.unscale_(run.zero)


CHANGES: dict[str, Callable[[Run], object]] = {
    "gradients": lambda run: [param.grad.mul_(0.5) for param in run.params],  # type: ignore[union-attr]
    "ranges": lambda run: [param.grad.local.mul_(0.5) for param in run.params],  # type: ignore[union-attr]
    "unscaled": unscale,
    "another pass": lambda run: run.backward(9),
}


@pytest.mark.parametrize("change", CHANGES)
@distributed(2)
def test_all_norms_take_one_reduction_and_are_computed_again_after_a_write(world_size: int, change: str) -> None:
    ours, reference = scattered_run(Case()), plain_run(Case())
    for run in (ours, reference):
        run.backward(0)
    all_reduce = Collectives.all_reduce
    with mock.patch.object(Collectives, "all_reduce", autospec=True, side_effect=all_reduce) as reduce:
        expected = torch.nn.utils.clip_grad_norm_(ours.params, 1e9) * 0.5
    assert reduce.call_count == 1
    CHANGES[change](ours)
    if change == "another pass":
        reference.backward(9)
        expected = reference.clip(1e9)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(ours.params, 1e9), expected)
    torch.testing.assert_close(ours.zero.grad_norm(), expected)


@pytest.mark.parametrize("make", [scattered_run, sharded_run], ids=["reduce-scatter", "no hook"])
@distributed(2)
def test_half_precision_gradients_are_multiplied_by_a_factor_that_is_not_rounded(
    world_size: int, make: Callable[[Case], Run]
) -> None:
    case = Case(model=half_model)
    ours, reference = make(case), plain_run(case)
    for run in (ours, reference):
        run.backward(0)
    norm = ours.zero.grad_norm()
    factor = 0.7003  # in bf16 another number
    ours.zero.clip_grad_norm_(float(norm) * factor)
    for owned in ours.zero.engine.inner.owned:
        place = slice(owned.shard.start, owned.shard.stop)
        gradient, other = owned.param.grad, reference.params[owned.shard.param].grad
        assert gradient is not None
        assert other is not None
        local = gradient.local if isinstance(gradient, ShardGrad) else gradient.flatten()[place]
        expected = other.float() * (float(norm) * factor / (norm + 1e-6))
        assert torch.equal(local, expected.bfloat16().flatten()[place])


@distributed(2, 3)
def test_changes_of_every_element_alike_equal_plain_ddp(world_size: int) -> None:
    """By torch's functions, and by ours for two optimizers, one of which has parameters that are unused."""
    parts = (Part(torch.optim.SGD, SGD, params=matrices), Part(torch.optim.SGD, SGD, params=vectors))
    case = Case(parts=parts, **BRANCHING)
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(6):
        for run in (ours, reference):
            run.backward(step)
            if step % 3 == 0:
                torch.nn.utils.clip_grad_value_(run.params, 1e-3)
            elif step % 3 == 1:
                torch.nn.utils.clip_grad_norm_(run.params[:2], 1e-3)
            else:
                run.clip(1e-3)
            run.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)


@distributed(2, 3)
def test_each_of_several_optimizers_skips_its_own_gradients_only(world_size: int) -> None:
    """As with plain DDP. A parameter as small as the vector is owned by one rank, which sees nothing of the others.

    Large gradients that are finite are not taken for infinite.
    """
    case = Case(model=Split, parts=(Part(params=matrices), Part(params=vectors)))
    ours, reference = scattered_run(case), plain_run(case)
    scalers = make_scaler(), make_scaler()
    for bad_matrix, bad_vector in ((math.inf, 1.0), (1.0, math.nan), (1.0, 1.0), (math.inf, math.inf), (1e35, 1.0)):
        for run, scaler in zip((ours, reference), scalers, strict=True):
            run.model.zero_grad()
            scaler.scale(run.model(bad_matrix, bad_vector)).backward()
            for optimizer in run.optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_values(ours, reference, f"gradients {bad_matrix} and {bad_vector}")
