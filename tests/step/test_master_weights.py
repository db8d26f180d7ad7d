"""Master weights: training and state dicts equal masters kept by hand, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import hook_with_zero_step, hook_with_zero_step_interleaved, reduce_scatter_hook
from tests.support.harness import distributed
from tests.support.master_weights import (
    ADAMW,
    BF16,
    HALF,
    RECIPES,
    ByHand,
    Part,
    adamw_for,
    compare_with_masters_by_hand,
    loss_of,
    made_copies,
    optimizers_of,
    wrap,
    zeros_for,
)
from tests.support.models import assert_equal, assert_replicas_equal, assert_same_tree, small_model, values
from tests.support.state_dicts import gathered

ROUNDING = 2e-2
"""Three ranks and another order of adding bf16 gradients up: a few units in the last place of bf16."""

MASTERS: dict[str, Any] = {"master_weights": True, "shard_by": "parameter"}
ELEMENT: dict[str, Any] = {"master_weights": True, "shard_by": "element"}
VIEW: dict[str, Any] = {"master_weights": True, "parameters_as_bucket_view": True}
POLICIES = pytest.mark.parametrize("ours", [MASTERS, ELEMENT, VIEW], ids=["parameter", "element", "bucket views"])
TWO_POLICIES = pytest.mark.parametrize("ours", [MASTERS, ELEMENT], ids=["parameter", "element"])


class Mixed(nn.Module):
    """Two bf16 layers with a float32 gain between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (layer.to(HALF) for layer in (small_model()[0], small_model()[2]))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 160))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last((self.gain * torch.tanh(self.first(inputs.to(HALF)))).to(HALF))
        return outputs


def train(params: Iterable[Tensor], optimizer: Any, steps: Iterable[int]) -> None:
    """Steps with the same gradients on every rank, so that training does not depend on their number."""
    params = list(params)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


class Sides:
    """Equal models, one with our optimizer and one with masters by hand, after equal steps."""

    def __init__(self, steps: int, part: Part = ADAMW, **ours: Any) -> None:
        self.model, self.plain = Mixed(), Mixed()
        (self.zero,) = zeros_for(self.model.parameters(), [part], **ours)
        self.reference = ByHand(self.plain.parameters(), [part])
        self.train(range(steps))

    def train(self, steps: Iterable[int]) -> None:
        train(self.model.parameters(), self.zero, steps)
        train(self.plain.parameters(), self.reference, steps)
        assert_equal(self.model.parameters(), self.plain.parameters(), "weights")

    def check_masters(self) -> None:
        """The masters of our state dict are those kept by hand of the parameters in half precision."""
        coarse = [index for index, param in enumerate(self.plain.parameters()) if param.dtype == HALF]
        expected = {index: self.reference.masters[index] for index in coarse}
        assert_same_tree(gathered(self.zero)["master_weights"], expected, "masters")


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "master_weights"}


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
@TWO_POLICIES
@distributed(2, 3)
def test_the_hooks_equal_masters_by_hand(world_size: int, ours: dict[str, Any], hook: Any) -> None:
    overlapped = hook is not reduce_scatter_hook
    model, plain = (DistributedDataParallel(Mixed(), bucket_cap_mb=0.001 if overlapped else 25) for _ in range(2))
    zero, reference = adamw_for(model, overlap_with_ddp=overlapped, **ours), ByHand(plain.parameters(), [ADAMW])
    model.register_comm_hook(*((None, hook(allreduce_hook, model, zero)) if overlapped else (zero, hook)))
    plain.register_comm_hook(None, allreduce_hook)
    tolerance = 0.0 if world_size == 2 else ROUNDING
    for step in range(6):
        for each, optimizer in ((model, zero), (plain, reference)):
            each.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}", tolerance)
    assert_same_tree(without_masters(gathered(zero)), reference.optimizers[0].state_dict(), "state", tolerance)


@POLICIES
@distributed(2, 3)
def test_a_master_weight_exists_on_its_owner_only_and_only_for_low_precision_parameters(
    world_size: int, ours: dict[str, Any]
) -> None:
    sides = Sides(1, **ours)
    copies = made_copies(sides.zero, sides.model.parameters())
    assert all(copy.dtype == torch.float32 for copy in copies)
    elements = [param.numel() for param in sides.model.parameters() if param.dtype == HALF]
    total = torch.tensor(sum(copy.untyped_storage().nbytes() for copy in copies))
    assert total <= 4 * (sum(elements) / world_size + max(elements)), "this rank has more than it can own"
    dist.all_reduce(total)
    assert total == 4 * sum(elements)


