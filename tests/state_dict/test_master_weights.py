"""State dicts with master weights: runs go on bit by bit, with and without masters in the dict."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from tests.support.harness import distributed
from tests.support.master_weights import (
    ADAMW,
    BF16,
    ELEMENT,
    HALF,
    MASTERS,
    POLICIES,
    VIEW,
    ByHand,
    Mixed,
    adamw_for,
    compare_with_masters_by_hand,
    loss_of,
    masters_in,
    optimizers_of,
    saved,
    train,
    without_masters,
    wrap,
)
from tests.support.models import (
    assert_equal,
    assert_same_tree,
    small_model,
)

# Checkpoints


@POLICIES
@distributed(2, 3)
def test_a_checkpoint_has_whole_masters_beside_the_plain_state(world_size: int, ours: dict[str, Any]) -> None:
    model, plain = Mixed(), Mixed()
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    train(list(model.parameters()), [zero], range(3))
    train(list(plain.parameters()), [reference], range(3))
    state = saved(zero)
    coarse = {index: master for index, master in enumerate(reference.masters) if reference.params[index].dtype == HALF}
    assert_same_tree(masters_in(state), coarse, "masters")
    assert_same_tree(without_masters(state), reference.optimizers[0].state_dict(), "state")


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "before", "after"),
    [(2, 3, MASTERS, ELEMENT), (3, 2, ELEMENT, MASTERS), (2, 2, VIEW, ELEMENT), (3, 3, MASTERS, MASTERS)],
    ids=["2 to 3", "3 to 2", "2", "3"],
)
@distributed(3)
def test_a_saved_run_goes_on_bit_by_bit_with_other_ranks_and_policies(
    world_size: int,
    saved_by: int,
    loaded_by: int,
    before: dict[str, Any],
    after: dict[str, Any],
    weights_first: bool,
    steps: int,
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    plain = Mixed()
    reference = ByHand(plain.parameters(), [ADAMW])
    train(list(plain.parameters()), [reference], range(steps + 3))
    box: list[Any] = [None, None]
    if dist.get_rank() < saved_by:
        model = Mixed()
        zero = adamw_for(model, process_group=groups[saved_by], **before)
        train(list(model.parameters()), [zero], range(steps))
        box = [model.state_dict(), saved(zero)]
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() < loaded_by:
        weights, state = box
        model = Mixed()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.25)
        zero = adamw_for(model, process_group=groups[loaded_by], **after)
        if weights_first:
            model.load_state_dict(weights)
        zero.load_state_dict(state)
        if not weights_first:
            model.load_state_dict(weights)
        train(list(model.parameters()), [zero], range(steps, steps + 3))
        assert_equal(model.parameters(), plain.parameters(), "weights")
        assert_equal(masters_in(saved(zero)).values(), [reference.masters[i] for i in masters_in(state)], "masters")
    dist.barrier()


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@distributed(2)
def test_a_saved_sharded_run_goes_on_bit_by_bit(world_size: int, steps: int, weights_first: bool) -> None:
    whole, reference = compare_with_masters_by_hand(small_model, [ADAMW], BF16, steps=6)
    model, _ = compare_with_masters_by_hand(small_model, [ADAMW], BF16, steps=steps)
    weights, state = deepcopy(model.state_dict()), saved(optimizers_of(model)[0])
    model = wrap(small_model(seed=8), [ADAMW], BF16)
    (zero,) = optimizers_of(model)
    if weights_first:
        model.load_state_dict(weights)
    zero.load_state_dict(state)
    if not weights_first:
        model.load_state_dict(weights)
    for step in range(steps, 6):
        zero.zero_grad()
        loss_of(model, step).backward()
        zero.step()
    assert_equal(model.parameters(), whole.parameters(), "weights")
    assert_equal(masters_in(saved(zero)).values(), reference.masters, "masters")


@distributed(2)
def test_state_from_before_the_first_step_has_the_masters(world_size: int) -> None:
    for zero in (adamw_for(Mixed(), **MASTERS), *optimizers_of(wrap(small_model(), [ADAMW], BF16))):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            zero.state_dict()  # the masters are finer than the parameters
        assert masters_in(saved(zero))


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "after steps"])
@distributed(2)
def test_without_masters_in_the_dict_they_begin_with_the_parameters(world_size: int, stepped: bool) -> None:
    model, plain, source = Mixed(), Mixed(), Mixed()
    optimizer = torch.optim.AdamW(source.parameters(), **ADAMW.options)
    train(list(source.parameters()), [optimizer], range(2))
    zero = adamw_for(model, **ELEMENT)
    if stepped:
        train(list(model.parameters()), [zero], range(1))
    else:
        model.load_state_dict(source.state_dict())
    plain.load_state_dict(model.state_dict())
    zero.load_state_dict(optimizer.state_dict())
    reference = ByHand(plain.parameters(), [ADAMW])
    reference.optimizers[0].load_state_dict(optimizer.state_dict())
    train(list(model.parameters()), [zero], range(2, 5))
    train(list(plain.parameters()), [reference], range(2, 5))
    assert_equal(model.parameters(), plain.parameters(), "weights")
    assert_equal(masters_in(saved(zero)).values(), [reference.masters[i] for i in (1, 2, 3, 4)], "masters")


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sharded", [True, False], ids=["ours", "torch's"])
@distributed(2)
def test_optimizers_without_masters_load_a_dict_that_has_them(
    world_size: int, sharded: bool, dtype: torch.dtype, steps: int
) -> None:
    model, target, plain = Mixed(), Mixed().to(dtype), Mixed().to(dtype)
    zero = adamw_for(model, **ELEMENT)
    train(list(model.parameters()), [zero], range(steps))
    state = saved(zero)
    optimizer: Optimizer = adamw_for(target) if sharded else torch.optim.AdamW(target.parameters(), **ADAMW.options)
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW.options)
    optimizer.load_state_dict(deepcopy(state))  # torch's own go on with the tensors they are given
    reference.load_state_dict(without_masters(state))
    train(list(target.parameters()), [optimizer], range(3))
    train(list(plain.parameters()), [reference], range(3))
    assert_equal(target.parameters(), plain.parameters(), "weights")
