"""Where parameters live: bucket views, and parameters that are moved, converted or replaced."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

from onecopy import RanksDisagreeError, ZeroRedundancyOptimizer
from tests.support.failures import expect, failure_of
from tests.support.harness import distributed
from tests.support.parameter_storage import BOTH, POLICIES, Net, Tensors, Twins, storages


@distributed(2, 3)
@POLICIES
def test_bucket_views_keep_values_and_share_storages(world_size: int, shard_by: str) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=True)
    twins.check()
    owners = {
        shard.owner for shard in twins.ours.layout.shards if shard.numel == twins.ours.layout.params[shard.param].numel
    }
    assert len(storages(twins.model)) == len(owners) + len(twins.ours.layout.cut_params)
    assert len(storages(twins.model)) < len(list(twins.model.parameters()))
    addresses = [param.data_ptr() for param in twins.model.parameters()]
    twins.train()
    assert [param.data_ptr() for param in twins.model.parameters()] == addresses


@distributed(2, 3)
@POLICIES
def test_without_bucket_views_nothing_moves(world_size: int, shard_by: str) -> None:
    torch.manual_seed(1)
    model = Net()
    addresses = [param.data_ptr() for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, shard_by=shard_by)
    model(torch.ones(1, 8, 4, 4)).sum().backward()
    optimizer.step()
    assert [param.data_ptr() for param in model.parameters()] == addresses


def clone_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def swap_strides(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data


def transpose_in_place(model: nn.Module) -> None:
    """The same memory, read in another order."""
    assert isinstance(model, Net)
    model.square.weight.data = model.square.weight.data.t()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to float64": lambda model: model.to(torch.float64),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half of it to float64": lambda model: model.get_submodule("conv").double(),
    "to channels-last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "to where it is": lambda model: model.to("cpu"),
    "data replaced": clone_data,
    "strides swapped": swap_strides,
    "transposed in place": transpose_in_place,
    "twice": lambda model: (model.double(), model.float()),
}


class MixedNet(Net):
    """Its layers may have different data types."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images.to(self.conv.weight.dtype)).mean(dim=(2, 3))
        result: Tensor = self.head(self.square(hidden.to(self.square.weight.dtype)).tanh())
        return result


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("case", MOVES)
def test_a_move_before_the_first_step_is_followed(world_size: int, case: str, shard_by: str, bucket_view: bool) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.model.__class__ = twins.plain_model.__class__ = MixedNet
    twins.both(MOVES[case])
    twins.train()
    twins.ours.consolidate_state_dict()
    if twins.ours.rank == 0:
        plain = twins.plain.state_dict()["state"]
        for index, state in twins.ours.state_dict()["state"].items():
            for key, value in state.items():
                assert value.dtype == plain[index][key].dtype
                assert torch.equal(value, plain[index][key]), (index, key)


def clone_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        clone_data(model)


def give_values_through_data(model: nn.Module) -> None:
    torch.manual_seed(5)
    for param in model.parameters():
        param.data = torch.randn_like(param)


def load_in_place(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.load_state_dict(Net().state_dict())


def tie(model: nn.Module) -> None:
    first, second = model.get_submodule("conv"), model.get_submodule("square")
    second.bias = first.bias  # both have 20 elements


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("change", [clone_data, clone_on_one_rank, give_values_through_data, load_in_place, tie])
def test_other_memory_or_values_are_followed_at_any_time(
    world_size: int, change: Callable[[nn.Module], object], shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.both(change)
    twins.train()
    if bucket_view:
        assert len(storages(twins.model)) < len(list(twins.model.parameters()))


def convert_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        model.double()


def replace_on_one_rank(model: nn.Module) -> None:
    """The optimizer's own parameters get no gradient there, and one on the other ranks."""
    if dist.get_rank() == 0:
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def give_bias(make: Callable[[], Tensor]) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model.get_parameter("head.bias"), "data", make())


Change = Callable[[nn.Module], object]
LATE, MISFIT = "was moved or converted too late: it was .* and is .*", "was given other memory that does not fit"
REFUSED: dict[str, tuple[Change, int, type[Exception], str]] = {
    "to float64": (MOVES["to float64"], 3, RuntimeError, f"'conv.weight' {LATE}float64"),
    "to channels-last": (MOVES["to channels-last"], 3, RuntimeError, f"'conv.weight' {LATE}strides"),
    "strides swapped": (swap_strides, 3, RuntimeError, f"'square.weight' {LATE}strides"),
    "another shape": (give_bias(lambda: torch.zeros(4)), 0, RuntimeError, f"'head.bias' {MISFIT}"),
    "memory with gaps": (give_bias(lambda: torch.zeros(6)[::2]), 0, RuntimeError, f"'head.bias' {MISFIT}"),
    "expanded memory": (give_bias(lambda: torch.zeros(1).expand(3)), 0, RuntimeError, f"'head.bias' {MISFIT}"),
    "on one rank": (convert_on_one_rank, 0, RanksDisagreeError, r"'conv.weight'.*rank \d: .*float64"),
    "replaced on one rank": (
        replace_on_one_rank,
        0,
        RanksDisagreeError,
        "rank 0: parameter 'conv.weight': no gradient",
    ),
}
"""A change of the model, after how many steps it comes, and the error."""


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(
    world_size: int, case: str, shard_by: str, bucket_view: bool
) -> None:
    change, steps, kind, text = REFUSED[case]
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train(steps)
    twins.ours.zero_grad()
    change(twins.model)
    if "head.bias" not in text:
        twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    expect(failure_of(twins.ours.step), kind, text)
    if case == "to float64":  # a refused conversion can be undone
        twins.model.float()
        twins.train()


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_same_memory_read_in_another_order_is_never_ignored(
    world_size: int, shard_by: str, bucket_view: bool, steps_before: int
) -> None:
    tensors = Tensors([torch.randn(40, 40)], shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    tensors.train(steps_before)
    for param in (*tensors.params, *tensors.plain_params):
        param.grad = None
        param.data = param.data.t()
    refusal: RuntimeError | None = None
    try:
        tensors.train()
    except RuntimeError as error:
        refusal = error
    if refusal is not None:
        assert steps_before > 0, "nothing stands in the way of following this"
        assert re.search(r"'group0\[0\]' was moved or converted too late", str(refusal)), str(refusal)
        return
    tensors.ours.consolidate_state_dict()
    if tensors.ours.rank == 0:
        average = tensors.ours.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(average, tensors.plain.state_dict()["state"][0]["exp_avg"])
