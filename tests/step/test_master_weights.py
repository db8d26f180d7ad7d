"""Master weights: training equals masters kept by hand, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from onecopy import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.harness import distributed
from tests.support.master_weights import (
    ADAMW,
    BF16,
    ELEMENT,
    HALF,
    MASTERS,
    POLICIES,
    RECIPES,
    ROUNDING,
    ByHand,
    Mixed,
    Part,
    adamw_for,
    compare_with_masters_by_hand,
    loss_of,
    made_copies,
    masters_in,
    optimizers_of,
    saved,
    train,
    without_masters,
    zeros_for,
)
from tests.support.models import (
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    small_model,
    values,
)


@POLICIES
@RECIPES
@distributed(2, 3)
def test_training_equals_masters_by_hand(world_size: int, parts: tuple[Part, ...], ours: dict[str, Any]) -> None:
    model, plain, coarse = (DistributedDataParallel(Mixed()) for _ in range(3))
    zeros = zeros_for(model.parameters(), parts, **ours)
    reference = ByHand(plain.parameters(), parts)
    rounded = [part.optimizer(part.chosen(list(coarse.parameters())), **part.options) for part in parts]
    for step in range(4):
        for each, optimizers in ((model, zeros), (plain, [reference]), (coarse, rounded)):
            each.zero_grad()
            loss_of(each, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    assert_replicas_equal([param.detach().float() for param in model.parameters()])
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), coarse.parameters(), strict=True))


@pytest.mark.parametrize("hook", [hook_with_zero_step, hook_with_zero_step_interleaved, reduce_scatter_hook])
@pytest.mark.parametrize("ours", [MASTERS, ELEMENT], ids=["parameter", "element"])
@distributed(2, 3)
def test_the_hooks_equal_masters_by_hand(world_size: int, ours: dict[str, Any], hook: Any) -> None:
    overlapped = hook is not reduce_scatter_hook
    model, plain = (DistributedDataParallel(Mixed(), bucket_cap_mb=0.001 if overlapped else 25) for _ in range(2))
    zero, reference = adamw_for(model, overlap_with_ddp=overlapped, **ours), ByHand(plain.parameters(), [ADAMW])
    model.register_comm_hook(*((None, hook(allreduce_hook, model, zero)) if overlapped else (zero, hook)))
    plain.register_comm_hook(None, allreduce_hook)
    for step in range(6):
        for each, optimizer in ((model, zero), (plain, reference)):
            each.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}", 0.0 if world_size == 2 else ROUNDING)
    state, exact = saved(zero), reference.optimizers[0].state_dict()
    assert_same_tree(without_masters(state), exact, "state", 0.0 if world_size == 2 else ROUNDING)


@pytest.mark.parametrize("hook", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("ours", [MASTERS, ELEMENT], ids=["parameter", "element"])
@distributed(2, 3)
def test_uneven_inputs_equal_masters_by_hand(world_size: int, ours: dict[str, Any], hook: bool) -> None:
    model, plain = (DistributedDataParallel(Mixed()) for _ in range(2))
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    if hook:
        model.register_comm_hook(zero, reduce_scatter_hook)
    for each, optimizer, joined in ((plain, reference, [plain]), (model, zero, [model, zero])):
        with Join(joined):  # type: ignore[arg-type]
            for step in range(2 + 2 * dist.get_rank()):
                each.zero_grad()
                loss_of(each, step).backward()
                optimizer.step()
    assert_equal(model.parameters(), plain.parameters(), "end", ROUNDING if hook and world_size > 2 else 0.0)
    assert_replicas_equal([param.detach().float() for param in model.parameters()])


@POLICIES
@distributed(2, 3)
def test_a_master_weight_exists_on_its_owner_only_and_only_for_low_precision_parameters(
    world_size: int, ours: dict[str, Any]
) -> None:
    model = Mixed()
    zero = adamw_for(model, **ours)
    train(list(model.parameters()), [zero], range(1))
    copies = made_copies(zero, model.parameters())
    assert all(copy.dtype == torch.float32 for copy in copies)
    elements = [param.numel() for param in model.parameters() if param.dtype == HALF]
    total = torch.tensor(sum(copy.untyped_storage().nbytes() for copy in copies))
    assert total <= 4 * (sum(elements) / world_size + max(elements)), "this rank has more than it can own"
    dist.all_reduce(total)
    assert total == 4 * sum(elements)


@distributed(2)
def test_schedule_free_averages_reach_the_parameters(world_size: int) -> None:
    part = Part(AdamWScheduleFree, {"lr": 1e-2, "foreach": False})
    model, plain = Mixed(), Mixed()
    (zero,), reference = zeros_for(model.parameters(), [part], **MASTERS), ByHand(plain.parameters(), [part])
    inner: Any = reference.optimizers[0]
    for mode in ("train", "eval", "train"):
        getattr(zero, mode)()
        getattr(inner, mode)()
        reference.write_to_params()
        assert_equal(model.parameters(), plain.parameters(), f"after {mode}()")
        if mode == "train":
            train(list(model.parameters()), [zero], range(3))
            train(list(plain.parameters()), [reference], range(3))
            assert_equal(model.parameters(), plain.parameters(), "trained")


@distributed(2)
def test_a_model_converted_before_the_first_step_gets_masters_or_an_error(world_size: int) -> None:
    model, plain = small_model(), small_model().to(HALF)
    zero = adamw_for(model, **MASTERS)
    model.to(HALF)
    reference = ByHand(plain.parameters(), [ADAMW])
    train(list(plain.parameters()), [reference], range(3))
    try:
        train(list(model.parameters()), [zero], range(3))
    except RuntimeError:
        return
    assert_equal(model.parameters(), plain.parameters(), "converted after construction")


# Writing into parameters


@torch.no_grad()
def write_rows(params: Sequence[Tensor]) -> None:
    for param in params:
        param[::2] = 0.625


def load_rows(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    write_rows(list(state.values()))
    model.load_state_dict(state)


def write_in_place(model: nn.Module) -> None:
    write_rows(list(model.parameters()))


def write_through_data(model: nn.Module) -> None:
    write_rows([param.data for param in model.parameters()])


@pytest.mark.parametrize("write", [load_rows, write_in_place, write_through_data])
@POLICIES
@distributed(2)
def test_a_written_value_wins_and_the_others_stay_precise(
    world_size: int, ours: dict[str, Any], write: Callable[[nn.Module], None]
) -> None:
    model, plain = Mixed(), Mixed()
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    for _ in range(2):
        train(list(model.parameters()), [zero], range(3))
        train(list(plain.parameters()), [reference], range(3))
        assert_equal(model.parameters(), plain.parameters(), "weights")
        write(model)
        if write.__name__ == "write_through_data":  # autograd's version counter does not show it
            zero.refresh_master_weights()
        write_rows(reference.masters)
        reference.write_to_params()
    assert any(not torch.equal(a, b) for a, b in zip(reference.masters, values(plain.parameters()), strict=True))


@distributed(2)
def test_a_written_value_wins_under_sharding_too(world_size: int) -> None:
    model, reference = compare_with_masters_by_hand(small_model, [ADAMW], BF16)
    (zero,) = optimizers_of(model)
    load_rows(model.module)
    write_rows(reference.masters)
    zero.zero_grad()
    loss_of(model, 9).backward()
    gradients = [torch.zeros_like(master) for master in reference.masters]
    for param in model.parameters():
        param.grad.zero_()  # type: ignore[union-attr]
    zero.step()
    reference.step(gradients)
    assert_equal(model.parameters(), reference.params, "weights")
    assert_equal(masters_in(saved(zero)).values(), reference.masters, "masters")


@POLICIES
@distributed(2)
def test_refreshed_master_weights_are_the_written_values_at_once(world_size: int, ours: dict[str, Any]) -> None:
    model, plain = Mixed(), Mixed()
    zero = adamw_for(model, **ours)
    reference = ByHand(plain.parameters(), [ADAMW])
    train(list(model.parameters()), [zero], range(2))
    train(list(plain.parameters()), [reference], range(2))
    zero.consolidate_state_dict()
    write_rows([param.data for param in model.parameters()])
    write_rows(reference.masters)
    zero.refresh_master_weights()
    with pytest.raises(RuntimeError, match="has changed since it was gathered"):
        zero.state_dict()
    for index, master in masters_in(saved(zero)).items():
        assert_equal([master], [reference.masters[index]], f"master weight {index}")


# State in CPU memory


@distributed(2, 3)
def test_offloading_to_where_parameters_are_changes_nothing(world_size: int) -> None:
    model, plain = small_model(), small_model()
    zero, optimizer = adamw_for(model, offload="cpu"), torch.optim.AdamW(plain.parameters(), **ADAMW.options)
    train(list(model.parameters()), [zero], range(3))
    train(list(plain.parameters()), [optimizer], range(3))
    assert_equal(model.parameters(), plain.parameters(), "weights")
    assert not made_copies(zero, model.parameters())
    assert_same_tree(saved(zero), optimizer.state_dict(), "state")
