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


@distributed(2, 3)
@BOTH
@POLICIES
def test_new_memory_for_the_same_values_is_followed_at_any_time(
    world_size: int, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.both(clone_data)
    twins.train()
    if dist.get_rank() == 0:
        clone_data(twins.model)
    twins.train()
    if bucket_view:
        assert len(storages(twins.model)) < len(list(twins.model.parameters()))


@distributed(2)
@BOTH
@POLICIES
def test_new_values_given_through_data_are_the_ones_that_count(
    world_size: int, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    torch.manual_seed(5)
    fresh = [torch.randn_like(param) for param in twins.model.parameters()]
    for model in (twins.model, twins.plain_model):
        for param, value in zip(model.parameters(), fresh, strict=True):
            param.data = value.clone()
    twins.train()


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize(
    ("case", "name", "new"),
    [
        ("to float64", "conv.weight", "float64"),
        ("to channels-last", "conv.weight", "strides"),
        ("strides swapped", "square.weight", "strides"),
    ],
)
def test_a_conversion_after_state_exists_is_refused_by_name(
    world_size: int, case: str, name: str, new: str, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.ours.zero_grad()
    MOVES[case](twins.model)
    twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    refusal = refusal_of(twins.ours)
    assert type(refusal) is RuntimeError
    assert re.search(rf"'{name}' was moved or converted too late: it was .* and is .*{new}", str(refusal)), str(refusal)


def refusal_of(optimizer: ZeroRedundancyOptimizer) -> Exception:
    """Return the error of a step; all ranks raise before any of them checks it."""
    refusal: Exception | None = None
    try:
        optimizer.step()
    except Exception as error:
        refusal = error
    dist.barrier()
    assert refusal is not None, "the step was not refused"
    return refusal


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


@distributed(2, 3)
@BOTH
def test_a_refused_conversion_can_be_undone(world_size: int, bucket_view: bool) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.model.double()
    assert "'conv.weight'" in str(refusal_of(twins.ours))
    twins.model.float()
    twins.train()


@distributed(2, 3)
@BOTH
def test_a_conversion_on_one_rank_only_is_an_error_on_all(world_size: int, bucket_view: bool) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view)
    if dist.get_rank() == world_size - 1:
        twins.model.double()
    twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    refusal = refusal_of(twins.ours)
    assert type(refusal) is RanksDisagreeError
    assert re.search(rf"'conv.weight'.*rank {world_size - 1}: .*float64", str(refusal)), str(refusal)


@distributed(2)
@BOTH
def test_other_shapes_and_memory_with_gaps_are_refused_by_name(world_size: int, bucket_view: bool) -> None:
    for value in (torch.zeros(4), torch.zeros(6)[::2], torch.zeros(1).expand(3)):
        twins = Twins(parameters_as_bucket_view=bucket_view)
        twins.model.head.bias.data = value
        refusal = refusal_of(twins.ours)
        assert type(refusal) is RuntimeError
        assert re.search("'head.bias' was given other memory that does not fit", str(refusal)), str(refusal)


@distributed(2, 3)
def test_parameters_replaced_on_one_rank_stop_all(world_size: int) -> None:
    """The optimizer's own parameters get no gradient there, and one on the other ranks."""
    twins = Twins()
    if dist.get_rank() == 0:
        twins.model.load_state_dict(
            {key: value.clone() for key, value in twins.model.state_dict().items()}, assign=True
        )
    twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    refusal = refusal_of(twins.ours)
    assert type(refusal) is RanksDisagreeError
    assert re.search("rank 0: parameter 'conv.weight': no gradient", str(refusal)), str(refusal)


@distributed(2, 3)
@BOTH
def test_weights_tied_after_construction_raise_no_false_alarm(world_size: int, bucket_view: bool) -> None:
    def tie(model: nn.Module) -> None:
        first, second = model.get_submodule("conv"), model.get_submodule("square")
        second.bias = first.bias  # both have 20 elements

    twins = Twins(parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.both(tie)
    twins.train()


@distributed(2, 3)
@BOTH
@POLICIES
def test_loading_into_the_module_in_place_works(world_size: int, bucket_view: bool, shard_by: str) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view, shard_by=shard_by)
    twins.train()
    torch.manual_seed(9)
    state_dict = Net().state_dict()
    twins.both(lambda model: model.load_state_dict(state_dict))
    twins.check()
    twins.train()