@distributed(2)
def test_schedule_free_averages_reach_the_parameters(world_size: int) -> None:
    sides = Sides(0, Part(AdamWScheduleFree, {"lr": 1e-2, "foreach": False}), **MASTERS)
    inner: Any = sides.reference.optimizers[0]
    for mode in ("train", "eval", "train"):
        for optimizer in (sides.zero, inner):
            getattr(optimizer, mode)()
        sides.reference.write_to_params()
        sides.train(range(3 if mode == "train" else 0))


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
    sides = Sides(3, **ours)
    sides.zero.consolidate_state_dict()
    write(sides.model)
    write_rows(sides.reference.masters)
    sides.reference.write_to_params()
    if write.__name__ == "write_through_data":  # autograd's version counter does not show it
        sides.zero.refresh_master_weights()
        with pytest.raises(RuntimeError, match="has changed since it was gathered"):
            sides.zero.state_dict()
        sides.check_masters()
    exact = zip(sides.reference.masters, values(sides.plain.parameters()), strict=True)
    assert any(not torch.equal(a, b) for a, b in exact)
    sides.train(range(3))


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
    assert_equal(gathered(zero)["master_weights"].values(), reference.masters, "masters")


# State dicts


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "before", "after"),
    [(2, 3, MASTERS, ELEMENT), (3, 2, ELEMENT, MASTERS), (2, 2, VIEW, ELEMENT), (3, 3, MASTERS, MASTERS)],
    ids=["2 to 3", "3 to 2", "2", "3"],
)
@distributed(3)
def test_a_saved_run_goes_on_bit_by_bit_with_other_ranks_and_policies(
    world_size: int, saved_by: int, loaded_by: int, before: Any, after: Any, weights_first: bool, steps: int
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    box: list[Any] = [None, None]
    if dist.get_rank() < saved_by:
        sides = Sides(steps, process_group=groups[saved_by], **before)
        box = [sides.model.state_dict(), gathered(sides.zero)]
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() < loaded_by:
        sides = Sides(1, process_group=groups[loaded_by], **after)  # of another run
        sides.reference = ByHand((plain := Mixed()).parameters(), [ADAMW])
        sides.plain = plain
        train(plain.parameters(), sides.reference, range(steps))
        loads: list[tuple[Any, Any]] = [(sides.model, box[0]), (sides.zero, box[1])]
        for target, state in loads if weights_first else reversed(loads):
            target.load_state_dict(state)
        sides.train(range(steps, steps + 3))
        sides.check_masters()
    dist.barrier()


@distributed(2)
def test_state_from_before_the_first_step_has_the_masters(world_size: int) -> None:
    for zero in (adamw_for(Mixed(), **MASTERS), *optimizers_of(wrap(small_model(), [ADAMW], BF16))):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            zero.state_dict()  # the masters are finer than the parameters
        assert gathered(zero)["master_weights"]


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "after steps"])
@distributed(2)
def test_without_masters_in_the_dict_they_begin_with_the_parameters(world_size: int, stepped: bool) -> None:
    source = Mixed()
    optimizer = torch.optim.AdamW(source.parameters(), **ADAMW.options)
    train(source.parameters(), optimizer, range(2))
    sides = Sides(1 if stepped else 0, **ELEMENT)
    sides.zero.load_state_dict(optimizer.state_dict())
    sides.reference = ByHand(sides.plain.parameters(), [ADAMW])
    sides.reference.optimizers[0].load_state_dict(optimizer.state_dict())
    sides.train(range(2, 5))
    sides.check_masters()


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sharded", [True, False], ids=["ours", "torch's"])
@distributed(2)
def test_optimizers_without_masters_load_a_dict_that_has_them(
    world_size: int, sharded: bool, dtype: torch.dtype, steps: int
) -> None:
    state = gathered(Sides(steps, **ELEMENT).zero)
    target, plain = Mixed().to(dtype), Mixed().to(dtype)
    optimizer: Optimizer = adamw_for(target) if sharded else torch.optim.AdamW(target.parameters(), **ADAMW.options)
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW.options)
    optimizer.load_state_dict(deepcopy(state))  # torch's own go on with the tensors they are given
    reference.load_state_dict(without_masters(state))
    train(target.parameters(), optimizer, range(3))
    train(plain.parameters(), reference, range(3))
    assert_equal(target.parameters(), plain.parameters(), "weights")
